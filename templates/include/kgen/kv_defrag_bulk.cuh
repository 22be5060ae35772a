// The move kernel through shared memory: bulk copies in, bulk copies out, no data in registers.
#pragma once

#include <kgen/bulk_store.cuh>
#include <kgen/kv_defrag_move.cuh>

namespace kgen::kv_defrag {

// One step of a warp: a piece of the rows of one task in one layer. A row wider than a buffer is several pieces.
template <typename Config>
struct Cursor {
  int task;
  int layer;  // in the task
  int piece;
  Move move;  // of this lane

  KGEN_DEVICE void fetch(const Params& params, int groups, int tasks, int count) {
    if (task < tasks) move = lane_move<Config>(params, task_at<Config>(params, groups, task).first_move, count);
  }
  KGEN_DEVICE void advance(const Params& params, int groups, int tasks, int count, int pieces) {
    if (++piece < pieces) return;
    piece = 0;
    const Task<Config> now = task_at<Config>(params, groups, task);
    if (++layer < now.last_layer - now.first_layer) return;
    layer = 0;
    task += params.blocks * Config::kWarps;
    fetch(params, groups, tasks, count);
  }
};

// Each of `kRows` lanes has a ring of `kStages` buffers of its own; one mbarrier a warp and stage says that all of a
// stage's pieces are there. A buffer is filled again `kLag` steps after its store began, when that has been read.
template <typename Config>
KGEN_DEVICE void move_bulk(const Params& params) {
  constexpr int kStages = Config::kStages, kLag = 2;
  static_assert(kStages > kLag, "a load is in flight while the rows before it are stored");
  constexpr int kBuffers = Config::kWarps * kStages * Config::kRows;
  static_assert(kBuffers * Config::kPieceBytes + Config::kWarps * kStages * 8 == Config::kSharedBytes,
                "the family and the kernel disagree");
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const Shared<uint8_t> buffers = shared_array<uint8_t>(0, kBuffers * Config::kPieceBytes);
  const Shared<uint64_t> barriers = shared_array<uint64_t>(kBuffers * Config::kPieceBytes, Config::kWarps * kStages);
  if (thread_index() == 0) {
    for (int i = 0; i < Config::kWarps * kStages; i++) mbarrier_init(barriers.address(i), 32);
    mbarrier_init_fence();
  }
  block_sync();

  const int count = move_count(params), groups = ceil_div(count, Config::kRows);
  const int tasks = groups * ceil_div(params.layers, Config::kLayers);
  const int pieces = ceil_div(params.row_bytes, Config::kPieceBytes);
  const int piece_bytes = ceil_div(params.row_bytes / 16, pieces) * 16;
  Cursor<Config> in{block_index_x() * Config::kWarps + warp, 0, 0, {kNothing, kNothing}};
  in.fetch(params, groups, tasks, count);
  Cursor<Config> out = in;

  const auto size = [&](const Cursor<Config>& at) {
    const int left = params.row_bytes - at.piece * piece_bytes;
    return at.move.source == kNothing ? 0 : left < piece_bytes ? left : piece_bytes;
  };
  const auto buffer = [&](int stage) {
    return buffers.address(((warp * kStages + stage) * Config::kRows + lane % Config::kRows) * Config::kPieceBytes);
  };
  const auto fill = [&](int step) {
    if (in.task >= tasks) return;
    const uint32_t full = barriers.address(warp * kStages + step % kStages);
    const int bytes = size(in), layer = task_at<Config>(params, groups, in.task).first_layer + in.layer;
    mbarrier_arrive_expect(full, bytes);
    if (bytes > 0) {
      const Global<uint8_t> row = source_row(params, layer_base(params, layer), in.move.source, layer);
      bulk_copy(buffer(step % kStages), row + in.piece * piece_bytes, bytes, full);
    }
    in.advance(params, groups, tasks, count, pieces);
  };

  for (int step = 0; step < kStages - kLag; step++) fill(step);
  for (int step = 0; out.task < tasks; step++) {
    bulk_store_wait_read<kLag - 1>();
    fill(step + kStages - kLag);
    mbarrier_wait(barriers.address(warp * kStages + step % kStages), step / kStages % 2);
    const int bytes = size(out), layer = task_at<Config>(params, groups, out.task).first_layer + out.layer;
    if (bytes > 0) {
      const Global<uint8_t> row = layer_base(params, layer) + out.move.target * params.row_stride;
      bulk_store(row + out.piece * piece_bytes, buffer(step % kStages), bytes);
    }
    bulk_store_commit();
    out.advance(params, groups, tasks, count, pieces);
  }
  bulk_store_wait_read<0>();
}

}  // namespace kgen::kv_defrag
