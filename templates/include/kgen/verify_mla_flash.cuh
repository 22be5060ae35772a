// The flash kernel: a block owns tile_m rows and one split of the keys, and streams KV tiles through a ring of
// shared-memory stages. Q stays in registers: each warp holds its slice of the head dimension and computes a partial
// S = Q K^T. The warps that share rows hand each other the partial S of the rows that the other will soften, through
// inboxes in shared memory; P (16 bits) meets there too. For O += P V a row group's warps own slices of the latent
// columns instead. V is the first columns of the K rows. Row groups run apart, so that one multiplies while another
// softens. The warps that multiply also copy the rows, or other warps do nothing else.
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_elements.cuh>
#include <kgen/verify_mla_problem.cuh>
#include <kgen/verify_mla_schedule.cuh>

namespace kgen::verify_mla {

template <typename Config>
struct Tiling {
  static constexpr int kThreads = (Config::kWarps + Config::kCopyWarps) * 32;
  static constexpr int kHeadDim = Config::kLatent + Config::kRope;
  static constexpr int kElementBytes = sizeof(typename Config::Element), kDenseBytes = kHeadDim * kElementBytes;
  static constexpr int kGroupWarps = Config::kWarps / Config::kRowGroups;
  static constexpr int kGroupRows = Config::kTileM / Config::kRowGroups;
  // For S, a group's warps are slices of the head dimension x parts of the keys (both: sharers) x parts of the rows.
  static constexpr int kSharers = Config::kKSplit * Config::kKeySplit;
  static constexpr int kScoreParts = kGroupWarps / kSharers;
  static constexpr int kScoreRows = kGroupRows / kScoreParts;
  // mma tiles a warp holds: of S and Q (m, n, k), and of O (m, n). Two sums of S where one has too few to hide latency.
  static constexpr int kScoreM = kScoreRows / 16;
  static constexpr int kScoreKeys = Config::kTileN / Config::kKeySplit;
  static constexpr int kScoreK = kHeadDim / 16 / Config::kKSplit;
  static constexpr int kFetchSteps = Fragments<typename Config::Element>::kSteps;
  static constexpr int kFetches = (kScoreK + kFetchSteps - 1) / kFetchSteps;  // of 16 keys
  static constexpr int kScoreSums = kScoreM == 1 ? 2 : 1;
  static constexpr int kOutM = kGroupRows / 16;
  static constexpr int kOutColumns = Config::kLatent / kGroupWarps;
  static constexpr int kOutN = kOutColumns / 8;
  static constexpr int kAhead = 2;  // uses that a fragment of K or V is fetched ahead
  // Softmax: a warp owns kOwnRows rows of its part, a quad of lanes each, as the mma leaves them.
  static constexpr int kOwnRows = kScoreRows / kSharers;
  static constexpr int kOwnLanes = kOwnRows * 4;
  static constexpr int kLaneKeys = Config::kTileN / 4;
  static constexpr int kPacketFloats = kOwnRows * kScoreKeys;
  // Whether a warp keeps its own share of S in registers. The rows of its mma tiles are in an order of its own then,
  // by eights: those that it softens come first. Else it sends to itself too, in an inbox like the others'.
  static constexpr bool kKeepsOwn = kOwnRows == 8 && Config::kKeySplit == 1;
  static constexpr int kSenders = kSharers - (kKeepsOwn ? 1 : 0);
  // Shared memory: rows padded so that ldmatrix touches every bank once.
  static constexpr int kRowBytes = Config::kRowBytes;
  static constexpr int kProbabilityStride = Config::kProbabilityStride;
  static constexpr int kEightWords = kProbabilityStride * 4;  // of eight rows of P
  // Where row `row` of a group's `eight`th eight starts.
  KGEN_DEVICE static int probability_row(int group, int eight, int row) {
    return (group * (kGroupRows / 8) + eight) * kEightWords + row * (kProbabilityStride / 2);
  }
  static constexpr int kKeyBlocks = Config::kTileN / 16, kScoreBlocks = kScoreKeys / 16;
  static constexpr int kFillWarps = Config::kCopyWarps > 0 ? Config::kCopyWarps : kGroupWarps;
  static constexpr int kFillRows = Config::kTileN / kFillWarps;
  static constexpr int kRingBarriers = Config::kStages * (Config::kCopyWarps > 0 ? 2 : 1);

