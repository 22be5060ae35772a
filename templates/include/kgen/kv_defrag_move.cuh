// Moves whose sources nobody overwrites, or whose overlapping sources were staged: no order among them matters.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// A block has its rows of one layer, and every `move_blocks`-th block of rows after it: the plan makes as many blocks as
// there is work, up to a bound. So many short blocks keep memory busier than resident ones that loop, and walk through a
// layer as a front. `kLanes` lanes share a row, of which each has `kVectors` in flight. What a lane must know before it
// can load a row (slots, layer pointer, count, whether it was staged) is loaded at once: the first rows' slots are
// within the lists, whatever the count will be.
template <typename Config>
KGEN_DEVICE void move(const Params& params) {
  constexpr int kLanes = Config::kLanes, kVectors = Config::kVectors, kBlockRows = Config::kWarps * 32 / kLanes;
  const int layer = block_index_y();
  if (layer >= params.layers) return;
  const Global<uint8_t> base = layer_base(params, layer);
  const int count = move_count(params);
  int first = block_index_x() * kBlockRows;
  do {
    const int index = first + thread_index() / kLanes, listed = index < params.moves ? index : 0;
    const Move move = load_move(params, listed);
    const bool staged = params.stage_blocks > 0 && params.overlaps.load(listed);
    const Global<uint8_t> source =
        staged ? params.staging + staged_row(params, index, layer) : base + move.source * params.row_stride;
    const Global<uint8_t> target = base + move.target * params.row_stride;
    const int row_bytes = index < count && move.target != kNothing ? params.row_bytes : 0;
    for (int start = thread_index() % kLanes * 16; start < row_bytes; start += kLanes * kVectors * 16) {
      uint4v values[kVectors];
      KGEN_UNROLL
      for (int k = 0; k < kVectors; k++) {
        const int column = start + k * kLanes * 16;
        if (column < row_bytes) values[k] = source.template load_as<uint4v>(column);
      }
      KGEN_UNROLL
      for (int k = 0; k < kVectors; k++) {
        const int column = start + k * kLanes * 16;
        if (column < row_bytes) target.template store_as<uint4v>(column, values[k]);
      }
    }
    first += params.move_blocks * kBlockRows;
  } while (first < count);
}

}  // namespace kgen::kv_defrag
