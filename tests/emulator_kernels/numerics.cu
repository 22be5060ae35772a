// Kernels whose results are compared with numpy.
#include <kgen/reductions.cuh>

using namespace kgen;

struct ProductParams {
  Global<const bf16> a;  // [16, depth] row major
  Global<const bf16> b;  // [8, depth] row major, or [depth, 8] for the transposed load
  Global<float> d;       // [16, 8]
  int depth;
  int unused;
};

template <bool kTranspose, bool kHalf = false>
KGEN_DEVICE void product(const ProductParams& params) {
  const Shared<bf16> a = shared_array<bf16>(0, 16 * 16);
  const Shared<bf16> b = shared_array<bf16>(512, 32 * 8);  // the second half is padding of the x4 load
  const int lane = thread_index();
  float d[4] = {0, 0, 0, 0};
  for (int k = 0; k < params.depth; k += 16) {
    for (int i = lane; i < 256; i += 32) a.store(i, params.a.load(i / 16 * params.depth + k + i % 16));
    for (int i = lane; i < 128; i += 32) {
      const int place = kTranspose ? (k + i / 8) * 8 + i % 8 : i / 16 * params.depth + k + i % 16;
      b.store(i, params.b.load(place));
      b.store(128 + i, bf16{0});
    }
    warp_sync();
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, a.address(lane % 16 * 16 + lane / 16 * 8));
    if (kTranspose)
      ldmatrix_x4_trans(fb, b.address(lane * 8));
    else
      ldmatrix_x4(fb, b.address((lane / 16) * 128 + lane % 8 * 16 + lane / 8 % 2 * 8));
    if (kHalf)
      mma_f16_16x8x16(d, fa, fb[0], fb[1]);
    else
      mma_bf16_16x8x16(d, fa, fb[0], fb[1]);
    warp_sync();
  }
  const int row = lane / 4, column = lane % 4 * 2;
  params.d.store_as(row * 8 + column, float2v{d[0], d[1]});
  params.d.store_as((row + 8) * 8 + column, float2v{d[2], d[3]});
}
KGEN_KERNEL(product_rows, 32, 1, ProductParams, params) { product<false>(params); }
KGEN_KERNEL(product_transposed, 32, 1, ProductParams, params) { product<true>(params); }
KGEN_KERNEL(product_of_f16, 32, 1, ProductParams, params) { product<false, true>(params); }

struct MapParams {
  Global<const float> in;
  Global<uint32_t> out;
};

KGEN_KERNEL(bf16_pairs, 32, 1, MapParams, params) {
  const int i = block_index_x() * 32 + thread_index();
  const float2v pair = params.in.load_as<float2v>(2 * i);
  params.out.store(i, pack_bf16x2(pair.x, pair.y));
}

KGEN_KERNEL(f16_pairs, 32, 1, MapParams, params) {
  const int i = block_index_x() * 32 + thread_index();
  const float2v pair = params.in.load_as<float2v>(2 * i);
  params.out.store(i, pack_f16x2(pair.x, pair.y));
}

struct NarrowParams {
  Global<const uint32_t> in;
  Global<uint32_t> pairs;  // [64]: the lower, then the upper two of four, as fp16
  Global<float> floats;    // [128]
  Global<uint32_t> swapped;
};

KGEN_KERNEL(e4m3_values, 32, 1, NarrowParams, params) {
  const int t = thread_index();
  const uint32_t four = params.in.load(t);
  params.pairs.store(2 * t, low_e4m3x2_to_f16x2(four));
  params.pairs.store(2 * t + 1, high_e4m3x2_to_f16x2(four));
  for (int i = 0; i < 4; i++) params.floats.store(4 * t + i, to_float(e4m3{static_cast<uint8_t>(four >> 8 * i)}));
  params.swapped.store(t, swap_middle_bytes(four));
}

struct ShuffleParams {
  Global<const float> in;
  Global<float> out;  // [8, 64]: five butterflies, a vote, a permutation, a broadcast
};