  static_assert(kPacketFloats == Config::kPacketFloats, "the family and the kernel disagree");
  static_assert(kRowBytes == kDenseBytes + 16, "the family and the kernel disagree");
  static_assert(kScoreRows % 16 == 0 && kGroupRows % 16 == 0, "whole mma tiles");
  static_assert(kOwnRows == 2 || kOwnRows == 4 || kOwnRows == 8, "whole quads");
  static_assert(kHeadDim / 16 % Config::kKSplit == 0 && kOutColumns % 32 == 0, "whole mma tiles, 64 bytes a quad");
  static_assert(kScoreKeys % 16 == 0 && kFillRows * kFillWarps == Config::kTileN, "whole rows a warp");
  static_assert(Config::kStages >= 2, "a stage is refilled while the next is used");
  static_assert(Config::kFullOffset + kRingBarriers * 8 <= Config::kSharedBytes, "barriers lie inside");
};

// This lane, in the main loop. Where registers are scarce it is read anew each time, and what is made of it is made anew.
template <typename Config>
KGEN_DEVICE int step_lane() {
  if constexpr (Config::kWarpRegisters > 0) return lane_index();
  return thread_index() % 32;
}

// The barriers of a ring's stages; block_sync publishes them.
template <typename Config>
KGEN_DEVICE void init_ring(uint32_t full) {
  if (thread_index() != 0) return;
  for (int stage = 0; stage < Config::kStages; stage++) {
    mbarrier_init(full + stage * 8, Config::kBulkGather ? 1 : Tiling<Config>::kFillWarps * 32);
    if (Config::kCopyWarps > 0) mbarrier_init(full + (Config::kStages + stage) * 8, Config::kWarps * 32);
  }
  mbarrier_init_fence();
}

// The ring of KV tiles. A stage is full when all its rows have landed. The row groups take turns in filling stages, or
// copying warps fill all of them; those have a second barrier a stage, for when all other warps have left it.
template <typename Config>
struct KvRing {
  using T = Tiling<Config>;
  static constexpr int kLeft = 1 + Config::kRowGroups;  // the first stage's named barrier
  static constexpr int kQueryLoaded = kLeft;            // of a block with copying warps
  static constexpr int kFirst = (Config::kStages + Config::kRowGroups - 1) / Config::kRowGroups;
  const Params& params;
  const Request& request;
  int first_tile;
  int tiles;
  int group;
  int warp;  // of those that fill a stage together
  uint32_t lane;
  uint32_t stages;
  uint32_t full;

  // Where this lane's row of a tile is; past the end, the last key again, so that every tile has all its bytes.
  KGEN_DEVICE int place(int tile) const {
    const int first = (first_tile + tile) * Config::kTileN + warp * T::kFillRows;
    const uint32_t row = lane % T::kFillRows;
    if (first + T::kFillRows <= request.prefix) {  // as nearly always: the same for all lanes
      return load_index<kKvIndices>(params, params.kv_indices, request.first_key + first, row);
    }
    const int key = first + static_cast<int>(row);
    return key_place(params, request, key < request.keys() ? key : request.keys() - 1);
  }

  // By the warps that fill a stage together.
  KGEN_DEVICE void fill(int stage, int place) const {
    const uint32_t rows = stages + (stage * Config::kTileN + warp * T::kFillRows) * T::kRowBytes;
    const uint32_t barrier = full + stage * 8;
    const Global<const uint8_t> source = key_row<T::kDenseBytes>(params, place);
    if constexpr (Config::kBulkGather) {
      Global<const uint8_t> sources[T::kFillRows];
      KGEN_UNROLL
      for (int row = 0; row < T::kFillRows; row++) sources[row] = shuffle(source, row);
      if (warp == 0 && lane == 0) mbarrier_arrive_expect(barrier, Config::kTileN * T::kDenseBytes);
      KGEN_UNROLL
      for (int row = 0; row < T::kFillRows; row++) {
        warp_bulk_copy(rows + row * T::kRowBytes, sources[row], T::kDenseBytes, barrier);
      }
    } else {
      constexpr int kRowChunks = T::kDenseBytes / 16, kChunks = T::kFillRows * kRowChunks;
      KGEN_UNROLL
      for (int first = 0; first < kChunks; first += 32) {
        const int chunk = first + static_cast<int>(lane), row = chunk / kRowChunks, part = chunk % kRowChunks;
        const Global<const uint8_t> row_source = shuffle(source, row % T::kFillRows);
        if (chunk < kChunks) cp_async_16(rows + row * T::kRowBytes + part * 16, row_source + part * 16);
      }
      cp_async_arrive(barrier);
    }
  }

