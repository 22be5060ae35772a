// The flash kernel: a block owns tile_m rows and one split of the keys, and streams KV tiles through a ring of
// shared-memory stages. Q stays in registers: each warp holds its slice of the head dimension, computes a partial
// S = Q K^T, and the partial S of a row group meet in shared memory, where the softmax turns them into P (bf16).
// For O += P V the same warps own slices of the latent columns instead. V is the first columns of the K rows.
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

template <typename Config>
struct Tiling {
  static constexpr int kThreads = Config::kWarps * 32;
  static constexpr int kHeadDim = Config::kLatent + Config::kRope;
  static constexpr int kGroupWarps = Config::kWarps / Config::kRowGroups;
  static constexpr int kGroupRows = Config::kTileM / Config::kRowGroups;
  static constexpr int kScoreParts = kGroupWarps / Config::kKSplit;
  static constexpr int kScoreRows = kGroupRows / kScoreParts;
  // mma tiles a warp holds: of S and Q (m, n, k), and of O (m, n).
  static constexpr int kScoreM = kScoreRows / 16;
  static constexpr int kScoreN = Config::kTileN / 8;
  static constexpr int kScoreK = kHeadDim / 16 / Config::kKSplit;
  static constexpr int kOutM = kGroupRows / 16;
  static constexpr int kOutColumns = Config::kLatent / kGroupWarps;
  static constexpr int kOutN = kOutColumns / 8;
  // Softmax: 8 lanes a row, 4 rows a pass.
  static constexpr int kSoftmaxRows = kGroupRows / kGroupWarps;
  static constexpr int kPasses = kSoftmaxRows / 4;
  static constexpr int kLaneKeys = Config::kTileN / 8;
  // Shared memory: rows padded so that ldmatrix touches every bank once.
  static constexpr int kRowBytes = Config::kRowBytes;
  static constexpr int kScoreStride = Config::kScoreStride;
  static constexpr int kKeyBlocks = Config::kTileN / 16;
  static constexpr int kFillRows = Config::kTileN / Config::kWarps;

  static_assert(kScoreRows == Config::kScoreRows, "the family and the kernel disagree");
  static_assert(kRowBytes == kHeadDim * 2 + 16, "the family and the kernel disagree");
  static_assert(kScoreRows % 16 == 0 && kGroupRows % 16 == 0 && kSoftmaxRows % 4 == 0, "whole mma tiles and passes");
  static_assert(kHeadDim / 16 % Config::kKSplit == 0 && kOutColumns % 16 == 0, "whole mma tiles");
  static_assert(Config::kTileN % 16 == 0 && kFillRows * Config::kWarps == Config::kTileN, "whole rows a warp");
  static_assert(!Config::kDeferredRefill || Config::kStages >= 2, "a deferred refill needs a second stage");
  static_assert(Config::kFullOffset + Config::kStages * 8 <= Config::kSharedBytes, "barriers lie inside");
};

// The ring of KV tiles. Every warp fetches its share of a tile's rows; a stage is full when all rows have landed
// and empty when every warp has left it.
template <typename Config>
struct KvRing {
  using T = Tiling<Config>;
  const Params& params;
  const Request& request;
  int first_tile;
  int tiles;
  uint32_t stages;
  uint32_t full;
  uint32_t empty;