KGEN_KERNEL(shuffles, 64, 1, ShuffleParams, params) {
  const int t = thread_index();
  const float value = params.in.load(t);
  for (int step = 0; step < 5; ++step) params.out.store(step * 64 + t, shuffle_xor(value, 1 << step));
  params.out.store(5 * 64 + t, warp_any(value == 40.0f) ? 1.0f : 0.0f);
  params.out.store(6 * 64 + t, shuffle(value, t * 7 % 32));
  params.out.store(7 * 64 + t, static_cast<float>(shuffle(t, 5)));
}

struct WarpParams {
  Global<const int32_t> in;
  Global<int32_t> out;  // [13, 64]
};

KGEN_KERNEL(warp_values, 64, 1, WarpParams, params) {
  const int t = thread_index();
  const int value = params.in.load(t);
  const uint32_t odd = warp_ballot(value % 2 != 0);
  const Global<const int32_t> theirs = shuffle(params.in + t, t * 7 % 32);  // of that lane: its element
  uint32_t square[4] = {4u * (t % 4), 4u * (t % 4) + 1, 4u * (t % 4) + 2, 4u * (t % 4) + 3};
  quad_transpose(square);
  const int32_t found[] = {
      warp_sum(value),
      static_cast<int32_t>(odd),
      lowest_lane(odd),
      lowest_lane(warp_ballot(value == 1 << 30)),
      theirs.load(0),
      shuffle_xor(value, 5),
      static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(value) | 1u << 31, 9)),
      lanes_running_sum(value),
      lanes_sum<8>(value),
      static_cast<int32_t>(square[0]),
      static_cast<int32_t>(square[1]),
      static_cast<int32_t>(square[2]),
      static_cast<int32_t>(square[3]),
  };
  for (int i = 0; i < 13; ++i) params.out.store(i * 64 + t, found[i]);
}

KGEN_KERNEL(bf16_halves, 32, 1, ShuffleParams, params) {
  const Global<const uint32_t> pairs{reinterpret_cast<const uint32_t*>(params.in.pointer)};
  const uint32_t pair = pairs.load(thread_index());
  params.out.store_as(2 * thread_index(), float2v{low_bf16(pair), high_bf16(pair)});
}

struct ExponentParams {
  Global<const float> in;
  Global<float> out;  // [2, 32]
};

KGEN_KERNEL(exponents, 32, 1, ExponentParams, params) {
  const int t = thread_index();
  params.out.store(t, exp2_approx(params.in.load(t)));
  params.out.store(32 + t, log2_approx(params.in.load(t)));
}

struct IndexParams {
  Global<int32_t> out;  // [z, y, x, thread]
  int width, height;
};

KGEN_KERNEL(indices, 32, 1, IndexParams, params) {
  const int block = (block_index_z() * params.height + block_index_y()) * params.width + block_index_x();
  params.out.store(block * 32 + thread_index(), block * 1000 + thread_index());
}

struct StreamParams {
  Global<const float> in;
  Global<float> out;
  int passes;
  int unused;
};

// Work for the speed test: mma and ldmatrix in a loop, eight warps.
KGEN_KERNEL(stream, 256, 1, StreamParams, params) {
  const Shared<bf16> tile = shared_array<bf16>(0, 64 * 64);
  for (int i = thread_index(); i < 64 * 64; i += 256) tile.store(i, bf16{0x3f80});
  block_sync();
  const int lane = thread_index() % 32;
  float d[4] = {0, 0, 0, 0};
  for (int pass = 0; pass < params.passes; ++pass) {
    uint32_t a[4];
    ldmatrix_x4(a, tile.address((pass % 4 * 16 + lane % 16) * 64 + lane / 16 * 8));
    mma_bf16_16x8x16(d, a, a[0], a[1]);
  }
  params.out.store(thread_index(), d[0]);
}
