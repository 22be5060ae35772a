// Moves whose sources nobody overwrites, or whose overlapping sources were staged: no order among them matters.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// A block has its rows of one layer, and every `move_blocks`-th block of rows after it: the plan makes as many blocks as
// there is work, up to a bound. So many short blocks keep memory busier than resident ones that loop, and walk through a
// layer as a front. `kLanes` lanes share a row, of which each has `kVectors` in flight, in `kRows` rows at a time. What
// a lane must know before it can load a row (slots, layer pointer, count, whether it was staged) is loaded at once.
template <typename Config>
KGEN_DEVICE void move(const Params& params) {
  constexpr int kLanes = Config::kLanes, kRows = Config::kRows, kVectors = Config::kVectors, kApart = 32 / kLanes;
  constexpr int kWarpRows = kApart * kRows, kBlockRows = Config::kWarps * kWarpRows;
  const int lane = thread_index() % 32, layer = block_index_y();
  if (layer >= params.layers) return;
  const Global<uint8_t> base = layer_base(params, layer);
  const int count = move_count(params), in_block = thread_index() / 32 * kWarpRows + lane / kLanes;
  for (int first = block_index_x() * kBlockRows; first < count; first += params.move_blocks * kBlockRows) {
    Global<const uint8_t> sources[kRows];
    Global<uint8_t> targets[kRows];
    KGEN_UNROLL
    for (int r = 0; r < kRows; r++) {
      const int index = first + in_block + r * kApart, listed = index < params.moves ? index : 0;
      const Move move = load_move(params, listed);
      const bool staged = params.stage_blocks > 0 && params.overlaps.load(listed);
      const Global<uint8_t> source =
          staged ? params.staging + staged_row(params, index, layer) : base + move.source * params.row_stride;
      const bool moves = index < count && move.target != kNothing;
      sources[r] = {source.pointer};
      targets[r] = {moves ? (base + move.target * params.row_stride).pointer : nullptr};
    }
    for (int start = lane % kLanes * 16; start < params.row_bytes; start += kLanes * kVectors * 16) {
      uint4v values[kRows][kVectors];
      KGEN_UNROLL
      for (int r = 0; r < kRows; r++) {
        KGEN_UNROLL
        for (int k = 0; k < kVectors; k++) {
          const int column = start + k * kLanes * 16;
          if (targets[r] && column < params.row_bytes) values[r][k] = sources[r].template load_as<uint4v>(column);
        }
      }
      KGEN_UNROLL
      for (int r = 0; r < kRows; r++) {
        KGEN_UNROLL
        for (int k = 0; k < kVectors; k++) {
          const int column = start + k * kLanes * 16;
          if (targets[r] && column < params.row_bytes) targets[r].template store_as<uint4v>(column, values[r][k]);
        }
      }
    }
  }
}

}  // namespace kgen::kv_defrag