  KGEN_DEVICE void init() const {
    if (thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; stage++) {
        mbarrier_init(full + stage * 8, Config::kBulkGather ? 1 : T::kThreads);
        mbarrier_init(empty + stage * 8, Config::kWarps);
      }
      mbarrier_init_fence();
    }
    block_sync();
  }

  // Where this lane's row of a tile is; past the end, the last key again, so that every tile has all its bytes.
  KGEN_DEVICE int place(int tile) const {
    const int warp = thread_index() / 32, lane = thread_index() % 32, row = warp * T::kFillRows + lane % T::kFillRows;
    const int key = (first_tile + tile) * Config::kTileN + row;
    return key_place(params, request, key < request.keys() ? key : request.keys() - 1);
  }

  KGEN_DEVICE void fill(int tile, int place) const {
    const int stage = tile % Config::kStages, warp = thread_index() / 32, lane = thread_index() % 32;
    const uint32_t rows = stages + (stage * Config::kTileN + warp * T::kFillRows) * T::kRowBytes;
    const uint32_t barrier = full + stage * 8;
    if constexpr (Config::kBulkGather) {
      if (thread_index() == 0) mbarrier_arrive_expect(barrier, Config::kTileN * T::kHeadDim * 2);
      if (lane < T::kFillRows) {
        bulk_copy(rows + lane * T::kRowBytes, key_row<T::kHeadDim>(params, place), T::kHeadDim * 2, barrier);
      }
    } else {
      constexpr int kRowChunks = T::kHeadDim * 2 / 16, kChunks = T::kFillRows * kRowChunks;
      KGEN_UNROLL
      for (int first = 0; first < kChunks; first += 32) {
        const int chunk = first + lane, row = chunk / kRowChunks, part = chunk % kRowChunks;
        const int source = shuffle(place, row % T::kFillRows);
        if (chunk < kChunks) {
          cp_async_16(rows + row * T::kRowBytes + part * 16, key_row<T::kHeadDim>(params, source) + part * 8);
        }
      }
      cp_async_arrive(barrier);
    }
  }

  // The shared address of a tile once it has landed.
  KGEN_DEVICE uint32_t wait(int tile) const {
    const int stage = tile % Config::kStages;
    mbarrier_wait(full + stage * 8, tile / Config::kStages % 2);
    return stages + stage * Config::kTileN * T::kRowBytes;
  }

  KGEN_DEVICE void leave(int tile) const {
    warp_sync();
    if (thread_index() % 32 == 0) mbarrier_arrive(empty + tile % Config::kStages * 8);
  }

  // Fetches the tile that takes over the stage of `tile`, once every warp has left that.
  KGEN_DEVICE void refill(int tile, int place) const {
    if (tile + Config::kStages >= tiles) return;
    mbarrier_wait(empty + tile % Config::kStages * 8, tile / Config::kStages % 2);
    fill(tile + Config::kStages, place);
  }
};

// Q fragments of this warp's rows and slice of the head dimension; rows past the end are zero.
template <typename Config>
KGEN_DEVICE void load_query(const Params& params, int64_t first_row, int row, int rows, int column,
                            uint32_t (&q)[Tiling<Config>::kScoreM][Tiling<Config>::kScoreK][4]) {
  using T = Tiling<Config>;
  const int lane = thread_index() % 32;
  KGEN_UNROLL
  for (int m = 0; m < T::kScoreM; m++) {
    KGEN_UNROLL
    for (int k = 0; k < T::kScoreK; k++) {
      KGEN_UNROLL
      for (int part = 0; part < 4; part++) {
        const int r = row + m * 16 + lane / 4 + part % 2 * 8;
        const int64_t at = (first_row + r) * T::kHeadDim + column + k * 16 + part / 2 * 8 + lane % 4 * 2;
        q[m][k][part] = r < rows ? params.q.template load_as<uint32_t>(at) : 0;
      }
    }
  }
}

