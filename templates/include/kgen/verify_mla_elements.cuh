// How KV rows of an element type meet the tensor cores. One ldmatrix fetches 16 keys x 32 bytes: `kSteps` steps of 16
// elements along a row. bf16 rows are multiplied as they are; e4m3 rows become fp16 in registers, exactly, and so the
// order of elements within a fetch is another, which Q and O then have too.
#pragma once

#include <kgen/reductions.cuh>

namespace kgen::verify_mla {

template <typename Element>
struct Fragments;

template <>
struct Fragments<bf16> {
  static constexpr int kSteps = 1;
  static constexpr float kLift = 0;  // weights are 2^kLift times as large, so that small ones stay normal numbers

  KGEN_DEVICE static uint32_t pack(float low, float high) { return pack_bf16x2(low, high); }
  KGEN_DEVICE static void mma(float (&d)[4], const uint32_t (&a)[4], const uint2v& b) {
    mma_bf16_16x8x16(d, a, b.x, b.y);
  }

  // Eight keys (the first or the last of the 16) of one step, for S = Q K^T.
  KGEN_DEVICE static uint2v keys(const uint32_t (&fetched)[4], int, int half) {
    return {fetched[2 * half], fetched[2 * half + 1]};
  }
  // Eight columns of all 16 keys, for O += P V.
  KGEN_DEVICE static uint2v values(const uint32_t (&fetched)[4], int tile) {
    return {fetched[2 * tile], fetched[2 * tile + 1]};
  }

  // A lane's share of two steps of a row of Q, from column `lane % 4 * 8` of them on; `first_only` where there is one.
  template <int kEnd>
  KGEN_DEVICE static void load_query(Global<const bf16> row, bool exists, int half, uint32_t (&steps)[kEnd][4], int k,
                                     bool first_only) {
    const int lane = thread_index() % 4;
    uint4v chunk{0, 0, 0, 0};
    if (exists && !(first_only && lane >= 2)) chunk = row.template load_as<uint4v>(k * 16 + lane * 8);
    steps[k][half] = chunk.x;
    steps[k][2 + half] = chunk.y;
    steps[k + 1][half] = chunk.z;
    steps[k + 1][2 + half] = chunk.w;
  }
  // Deals them out: each lane then has two neighbouring elements of every eight, as the mma wants them.
  template <int kEnd>
  KGEN_DEVICE static void deal_query(uint32_t (&steps)[kEnd][4], int k, int half) {
    uint32_t pairs[4] = {steps[k][half], steps[k][2 + half], steps[k + 1][half], steps[k + 1][2 + half]};
    quad_transpose(pairs);
    steps[k][half] = pairs[0];
    steps[k][2 + half] = pairs[1];
    steps[k + 1][half] = pairs[2];
    steps[k + 1][2 + half] = pairs[3];
  }

  // Eight neighbouring columns of a row of O in each lane, from the four tiles that start at `n`, and which of the 32.
  template <int kTiles>
  KGEN_DEVICE static uint4v deal_output(const float (&o)[kTiles][4], int n, int half, float by) {
    uint32_t pairs[4];
    KGEN_UNROLL
    for (int i = 0; i < 4; i++) pairs[i] = pack_bf16x2(o[n + i][half * 2] * by, o[n + i][half * 2 + 1] * by);
    quad_transpose(pairs);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
  KGEN_DEVICE static int dealt_column() { return thread_index() % 4 * 8; }
};

template <>
struct Fragments<e4m3> {
  static constexpr int kSteps = 2;
  static constexpr float kLift = 7;  // fp16 ends at 2^16; weights reach 2^(kLift + Softmax::kSlack)

  KGEN_DEVICE static uint32_t pack(float low, float high) { return pack_f16x2(low, high); }
  KGEN_DEVICE static void mma(float (&d)[4], const uint32_t (&a)[4], const uint2v& b) {
    mma_f16_16x8x16(d, a, b.x, b.y);
  }

  // A lane has four neighbouring elements of a step where the mma expects two and two.
  KGEN_DEVICE static uint2v keys(const uint32_t (&fetched)[4], int step, int half) {
    const uint32_t four = fetched[2 * half + step];
    return {low_e4m3x2_to_f16x2(four), high_e4m3x2_to_f16x2(four)};
  }
  // A lane has two neighbouring columns of two keys: even and odd columns make tiles of their own.
  KGEN_DEVICE static uint2v values(const uint32_t (&fetched)[4], int tile) {
    const uint32_t first = swap_middle_bytes(fetched[tile / 2 * 2]);
    const uint32_t last = swap_middle_bytes(fetched[tile / 2 * 2 + 1]);
    if (tile % 2 == 0) return {low_e4m3x2_to_f16x2(first), low_e4m3x2_to_f16x2(last)};
    return {high_e4m3x2_to_f16x2(first), high_e4m3x2_to_f16x2(last)};
  }

  template <int kEnd>
  KGEN_DEVICE static void load_query(Global<const bf16> row, bool exists, int half, uint32_t (&steps)[kEnd][4], int k,
                                     bool first_only) {
    KGEN_UNROLL
    for (int step = k; step < k + 2; step++) {
      uint2v four{0, 0};
      if (exists && !(first_only && step > k)) four = row.template load_as<uint2v>(step * 16 + thread_index() % 4 * 4);
      steps[step][half] = four.x;
      steps[step][2 + half] = four.y;
    }
  }
  template <int kEnd>
  KGEN_DEVICE static void deal_query(uint32_t (&steps)[kEnd][4], int k, int half) {
    KGEN_UNROLL
    for (int step = k; step < k + 2; step++) {
      KGEN_UNROLL
      for (int i = half; i < 4; i += 2) {
        steps[step][i] = pack_f16x2(low_bf16(steps[step][i]), high_bf16(steps[step][i]));
      }
    }
  }

  // Even lanes end with columns of the first 16, odd ones of the last.
  template <int kTiles>
  KGEN_DEVICE static uint4v deal_output(const float (&o)[kTiles][4], int n, int half, float by) {
    uint32_t pairs[4];
    KGEN_UNROLL
    for (int i = 0; i < 4; i++) {
      const int even = n + i / 2 * 2, at = half * 2 + i % 2;
      pairs[i] = pack_bf16x2(o[even][at] * by, o[even + 1][at] * by);
    }
    const bool odd = thread_index() % 2 != 0;
    const uint32_t x = shuffle_xor(odd ? pairs[0] : pairs[2], 1), y = shuffle_xor(odd ? pairs[1] : pairs[3], 1);
    return odd ? uint4v{x, y, pairs[2], pairs[3]} : uint4v{pairs[0], pairs[1], x, y};
  }
  KGEN_DEVICE static int dealt_column() { return thread_index() % 2 * 16 + thread_index() % 4 / 2 * 8; }
};

}  // namespace kgen::verify_mla
