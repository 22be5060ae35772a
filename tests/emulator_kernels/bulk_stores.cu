// Copies from shared to global memory: forgotten waits and commits, sources that are filled again too early. See
// memory.cu for the convention.
#include <kgen/bulk_store.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
  int tiles;
};

constexpr int kTile = 16;  // floats
constexpr int kStages = 2;

enum class Bug { kNone, kNoWait, kNoCommit, kEarlyRefill, kUnwritten };

// Thread 0 copies `in` to `out`, a tile at a time through two buffers.
template <Bug kBug>
KGEN_DEVICE void copy_tiles(const Params& params) {
  const Shared<uint64_t> barriers = shared_array<uint64_t>(0, kStages);
  const Shared<float> tiles = shared_array<float>(128, kStages * kTile);
  if (thread_index() != 0) return;
  for (int s = 0; s < kStages; ++s) mbarrier_init(barriers.address(s), 1);
  mbarrier_init_fence();
  const auto fill = [&](int t) {
    if (t >= params.tiles) return;
    mbarrier_arrive_expect(barriers.address(t % kStages), kTile * 4);
    bulk_copy(tiles.address(t % kStages * kTile), params.in + t * kTile, kTile * 4, barriers.address(t % kStages));  // fault: refill
  };
  fill(0);
  for (int t = 0; t < params.tiles; ++t) {
    bulk_store_wait_read<kBug == Bug::kEarlyRefill ? 1 : 0>();
    fill(t + 1);
    if (kBug != Bug::kUnwritten) mbarrier_wait(barriers.address(t % kStages), t / kStages % 2);
    bulk_store(params.out + t * kTile, tiles.address(t % kStages * kTile), kTile * 4);  // fault: source
    if (kBug != Bug::kNoCommit) bulk_store_commit();
  }
  if (kBug != Bug::kNoWait) bulk_store_wait_read<0>();
}
KGEN_KERNEL(stores_right, 32, 1, Params, params) { copy_tiles<Bug::kNone>(params); }
KGEN_KERNEL(stores_no_wait, 32, 1, Params, params) { copy_tiles<Bug::kNoWait>(params); }
KGEN_KERNEL(stores_no_commit, 32, 1, Params, params) { copy_tiles<Bug::kNoCommit>(params); }
KGEN_KERNEL(stores_early_refill, 32, 1, Params, params) { copy_tiles<Bug::kEarlyRefill>(params); }
KGEN_KERNEL(stores_unwritten, 32, 1, Params, params) { copy_tiles<Bug::kUnwritten>(params); }
KGEN_KERNEL(stores_outside, 32, 1, Params, params) {
  const Shared<float> tile = shared_array<float>(0, kTile);
  if (thread_index() < kTile) tile.store(thread_index(), 1);
  block_sync();
  if (thread_index() == 0) bulk_store(params.out + 60, tile.address(), kTile * 4);  // fault: outside
}