// This warp's partial S of one tile. K fragments are fetched one step ahead of their use.
template <typename Config>
KGEN_DEVICE void score_tile(const uint32_t (&q)[Tiling<Config>::kScoreM][Tiling<Config>::kScoreK][4], uint32_t keys,
                            float (&s)[Tiling<Config>::kScoreM][Tiling<Config>::kScoreN][4]) {
  using T = Tiling<Config>;
  uint32_t k[2][T::kKeyBlocks][4];
  KGEN_UNROLL
  for (int m = 0; m < T::kScoreM; m++) {
    KGEN_UNROLL
    for (int n = 0; n < T::kScoreN; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
  KGEN_UNROLL
  for (int block = 0; block < T::kKeyBlocks; block++) ldmatrix_x4(k[0][block], keys + block * 16 * T::kRowBytes);
  KGEN_UNROLL
  for (int step = 0; step < T::kScoreK; step++) {
    if (step + 1 < T::kScoreK) {
      KGEN_UNROLL
      for (int block = 0; block < T::kKeyBlocks; block++) {
        ldmatrix_x4(k[(step + 1) % 2][block], keys + block * 16 * T::kRowBytes + (step + 1) * 32);
      }
    }
    KGEN_UNROLL
    for (int block = 0; block < T::kKeyBlocks; block++) {
      const uint32_t(&b)[4] = k[step % 2][block];
      KGEN_UNROLL
      for (int m = 0; m < T::kScoreM; m++) {
        mma_bf16_16x8x16(s[m][2 * block], q[m][step], b[0], b[1]);
        mma_bf16_16x8x16(s[m][2 * block + 1], q[m][step], b[2], b[3]);
      }
    }
  }
}

// O += P V for this warp's columns. `probabilities` and `values` are this lane's ldmatrix addresses.
template <typename Config>
KGEN_DEVICE void value_tile(uint32_t probabilities, uint32_t values,
                            float (&o)[Tiling<Config>::kOutM][Tiling<Config>::kOutN][4]) {
  using T = Tiling<Config>;
  KGEN_UNROLL
  for (int block = 0; block < T::kKeyBlocks; block++) {
    uint32_t p[T::kOutM][4], v[2][4];
    KGEN_UNROLL
    for (int m = 0; m < T::kOutM; m++) ldmatrix_x4(p[m], probabilities + m * 16 * T::kScoreStride * 2 + block * 32);
    ldmatrix_x4_trans(v[0], values + block * 16 * T::kRowBytes);
    KGEN_UNROLL
    for (int n = 0; n < T::kOutN / 2; n++) {
      if (n + 1 < T::kOutN / 2) ldmatrix_x4_trans(v[(n + 1) % 2], values + block * 16 * T::kRowBytes + (n + 1) * 32);
      KGEN_UNROLL
      for (int m = 0; m < T::kOutM; m++) {
        mma_bf16_16x8x16(o[m][2 * n], p[m], v[n % 2][0], v[n % 2][1]);
        mma_bf16_16x8x16(o[m][2 * n + 1], p[m], v[n % 2][2], v[n % 2][3]);
      }
    }
  }
}

// The running softmax of the rows that this lane's group of 8 owns: peak (base 2, scaled) and this lane's share
// of the sum.
template <typename Config>
struct Softmax {
  using T = Tiling<Config>;
  float peak[T::kPasses];
  float total[T::kPasses];

  // Sums the partial S of one pass's row over the slices of the head dimension, scaled to base 2.
  KGEN_DEVICE static void gather(Shared<float> partials, int group, int row, int key, float scale,
                                 float (&s)[T::kLaneKeys]) {
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i++) s[i] = 0;
    KGEN_UNROLL
    for (int slice = 0; slice < Config::kKSplit; slice++) {
      const int warp = group * T::kGroupWarps + slice * T::kScoreParts + row / T::kScoreRows;
      const int at = (warp * T::kScoreRows + row % T::kScoreRows) * T::kScoreStride + key;
      KGEN_UNROLL
      for (int i = 0; i < T::kLaneKeys; i += 2) {
        const float2v pair = partials.template load_as<float2v>(at + i);
        s[i] += pair.x;
        s[i + 1] += pair.y;
      }
    }
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i++) s[i] *= scale;
  }

  // Folds one row's scores into the state; leaves the weights in `s` and returns the factor for older sums.
  KGEN_DEVICE float fold(int pass, float (&s)[T::kLaneKeys]) {
    float tile_peak = s[0];
    KGEN_UNROLL
    for (int i = 1; i < T::kLaneKeys; i++) tile_peak = maximum(tile_peak, s[i]);
    const float new_peak = maximum(peak[pass], lanes_maximum<8>(tile_peak));
    const float base = new_peak == -infinity() ? 0 : new_peak;  // a row that has seen nothing yet
    const float rescale = exp2_approx(peak[pass] - base);
    peak[pass] = new_peak;
    total[pass] *= rescale;
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i++) {
      s[i] = exp2_approx(s[i] - base);
      total[pass] += s[i];
    }
    return rescale;
  }

  KGEN_DEVICE float row_total(int pass) const { return lanes_sum<8>(total[pass]); }
};

