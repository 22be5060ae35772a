// Before a large move of any overlap: keeps a copy of every row that the move both reads and overwrites.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// A block has 32 moves, one a lane of every warp; its warps share the destinations to compare their sources with, and
// then the rows to copy. Blocks along y share the layers, and compare all of it each: that is cheaper than to wait for
// each other. The move kernel then reads such rows from the staging area, and no other row that it reads is written.
template <typename Config>
KGEN_DEVICE void stage(const Params& params) {
  constexpr int kWarps = Config::kWarps, kLoads = 4, kTile = 32 * kLoads;
  static_assert(kWarps * (kTile + 32) * 4 == Config::kStageSharedBytes, "the family and the kernel disagree");
  const Shared<int32_t> tiles = shared_array<int32_t>(0, kWarps * kTile);
  const Shared<int32_t> found = shared_array<int32_t>(kWarps * kTile * 4, kWarps * 32);

  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int count = move_count(params), first = block_index_x() * 32, mine = first + lane;
  const int compared = first < count ? count : 0;
  const Move move = mine < count ? load_move(params, mine) : Move{kNothing, kNothing};
  bool overlaps = false;
  for (int start = warp * kTile; start < compared; start += kWarps * kTile) {
    KGEN_UNROLL
    for (int k = 0; k < kLoads; k++) {
      const int other = start + k * 32 + lane;
      tiles.store(warp * kTile + k * 32 + lane, other < compared ? load_move(params, other).target : kNothing);
    }
    warp_sync();
    KGEN_UNROLL_BY(8)
    for (int j = 0; j < kTile; j += 4) {
      const uint4v targets = tiles.template load_as<uint4v>(warp * kTile + j);
      const auto source = static_cast<uint32_t>(move.source);
      overlaps |= targets.x == source || targets.y == source || targets.z == source || targets.w == source;
    }
    warp_sync();
  }
  found.store(warp * 32 + lane, overlaps);
  block_sync();
  overlaps = false;
  for (int w = 0; w < kWarps; w++) overlaps |= found.load(w * 32 + lane) != 0;
  if (move.source == kNothing) overlaps = false;
  if (block_index_y() == 0 && warp == 0 && mine < params.moves) params.overlaps.store(mine, overlaps);

  for (uint32_t rows = warp_ballot(overlaps); rows != 0; rows &= rows - 1) {
    const int row = lowest_lane(rows), source = shuffle(move.source, row);
    for (int layer = block_index_y() + warp * params.stage_blocks; layer < params.layers;
         layer += kWarps * params.stage_blocks) {
      const Global<uint8_t> from = layer_base(params, layer) + source * params.row_stride;
      const Global<uint8_t> kept = params.staging + staged_row(params, first + row, layer);
      KGEN_UNROLL_BY(4)
      for (int column = lane * 16; column < params.row_bytes; column += 32 * 16) {
        kept.template store_as<uint4v>(column, from.template load_as<uint4v>(column));
      }
    }
  }
}

}  // namespace kgen::kv_defrag
