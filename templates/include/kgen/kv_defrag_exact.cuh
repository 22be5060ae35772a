// Moves of any overlap in one launch: a block has one slice of the columns of one layer, for all moves.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// All loads of a block come before its barrier and all stores after it, and no other block touches its slice: what
// is read is what was there before the call. The plan makes slices so narrow that the block's registers hold them.
// The loads of slots, count and layer pointer depend on nothing, so that one latency covers them all.
template <typename Config>
KGEN_DEVICE void exact(const Params& params) {
  constexpr int kVectors = Config::kVectors, kThreads = Config::kWarps * 32;
  const int layer = block_index_y();
  if (layer >= params.layers) return;
  const int row_vectors = params.row_bytes / 16;
  const int slice = params.slice_vectors, first = block_index_x() * slice;
  const int width = first + slice <= row_vectors ? slice : row_vectors - first;
  if (width <= 0) return;

  const Global<uint8_t> base = layer_base(params, layer);
  uint4v values[kVectors];
  Move moves[kVectors];
  int columns[kVectors];
  const int count = move_count(params);
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    const int place = k * kThreads + thread_index(), index = place / width;
    columns[k] = (first + place - index * width) * 16;
    moves[k] = load_move(params, index < params.moves ? index : 0);
    if (index >= count) moves[k] = {kNothing, kNothing};
  }
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    if (moves[k].target != kNothing) {
      values[k] = base.template load_as<uint4v>(moves[k].source * params.row_stride + columns[k]);
    }
  }
  block_sync();
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    if (moves[k].target != kNothing) {
      base.template store_as<uint4v>(moves[k].target * params.row_stride + columns[k], values[k]);
    }
  }
}

}  // namespace kgen::kv_defrag