  // Where the rows of the first tiles are that this group fetches.
  KGEN_DEVICE void first_places(int (&places)[kFirst]) const {
    KGEN_UNROLL
    for (int i = 0; i < kFirst; i++) places[i] = place(group + i * Config::kRowGroups);
  }

  // Of those, from the `begin`th to before the `end`th.
  KGEN_DEVICE void fill_first(const int (&places)[kFirst], int begin, int end) const {
    KGEN_UNROLL
    for (int i = begin; i < end; i++) {
      const int stage = group + i * Config::kRowGroups;
      if (stage < Config::kStages && stage < tiles) fill(stage, places[i]);
    }
  }

  KGEN_DEVICE void wait(int stage, int parity) const { mbarrier_wait(full + stage * 8, parity); }

  // Whether some group refills the stage of `tile`; and which.
  KGEN_DEVICE bool refilled(int tile) const { return tile >= 0 && tile + Config::kStages < tiles; }
  KGEN_DEVICE bool mine(int tile) const { return (tile & (Config::kRowGroups - 1)) == group; }

  // The other groups tell the one that refills that they have left. Of its own warps a later barrier tells it, which an
  // eager refill does not have. Copying warps are told by every thread: where one arrives for its warp, racecheck takes the
  // others' reads for unordered.
  KGEN_DEVICE void leave(int tile, int stage) const {
    if constexpr (Config::kCopyWarps > 0) {
      mbarrier_arrive(full + (Config::kStages + stage) * 8);
    } else if constexpr (Config::kRowGroups > 1) {
      if (refilled(tile) && !mine(tile)) named_barrier_arrive(kLeft + stage, T::kThreads);
    }
  }

  // Fills the stage that held `tile` with the tile kStages on, once every warp has left it.
  KGEN_DEVICE void refill(int tile, int stage, int place) const {
    if (Config::kCopyWarps > 0 || !refilled(tile) || !mine(tile)) return;
    if constexpr (Config::kRowGroups > 1 || Config::kEagerRefill) named_barrier_sync(kLeft + stage, T::kThreads);
    fill(stage, place);
  }

  // All that a copying warp does.
  KGEN_DEVICE void copy_tiles() const {
    int stage = 0, parity = 1, next_place = place(0);
    for (int tile = 0; tile < tiles; tile++) {
      const int here = next_place;
      next_place = place(tile + 1);
      if (tile >= Config::kStages) mbarrier_wait(full + (Config::kStages + stage) * 8, parity);
      fill(stage, here);
      if (tile == 0) named_barrier_sync(kQueryLoaded, T::kThreads);
      stage = stage + 1 < Config::kStages ? stage + 1 : 0;
      parity = stage == 0 ? parity ^ 1 : parity;
    }
  }
};

// Q fragments of this warp's rows and slice of the head dimension; rows past the end are zero. A quad of lanes loads 64
// bytes of a row at a time, and deals them out once they are there.
template <typename Config>
struct Query {
  using T = Tiling<Config>;
  using F = Fragments<typename Config::Element>;
  static constexpr int kSteps = (T::kScoreK + 1) / 2 * 2;
  uint32_t fragments[T::kScoreM][kSteps][4];

  // `first_eight` of the rows from `row` on come first, others take its place.
  KGEN_DEVICE void load(const Params& params, int64_t first_row, int row, int first_eight, int rows, int column) {
    KGEN_UNROLL
    for (int m = 0; m < T::kScoreM; m++) {
      KGEN_UNROLL
      for (int half = 0; half < 2; half++) {
        const int r = row + ((m * 2 + half) ^ first_eight) * 8 + thread_index() % 32 / 4;
        const Global<const bf16> source = params.q + ((first_row + r) * T::kHeadDim + column);
        KGEN_UNROLL
        for (int k = 0; k < kSteps; k += 2) F::load_query(source, r < rows, half, fragments[m], k, k + 1 == T::kScoreK);
      }
    }
  }

