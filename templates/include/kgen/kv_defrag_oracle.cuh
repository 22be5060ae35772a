// The naive kernels: every row into the staging area, then every row out of it. Slow and obviously simultaneous.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// One warp has one move in one layer.
template <bool kScatter>
KGEN_DEVICE void oracle(const Params& params) {
  const int index = block_index_x(), layer = block_index_y();
  if (index >= move_count(params) || layer >= params.layers) return;
  const Move move = load_move(params, index);
  if (move.source == kNothing) return;
  const Global<uint8_t> row = layer_base(params, layer) + (kScatter ? move.target : move.source) * params.row_stride;
  const Global<uint8_t> kept = params.staging + staged_row(params, index, layer);
  for (int at = thread_index() * 16; at < params.row_bytes; at += 32 * 16) {
    if (kScatter) {
      row.template store_as<uint4v>(at, kept.template load_as<uint4v>(at));
    } else {
      kept.template store_as<uint4v>(at, row.template load_as<uint4v>(at));
    }
  }
}

}  // namespace kgen::kv_defrag
