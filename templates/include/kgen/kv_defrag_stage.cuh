// Before a large move of any overlap: keeps a copy of every row that the move both reads and overwrites.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// A thread has one move and compares its source with all destinations, a tile of them at a time. Blocks along y share
// the layers. The move kernel then reads such rows from the staging area, and no other row that it reads is written.
template <typename Config>
KGEN_DEVICE void stage(const Params& params) {
  using Vector = typename Config::Vector;
  constexpr int kVectorBytes = sizeof(Vector), kThreads = Config::kWarps * 32;
  const Shared<int32_t> tile = shared_array<int32_t>(0, kThreads);
  static_assert(kThreads * 4 == Config::kStageSharedBytes, "the family and the kernel disagree");

  const int count = move_count(params), first = block_index_x() * kThreads, mine = first + thread_index();
  if (first >= count) return;
  const Move move = mine < count ? load_move(params, mine) : Move{kNothing, kNothing};
  int overlaps = 0;
  for (int start = 0; start < count; start += kThreads) {
    const int other = start + thread_index();
    tile.store(thread_index(), other < count ? load_move(params, other).target : kNothing);
    block_sync();
    KGEN_UNROLL_BY(8)
    for (int j = 0; j < kThreads; j++) overlaps |= tile.load(j) == move.source;
    block_sync();
  }
  if (move.source == kNothing) overlaps = 0;
  if (block_index_y() == 0 && mine < count) params.overlaps.store(mine, overlaps);

  const int lane = thread_index() % 32, row_vectors = params.row_bytes / kVectorBytes;
  for (int r = 0; r < 32; r++) {
    const int source = shuffle(move.source, r), staged = shuffle(overlaps, r), index = mine - lane + r;
    if (!staged) continue;
    for (int layer = block_index_y(); layer < params.layers; layer += params.stage_blocks) {
      const Global<uint8_t> row = layer_base(params, layer) + source * params.row_stride;
      const Global<uint8_t> kept = params.staging + staged_row(params, index, layer);
      KGEN_UNROLL_BY(4)
      for (int v = lane; v < row_vectors; v += 32) {
        kept.template store_as<Vector>(v * kVectorBytes, row.template load_as<Vector>(v * kVectorBytes));
      }
    }
  }
}

}  // namespace kgen::kv_defrag