  KGEN_DEVICE void deal() {
    KGEN_UNROLL
    for (int m = 0; m < T::kScoreM; m++) {
      KGEN_UNROLL
      for (int k = 0; k < kSteps; k += 2) {
        KGEN_UNROLL
        for (int half = 0; half < 2; half++) F::deal_query(fragments[m], k, half);
      }
    }
  }
};

// O += P V for this warp's columns. V fragments are fetched kAhead uses ahead, the first before P is there.
// `values` is this lane's ldmatrix address in the tile, `probabilities` in P.
template <typename Config>
struct ValueTile {
  using T = Tiling<Config>;
  using F = Fragments<typename Config::Element>;
  static constexpr int kTiles = 2 * T::kFetchSteps;  // of eight columns in a fetch
  static constexpr int kBlockUses = T::kOutN / kTiles, kUses = T::kKeyBlocks * kBlockUses, kBuffers = T::kAhead + 1;
  uint32_t values;
  uint32_t v[kBuffers][4];

  KGEN_DEVICE void fetch(int use) {
    if (use >= kUses) return;
    ldmatrix_x4_trans(v[use % kBuffers], values + use / kBlockUses * 16 * T::kRowBytes + use % kBlockUses * 32);
  }

  KGEN_DEVICE explicit ValueTile(uint32_t values) : values(values) {
    KGEN_UNROLL
    for (int use = 0; use < T::kAhead; use++) fetch(use);
  }

  KGEN_DEVICE void accumulate(uint32_t probabilities, float (&o)[T::kOutM][T::kOutN][4]) {
    uint32_t p[T::kOutM][4];
    KGEN_UNROLL
    for (int use = 0; use < kUses; use++) {
      const int block = use / kBlockUses, n = use % kBlockUses;
      KGEN_UNROLL
      for (int m = 0; m < T::kOutM && n == 0; m++) {
        ldmatrix_x4(p[m], probabilities + m * T::kEightWords * 8 + block * 32);
      }
      fetch(use + T::kAhead);
      KGEN_UNROLL
      for (int tile = 0; tile < kTiles; tile += 2) {
        const uint2v b[2] = {F::values(v[use % kBuffers], tile), F::values(v[use % kBuffers], tile + 1)};
        KGEN_UNROLL
        for (int m = 0; m < T::kOutM; m++) {
          F::mma(o[m][kTiles * n + tile], p[m], b[0]);
          F::mma(o[m][kTiles * n + tile + 1], p[m], b[1]);
        }
      }
    }
  }
};

// S of a part's rows, whole: every warp sends each sharer what it has of that one's rows, lane by lane as the mma left
// them. The owner sums over the slices of the head dimension and has the keys of every part side by side.
template <typename Config>
struct ScoreExchange {
  using T = Tiling<Config>;
  static constexpr int kOwnerStride = T::kScoreParts * T::kSenders * T::kPacketFloats;
  Shared<float> inboxes;  // [group][owner][part][sender][kScoreKeys / 16][kOwnLanes][4]
  int sharer;
  int first;  // of the inboxes of this group and part

  KGEN_DEVICE ScoreExchange(Shared<float> inboxes, int group, int part, int sharer) : inboxes(inboxes), sharer(sharer) {
    first = (group * T::kSharers * T::kScoreParts + part) * T::kSenders * T::kPacketFloats;
  }

  // Of 16 keys.
  KGEN_DEVICE void send(int lane, int block, const float (&s)[T::kScoreM][2][4]) const {
    const int sent = first + lane / T::kOwnLanes * kOwnerStride + lane % T::kOwnLanes * 4;
    KGEN_UNROLL
    for (int eight = T::kKeepsOwn ? 1 : 0; eight < T::kScoreM * 2; eight++) {
      const int m = eight / 2, half = eight % 2;
      const int owner = T::kKeepsOwn ? eight ^ sharer : eight * 8 / T::kOwnRows;
      const int sender = T::kKeepsOwn ? eight - 1 : sharer;
      inboxes.template store_as<float4v>(
          sent + owner * kOwnerStride + sender * T::kPacketFloats + block * T::kOwnLanes * 4,
          float4v{s[m][0][half * 2], s[m][0][half * 2 + 1], s[m][1][half * 2], s[m][1][half * 2 + 1]});
    }
  }