template <typename Config>
KGEN_DEVICE void flash(const Params& params) {
  using T = Tiling<Config>;
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int group = warp / T::kGroupWarps, group_warp = warp % T::kGroupWarps;
  const int part = group_warp % T::kScoreParts, slice = group_warp / T::kScoreParts;

  // This block's rows and tiles; blocks beyond the lengths that are on the device have none.
  const int split = block_index_y();
  if (block_index_z() >= params.batch) return;
  const Request request = load_request(params, block_index_z());
  const int rows = request.nodes * params.heads, tile_row = block_index_x() * Config::kTileM;
  if (tile_row >= rows) return;
  const int64_t first_row = static_cast<int64_t>(request.first_node) * params.heads;
  const int all_tiles = (request.keys() + Config::kTileN - 1) / Config::kTileN;
  const int share = (all_tiles + params.splits - 1) / params.splits, first_tile = split * share;
  const int tiles = (first_tile + share < all_tiles ? first_tile + share : all_tiles) - first_tile;
  if (tiles <= 0) {
    const int row = tile_row + thread_index();
    if (thread_index() < Config::kTileM && row < rows) {
      params.partial_lse.store(static_cast<int64_t>(split) * params.partial_rows + first_row + row, -infinity());
    }
    return;
  }

  const Shared<bf16> kv = shared_array<bf16>(Config::kKvOffset, Config::kStages * Config::kTileN * T::kRowBytes / 2);
  const Shared<float> partials =
      shared_array<float>(Config::kScoreOffset, Config::kWarps * T::kScoreRows * T::kScoreStride);
  const Shared<uint32_t> probabilities =
      shared_array<uint32_t>(Config::kProbabilityOffset, Config::kTileM * T::kScoreStride / 2);
  const Shared<float> rescales = shared_array<float>(Config::kRescaleOffset, Config::kTileM);
  const KvRing<Config> ring{params,
                            request,
                            first_tile,
                            tiles,
                            kv.address(),
                            shared_array<uint64_t>(Config::kFullOffset, Config::kStages).address(),
                            shared_array<uint64_t>(Config::kEmptyOffset, Config::kStages).address()};
  ring.init();
  for (int tile = 0; tile < Config::kStages && tile < tiles; tile++) ring.fill(tile, ring.place(tile));

  uint32_t q[T::kScoreM][T::kScoreK][4];
  const int score_row = group * T::kGroupRows + part * T::kScoreRows, score_column = slice * T::kScoreK * 16;
  load_query<Config>(params, first_row, tile_row + score_row, rows, score_column, q);

  float o[T::kOutM][T::kOutN][4];
  KGEN_UNROLL
  for (int m = 0; m < T::kOutM; m++) {
    KGEN_UNROLL
    for (int n = 0; n < T::kOutN; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
  }
  Softmax<Config> softmax;
  KGEN_UNROLL
  for (int pass = 0; pass < T::kPasses; pass++) {
    softmax.peak[pass] = -infinity();
    softmax.total[pass] = 0;
  }

  // Fixed parts of this lane's shared addresses.
  const uint32_t key_lane = (lane % 8 + lane / 16 * 8) * T::kRowBytes + (score_column + lane / 8 % 2 * 8) * 2;
  const uint32_t value_lane = lane % 16 * T::kRowBytes + (group_warp * T::kOutColumns + lane / 16 * 8) * 2;
  const uint32_t probability_lane =
      probabilities.address() + ((group * T::kGroupRows + lane % 16) * T::kScoreStride + lane / 16 * 8) * 2;
  const int softmax_row = group_warp * T::kSoftmaxRows + lane / 8, lane_key = lane % 8 * T::kLaneKeys;

  int next_place = 0;
  for (int tile = 0; tile < tiles; tile++) {
    const uint32_t stage = ring.wait(tile);
    float s[T::kScoreM][T::kScoreN][4];
    score_tile<Config>(q, stage + key_lane, s);
    KGEN_UNROLL
    for (int m = 0; m < T::kScoreM; m++) {
      KGEN_UNROLL
      for (int n = 0; n < T::kScoreN; n++) {
        const int at = (warp * T::kScoreRows + m * 16 + lane / 4) * T::kScoreStride + n * 8 + lane % 4 * 2;
        partials.store_as(at, float2v{s[m][n][0], s[m][n][1]});
        partials.store_as(at + 8 * T::kScoreStride, float2v{s[m][n][2], s[m][n][3]});
      }
    }
    named_barrier_sync(1 + group, T::kGroupWarps * 32);
    if (Config::kDeferredRefill && tile > 0) ring.refill(tile - 1, next_place);
    next_place = ring.place(tile + Config::kStages);

    const int first_key = (first_tile + tile) * Config::kTileN;
    const bool tail = first_key + Config::kTileN > request.prefix;
    KGEN_UNROLL
    for (int pass = 0; pass < T::kPasses; pass++) {
      const int row = softmax_row + pass * 4;
      float scores[T::kLaneKeys];
      Softmax<Config>::gather(partials, group, row, lane_key, params.scale_log2, scores);
      if (tail) {
        const int last = rows - 1, at = tile_row + group * T::kGroupRows + row;
        const int node = (at < last ? at : last) / params.heads;
        KGEN_UNROLL
        for (int i = 0; i < T::kLaneKeys; i++) {
          const int draft = first_key + lane_key + i - request.prefix;
          if (draft >= 0 && !sees_draft(params, request, node, draft)) scores[i] = -infinity();
        }
      }
      const float rescale = softmax.fold(pass, scores);
      const int at = ((group * T::kGroupRows + row) * T::kScoreStride + lane_key) / 2;
      KGEN_UNROLL
      for (int i = 0; i < T::kLaneKeys; i += 2) {
        probabilities.store(at + i / 2, pack_bf16x2(scores[i], scores[i + 1]));
      }
      if (lane % 8 == 0) rescales.store(group * T::kGroupRows + row, rescale);
    }
    named_barrier_sync(1 + group, T::kGroupWarps * 32);

    KGEN_UNROLL
    for (int m = 0; m < T::kOutM; m++) {
      const int row = group * T::kGroupRows + m * 16 + lane / 4;
      const float upper = rescales.load(row), lower = rescales.load(row + 8);
      if (warp_any(upper != 1 || lower != 1)) {
        KGEN_UNROLL
        for (int n = 0; n < T::kOutN; n++) {
          o[m][n][0] *= upper;
          o[m][n][1] *= upper;
          o[m][n][2] *= lower;
          o[m][n][3] *= lower;
        }
      }
    }
    value_tile<Config>(probability_lane, stage + value_lane, o);
    ring.leave(tile);
    if (!Config::kDeferredRefill) ring.refill(tile, next_place);
  }

  // Normalise: the softmax rows hand 1/total to the warps that own their columns.
  named_barrier_sync(1 + group, T::kGroupWarps * 32);
  KGEN_UNROLL
  for (int pass = 0; pass < T::kPasses; pass++) {
    const float total = softmax.row_total(pass);
    const int row = group * T::kGroupRows + softmax_row + pass * 4;
    if (lane % 8 == 0) {
      rescales.store(row, total > 0 ? 1 / total : 0);
      const float lse = total > 0 ? softmax.peak[pass] + log2_approx(total) : -infinity();
      const int64_t at = first_row + tile_row + row;
      if (tile_row + row < rows) {
        if (params.splits > 1) {
          params.partial_lse.store(static_cast<int64_t>(split) * params.partial_rows + at, lse);
        } else if (params.lse) {
          params.lse.store(at, lse * kLn2);
        }
      }
    }
  }
  named_barrier_sync(1 + group, T::kGroupWarps * 32);
  KGEN_UNROLL
  for (int m = 0; m < T::kOutM; m++) {
    KGEN_UNROLL
    for (int half = 0; half < 2; half++) {
      const int row = group * T::kGroupRows + m * 16 + half * 8 + lane / 4;
      const float inverse = rescales.load(row);
      if (tile_row + row >= rows) continue;
      const int64_t out_row = first_row + tile_row + row;
      KGEN_UNROLL
      for (int n = 0; n < T::kOutN; n++) {
        const int column = group_warp * T::kOutColumns + n * 8 + lane % 4 * 2;
        const float x = o[m][n][half * 2] * inverse, y = o[m][n][half * 2 + 1] * inverse;
        if (params.splits > 1) {
          const int64_t at = static_cast<int64_t>(split) * params.partial_rows + out_row;
          params.partial_out.store_as(at * Config::kLatent + column, float2v{x, y});
        } else {
          params.out.store_as(out_row * Config::kLatent + column, pack_bf16x2(x, y));
        }
      }
    }
  }
}

}  // namespace kgen::verify_mla
