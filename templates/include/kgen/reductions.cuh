// Reductions and rearrangements over a warp, and over groups of neighbouring lanes.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen {

KGEN_DEVICE int least(int a, int b) { return a < b ? a : b; }
KGEN_DEVICE int most(int a, int b) { return a > b ? a : b; }

// `kLanes` is a power of two; every lane of a group gets its group's result.
template <int kLanes>
KGEN_DEVICE float lanes_maximum(float value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value = maximum(value, shuffle_xor(value, mask));
  return value;
}
template <int kLanes>
KGEN_DEVICE int lanes_least(int value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value = least(value, shuffle_xor(value, mask));
  return value;
}
template <int kLanes>
KGEN_DEVICE int lanes_most(int value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value = most(value, shuffle_xor(value, mask));
  return value;
}
template <int kLanes, typename T>
KGEN_DEVICE T lanes_sum(T value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

// A value that is the same in all lanes, told to the compiler: it then needs no register a lane.
template <typename T>
KGEN_DEVICE T warp_uniform(T value) {
  return shuffle(value, 0);
}

// The sum over this lane and those below it.
KGEN_DEVICE int lanes_running_sum(int value) {
  const int lane = thread_index() % 32;
  KGEN_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = shuffle(value, lane >= distance ? lane - distance : lane);
    if (lane >= distance) value += below;
  }
  return value;
}

// Transposes a 4x4 matrix whose row q is lane q of a quad: afterwards lane q holds column q.
KGEN_DEVICE void quad_transpose(uint32_t (&x)[4]) {
  const int lane = thread_index() % 4;
  KGEN_UNROLL
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool upper = (lane & distance) != 0;
    KGEN_UNROLL
    for (int i = 0; i < 4; i++) {
      if ((i & distance) != 0) continue;
      const uint32_t other = shuffle_xor(upper ? x[i] : x[i + distance], distance);
      x[i] = upper ? other : x[i];
      x[i + distance] = upper ? x[i + distance] : other;
    }
  }
}

}  // namespace kgen