  KGEN_DEVICE void receive(int lane, const float (&own)[T::kLaneKeys], float (&s)[T::kLaneKeys]) const {
    const int received = first + sharer * kOwnerStride + lane % T::kOwnLanes * 4;
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i += 4) {
      const int key_part = i * 4 / T::kScoreKeys;
      const int from = received + key_part * Config::kKSplit * T::kPacketFloats +
                       (i - key_part * T::kScoreKeys / 4) * T::kOwnLanes;
      float4v sum;
      if constexpr (T::kKeepsOwn) {
        sum = {own[i], own[i + 1], own[i + 2], own[i + 3]};
      } else {
        sum = inboxes.template load_as<float4v>(from);
      }
      KGEN_UNROLL
      for (int sender = T::kKeepsOwn ? 0 : 1; sender < Config::kKSplit - (T::kKeepsOwn ? 1 : 0); sender++) {
        const float4v more = inboxes.template load_as<float4v>(from + sender * T::kPacketFloats);
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      s[i] = sum.x;
      s[i + 1] = sum.y;
      s[i + 2] = sum.z;
      s[i + 3] = sum.w;
    }
  }

  // The key of a lane's i-th value, within the tile.
  KGEN_DEVICE static int key(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
};

// This warp's partial S of one tile, 16 keys at a time, each sent as soon as it is whole. K fragments are fetched kAhead
// uses ahead, from `key_address(lane)` on. `own` is this lane's share of what the warp keeps.
template <typename Config, typename KeyAddress>
KGEN_DEVICE void score_tile(const Query<Config>& query, const KeyAddress& key_address,
                            const ScoreExchange<Config>& exchange, float (&own)[Tiling<Config>::kLaneKeys]) {
  using T = Tiling<Config>;
  using F = Fragments<typename Config::Element>;
  constexpr int kUses = T::kFetches * T::kScoreBlocks, kBuffers = T::kAhead + 1;
  uint32_t k[kBuffers][4], keys = 0;
  float sums[T::kScoreSums][T::kScoreM][2][4];
  KGEN_UNROLL
  for (int use = -T::kAhead; use < kUses; use++) {
    const int fetch = use + T::kAhead;
    if (fetch < kUses) {
      const int block = fetch / T::kFetches, at = fetch % T::kFetches;
      if (at == 0) keys = key_address(step_lane<Config>()) + block * 16 * T::kRowBytes;
      // A fetch of which a step would lie behind the slice has the first one twice: there may be nothing in the row.
      const uint32_t back = (at + 1) * T::kFetchSteps > T::kScoreK ? step_lane<Config>() / 8 % 2 * 16 : 0;
      ldmatrix_x4(k[fetch % kBuffers], keys + at * 32 - back);
    }
    if (use < 0) continue;
    const int block = use / T::kFetches, at = use % T::kFetches, first_step = at * T::kFetchSteps;
    KGEN_UNROLL
    for (int i = 0; i < T::kScoreSums * T::kScoreM * 8 && at == 0; i++) {
      sums[i / 8 / T::kScoreM][i / 8 % T::kScoreM][i / 4 % 2][i % 4] = 0;
    }
    KGEN_UNROLL
    for (int step = first_step; step < first_step + T::kFetchSteps && step < T::kScoreK; step++) {
      const uint32_t(&fetched)[4] = k[use % kBuffers];
      const uint2v b[2] = {F::keys(fetched, step - first_step, 0), F::keys(fetched, step - first_step, 1)};
      KGEN_UNROLL
      for (int m = 0; m < T::kScoreM; m++) {
        float(&sum)[2][4] = sums[step % T::kScoreSums][m];
        F::mma(sum[0], query.fragments[m][step], b[0]);
        F::mma(sum[1], query.fragments[m][step], b[1]);
      }
    }
    if (at + 1 < T::kFetches) continue;
    KGEN_UNROLL
    for (int i = 0; i < T::kScoreM * 8 && T::kScoreSums == 2; i++) {
      sums[0][i / 8][i / 4 % 2][i % 4] += sums[T::kScoreSums - 1][i / 8][i / 4 % 2][i % 4];
    }
    exchange.send(step_lane<Config>(), block, sums[0]);
    KGEN_UNROLL
    for (int i = 0; i < 4 && T::kKeepsOwn; i++) own[block * 4 + i] = sums[0][0][i / 2][i % 2];
  }
}

// The running softmax of a quad's row: the base that weights are relative to (base 2, scaled), and this lane's share of
// the sum. The base follows the largest score, 2^kLift below it, only when that is 2^kSlack more: weights stay far from
// overflow, their rounding is relative, and O is rarely rescaled.
template <typename Config>
struct Softmax {
  using T = Tiling<Config>;
  static constexpr float kSlack = 8, kLift = Fragments<typename Config::Element>::kLift;
  float base;
  float total;

