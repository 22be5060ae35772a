// Reductions over a warp, and over groups of neighbouring lanes.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen {

// `kLanes` is a power of two; every lane of a group gets its group's result.
template <int kLanes>
KGEN_DEVICE float lanes_maximum(float value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value = maximum(value, shuffle_xor(value, mask));
  return value;
}
template <int kLanes>
KGEN_DEVICE float lanes_sum(float value) {
  KGEN_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

}  // namespace kgen