  // Folds one tile's scores into the state; leaves the weights in `s` and returns the factor for older sums.
  KGEN_DEVICE float fold(float (&s)[T::kLaneKeys]) {
    float tile_peak = s[0];
    KGEN_UNROLL
    for (int i = 1; i < T::kLaneKeys; i++) tile_peak = maximum(tile_peak, s[i]);
    float rescale = 1;
    if (warp_any(tile_peak - base > kSlack + kLift)) {
      tile_peak = lanes_maximum<4>(tile_peak);
      if (tile_peak - base > kSlack + kLift) {
        const float next = tile_peak - kLift;
        rescale = exp2_approx(base - next);
        base = next;
        total *= rescale;
      }
    }
    const float from = base == -infinity() ? 0 : base;  // a row that has seen nothing yet
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i++) {
      s[i] = exp2_approx(s[i] - from);
      total += s[i];
    }
    return rescale;
  }
};

// Scores of draft rows that a row's node does not see, and of keys past the end, become -inf.
template <typename Config>
KGEN_DEVICE void mask_scores(const Params& params, const Request& request, int lane, int node, int first_key,
                             float (&s)[Tiling<Config>::kLaneKeys]) {
  KGEN_UNROLL
  for (int i = 0; i < Tiling<Config>::kLaneKeys; i++) {
    const int draft = first_key + ScoreExchange<Config>::key(lane, i) - request.prefix;
    if (draft >= 0 && !sees_draft(params, request, node, draft)) s[i] = -infinity();
  }
}

// O times the factor of each row.
template <typename Config>
KGEN_DEVICE void rescale_output(Shared<uint32_t> probabilities, int group,
                                float (&o)[Tiling<Config>::kOutM][Tiling<Config>::kOutN][4]) {
  using T = Tiling<Config>;
  const int lane = step_lane<Config>(), behind = T::probability_row(group, 0, lane / 4) + Config::kTileN / 2 + lane % 4;
  KGEN_UNROLL
  for (int m = 0; m < T::kOutM; m++) {
    const float upper = probabilities.template load_as<float>(behind + 2 * m * T::kEightWords);
    const float lower = probabilities.template load_as<float>(behind + (2 * m + 1) * T::kEightWords);
    KGEN_UNROLL
    for (int n = 0; n < T::kOutN; n++) {
      o[m][n][0] *= upper;
      o[m][n][1] *= upper;
      o[m][n][2] *= lower;
      o[m][n][3] *= lower;
    }
  }
}

// O of this warp's columns, times what `factors` has for each row, as bf16 rows of `out`; a quad of lanes writes 64
// bytes of a row.
template <typename Config>
KGEN_DEVICE void store_output(Global<bf16> out, Shared<float> factors, int group_row, int rows, int column,
                              const float (&o)[Tiling<Config>::kOutM][Tiling<Config>::kOutN][4]) {
  using T = Tiling<Config>;
  using F = Fragments<typename Config::Element>;
  KGEN_UNROLL
  for (int m = 0; m < T::kOutM; m++) {
    KGEN_UNROLL
    for (int half = 0; half < 2; half++) {
      const int row = group_row + m * 16 + half * 8 + thread_index() % 32 / 4;
      const float factor = factors.load(row);
      KGEN_UNROLL
      for (int n = 0; n < T::kOutN; n += 4) {
        const uint4v columns = F::deal_output(o[m], n, half, factor);
        const int64_t at = static_cast<int64_t>(row) * Config::kLatent + column + n * 8 + F::dealt_column();
        if (row < rows) out.template store_as<uint4v>(at, columns);
      }
    }
  }
}

// What the combine has to know of each row of the tile: its first partial row, how far apart they are, how many.
template <typename Config>
KGEN_DEVICE void tell_combine(const Params& params, const Item& item, int index, int64_t first_row, int rows) {
  const int row = thread_index();
  if (!params.merges || row >= Config::kTileM || row >= rows) return;
  const uint32_t first = index * Config::kTileM + row, stride = item.row_tiles * Config::kTileM, splits = item.splits;
  params.merges.template store_as<uint4v>((first_row + row) * 4, uint4v{first, stride, splits, 0});
}

template <typename Config>
KGEN_DEVICE void flash(const Params& params) {
  using T = Tiling<Config>;
  using F = Fragments<typename Config::Element>;
  const int lane = thread_index() % 32, warp = warp_uniform(thread_index() / 32);
  const int group = warp / T::kGroupWarps, group_warp = warp % T::kGroupWarps;
  const int part = group_warp % T::kScoreParts, sharer = group_warp / T::kScoreParts;
  const int slice = sharer % Config::kKSplit, key_part = sharer / Config::kKSplit;

  const Shared<uint8_t> kv = shared_array<uint8_t>(Config::kKvOffset, Config::kStages * Config::kTileN * T::kRowBytes);
  const Shared<uint32_t> probabilities =
      shared_array<uint32_t>(Config::kProbabilityOffset, Config::kTileM * T::kProbabilityStride / 2);
  const Shared<float> factors = shared_array<float>(Config::kFactorOffset, Config::kTileM);
  const uint32_t full = shared_array<uint64_t>(Config::kFullOffset, T::kRingBarriers).address();
  const ScoreExchange<Config> exchange(
      shared_array<float>(Config::kScoreOffset, Config::kWarps * T::kSenders * T::kPacketFloats), group, part, sharer);
  init_ring<Config>(full);

  // This block's rows and tiles; a block may have none.
  const Item item = own_item<Config>(params);
  if (item.splits == 0) return;
  const Request& request = item.request;
  const int tile_row = item.tile_row, first_tile = item.first_tile, tiles = item.tiles;
  const int rows = request.nodes * params.heads - tile_row;
  const int64_t first_row = static_cast<int64_t>(request.first_node) * params.heads + tile_row;

  // What the first step waits for is asked for first: where the rows are, Q, a tile; then the other tiles, which would
  // hold Q up.
  const KvRing<Config> ring{params, request, first_tile, tiles, group,
                            Config::kCopyWarps > 0 ? warp - Config::kWarps : group_warp, static_cast<uint32_t>(lane),
                            kv.address(), full};
  if constexpr (Config::kCopyWarps > 0) {
    if (warp >= Config::kWarps) {
      if constexpr (Config::kWarpRegisters > 0) keep_registers<Config::kCopyRegisters>();
      block_sync();
      ring.copy_tiles();
      return;
    }
    if constexpr (Config::kWarpRegisters > 0) take_registers<Config::kWarpRegisters>();
  }
  int places[KvRing<Config>::kFirst];
  if (Config::kCopyWarps == 0) ring.first_places(places);
  Query<Config> query;
  const int score_row = group * T::kGroupRows + part * T::kScoreRows, score_column = slice * T::kScoreK * 16;
  query.load(params, first_row, score_row, T::kKeepsOwn ? sharer : 0, rows, score_column);
  block_sync();
  if (Config::kCopyWarps == 0) ring.fill_first(places, 0, 1);
  query.deal();
  if (Config::kCopyWarps == 0) ring.fill_first(places, 1, KvRing<Config>::kFirst);
  if (Config::kCopyWarps > 0) named_barrier_arrive(KvRing<Config>::kQueryLoaded, T::kThreads);
  if (first_tile == 0) tell_combine<Config>(params, item, block_index_x(), first_row, rows);

  float o[T::kOutM][T::kOutN][4];
  KGEN_UNROLL
  for (int m = 0; m < T::kOutM; m++) {
    KGEN_UNROLL
    for (int n = 0; n < T::kOutN; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
  }
  Softmax<Config> softmax{-infinity(), 0};

  // Where in a tile of K or V, and of P, a lane's rows of ldmatrix are.
  const auto key_place = [&](int lane) -> uint32_t {
    const int key_row = key_part * T::kScoreKeys + lane % 8 + lane / 16 * 8;
    return key_row * T::kRowBytes + score_column * T::kElementBytes + lane / 8 % 2 * 16;
  };
  const auto value_place = [&](int lane) -> uint32_t {
    return lane % 16 * T::kRowBytes + group_warp * T::kOutColumns * T::kElementBytes + lane / 16 * 16;
  };
  const auto probability_address = [&](int lane) -> uint32_t {
    return probabilities.address(T::probability_row(group, lane % 16 / 8, lane % 8)) + lane / 16 * 16;
  };
  const int own_row = score_row + sharer * T::kOwnRows + lane / 4 % T::kOwnRows;
  const bool owns = lane < T::kOwnLanes;  // with less than 8 rows a warp, the other lanes repeat these

  int stage = 0, parity = 0, last_stage = 0, next_place = 0;
  for (int tile = 0; tile < tiles; tile++) {
    ring.wait(stage, parity);
    const uint32_t keys = kv.address() + stage * Config::kTileN * T::kRowBytes;
    float own[T::kLaneKeys], weights[T::kLaneKeys];
    score_tile<Config>(query, [&](int lane) { return keys + key_place(lane); }, exchange, own);
    named_barrier_sync(1 + group, T::kGroupWarps * 32);
    if (!Config::kEagerRefill) ring.refill(tile - 1, last_stage, next_place);
    if (Config::kCopyWarps == 0) next_place = ring.place(tile + Config::kStages);

    exchange.receive(step_lane<Config>(), own, weights);
    KGEN_UNROLL
    for (int i = 0; i < T::kLaneKeys; i++) weights[i] *= params.scale_log2;
    const int first_key = (first_tile + tile) * Config::kTileN;
    if (first_key + Config::kTileN > request.prefix) {
      const int lane = step_lane<Config>();
      const int own_row = score_row + sharer * T::kOwnRows + lane / 4 % T::kOwnRows;
      const int row = own_row < rows ? own_row : rows - 1;
      mask_scores<Config>(params, request, lane, divide(tile_row + row, params.heads), first_key, weights);
    }
    const float rescale = softmax.fold(weights);
    const int lane_now = step_lane<Config>();
    if (owns) {
      const int row = part * T::kScoreRows + sharer * T::kOwnRows + lane_now / 4 % T::kOwnRows;  // of the group's
      const int at = T::probability_row(group, row / 8, row % 8) + lane_now % 4;
      KGEN_UNROLL
      for (int i = 0; i < T::kLaneKeys; i += 2) {
        probabilities.store(at + i * 2, F::pack(weights[i], weights[i + 1]));  // where key(i) is
      }
      probabilities.template store_as<float>(at + Config::kTileN / 2, rescale);  // behind the row
    }
    const uint32_t probabilities_at = probability_address(lane_now);
    ValueTile<Config> value_tile(keys + value_place(lane_now));
    const bool rescaled = named_barrier_any(1 + group, T::kGroupWarps * 32, rescale != 1);

    if (rescaled) rescale_output<Config>(probabilities, group, o);
    value_tile.accumulate(probabilities_at, o);
    ring.leave(tile, stage);
    if (Config::kEagerRefill) ring.refill(tile, stage, next_place);
    last_stage = stage;
    stage = stage + 1 < Config::kStages ? stage + 1 : 0;
    parity = stage == 0 ? parity ^ 1 : parity;
  }

  // Normalise: the warps that own a row hand kv_scale / total to those that own its columns.
  const float total = lanes_sum<4>(softmax.total);
  if (owns && lane % 4 == 0) {
    factors.store(own_row, total == 0 ? 0 : params.kv_scale / total);
    const float lse = softmax.base + log2_approx(total);  // -inf where no key was seen
    if (own_row < rows) {
      if (item.splits > 1) {
        params.partial_lse.store(static_cast<int64_t>(block_index_x()) * Config::kTileM + own_row, lse);
      } else if (params.lse) {
        params.lse.store(first_row + own_row, lse * kLn2);
      }
    }
  }
  named_barrier_sync(1 + group, T::kGroupWarps * 32);
  const int64_t item_row = static_cast<int64_t>(block_index_x()) * Config::kTileM;
  const Global<bf16> out = item.splits > 1 ? params.partial_out + item_row * Config::kLatent
                                           : params.out + first_row * Config::kLatent;
  store_output<Config>(out, factors, group * T::kGroupRows, rows, group_warp * T::kOutColumns, o);
}

}  // namespace kgen::verify_mla
