// Asynchronous copies: missing waits, stages refilled too early, bad ranges. See memory.cu for the convention.
#include <kgen/primitives.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
  int tiles;
};

constexpr int kTile = 64;  // floats
constexpr int kStages = 2;

enum class Bug { kNone, kNoWait, kNoRelease, kWrongParity, kShortExpect, kNoExpect };

// Warp 0 fills a ring of two stages tile by tile; warps 1 and 2 add the tiles up.
template <Bug kBug>
KGEN_DEVICE void ring(const Params& params) {
  const Shared<uint64_t> barriers = shared_array<uint64_t>(0, 2 * kStages);
  const Shared<float> tiles = shared_array<float>(128, kStages * kTile);
  const int warp = thread_index() / 32;
  if (thread_index() == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(barriers.address(s), 1);
      mbarrier_init(barriers.address(kStages + s), 64);
    }
    mbarrier_init_fence();
  }
  block_sync();
  if (warp == 0) {
    if (thread_index() != 0) return;
    for (int t = 0; t < params.tiles; ++t) {
      const int s = t % kStages;
      // Without the release the producer only sees to it that the copy before has landed.
      const int gate = kBug == Bug::kNoRelease ? s : kStages + s;
      if (t >= kStages) mbarrier_wait(barriers.address(gate), (t / kStages - 1) & 1);  // fault: deadlock
      const int bytes = kTile * 4;
      if (kBug == Bug::kNoExpect)
        mbarrier_arrive(barriers.address(s));
      else
        mbarrier_arrive_expect(barriers.address(s), kBug == Bug::kShortExpect ? bytes - 16 : bytes);
      bulk_copy(tiles.address(s * kTile), params.in + t * kTile, bytes, barriers.address(s));  // fault: kNoRelease
    }
    return;
  }
  float sum = 0;
  for (int t = 0; t < params.tiles; ++t) {
    const int s = t % kStages;
    if (kBug != Bug::kNoWait) {
      const int parity = t / kStages & 1;
      mbarrier_wait(barriers.address(s), kBug == Bug::kWrongParity ? 1 - parity : parity);
    }
    sum += tiles.load(s * kTile + thread_index() - 32);  // fault: kNoWait
    mbarrier_arrive(barriers.address(kStages + s));
  }
  params.out.store(thread_index() - 32, sum);
}
KGEN_KERNEL(ring_right, 96, 1, Params, params) { ring<Bug::kNone>(params); }
KGEN_KERNEL(ring_no_wait, 96, 1, Params, params) { ring<Bug::kNoWait>(params); }
KGEN_KERNEL(ring_no_release, 96, 1, Params, params) { ring<Bug::kNoRelease>(params); }
KGEN_KERNEL(ring_wrong_parity, 96, 1, Params, params) { ring<Bug::kWrongParity>(params); }
KGEN_KERNEL(ring_short_expect, 96, 1, Params, params) { ring<Bug::kShortExpect>(params); }
KGEN_KERNEL(ring_no_expect, 96, 1, Params, params) { ring<Bug::kNoExpect>(params); }

// Every thread copies 16 bytes with cp_async_16 and reads what its neighbour copied.
template <Bug kBug>
KGEN_DEVICE void gather(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  const Shared<float> rows = shared_array<float>(128, 64 * 4);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 64);
    mbarrier_init_fence();
  }
  block_sync();
  const int i = thread_index();
  cp_async_16(rows.address(4 * i), params.in + 4 * i);  // fault: gather_issue
  if (kBug == Bug::kNoRelease) return;
  if (kBug == Bug::kNoExpect)
    mbarrier_arrive(barrier.address());
  else
    cp_async_arrive(barrier.address());
  if (kBug != Bug::kNoWait) mbarrier_wait(barrier.address(), 0);
  const float4v row = rows.load_as<float4v>(4 * (63 - i));  // fault: gather
  params.out.store(i, row.x + row.y + row.z + row.w);
}
KGEN_KERNEL(gather_right, 64, 1, Params, params) { gather<Bug::kNone>(params); }
KGEN_KERNEL(gather_no_wait, 64, 1, Params, params) { gather<Bug::kNoWait>(params); }
KGEN_KERNEL(gather_plain_arrive, 64, 1, Params, params) { gather<Bug::kNoExpect>(params); }
KGEN_KERNEL(gather_no_arrive, 64, 1, Params, params) { gather<Bug::kNoRelease>(params); }

// One bulk copy with a displaced source, destination or size.
template <int kFrom, int kTo, int kBytes, bool kWait>
KGEN_DEVICE void one_copy(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  const Shared<float> tile = shared_array<float>(128, kTile);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier.address(), kBytes);
    bulk_copy(tile.address(kTo), params.in + kFrom, kBytes, barrier.address());  // fault: one_copy
    if (kWait) mbarrier_wait(barrier.address(), 0);
    params.out.store(0, 1.0f);
  }
}
KGEN_KERNEL(one_copy_right, 32, 1, Params, params) { one_copy<0, 0, kTile * 4, true>(params); }
KGEN_KERNEL(copy_misaligned_source, 32, 1, Params, params) { one_copy<1, 0, 128, true>(params); }
KGEN_KERNEL(copy_misaligned_target, 32, 1, Params, params) { one_copy<0, 2, 128, true>(params); }
KGEN_KERNEL(copy_misaligned_size, 32, 1, Params, params) { one_copy<0, 0, 120, true>(params); }
KGEN_KERNEL(copy_past_array, 32, 1, Params, params) { one_copy<0, 4, kTile * 4, true>(params); }
KGEN_KERNEL(copy_past_buffer, 32, 1, Params, params) { one_copy<8 * kTile - 16, 0, 128, true>(params); }
KGEN_KERNEL(copy_abandoned, 32, 1, Params, params) { one_copy<0, 0, kTile * 4, false>(params); }

// Ordinary stores beside cp_async_16 need an arrival of their own.
template <bool kWrong>
KGEN_DEVICE void zero_fill(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  const Shared<float> rows = shared_array<float>(128, 32 * 4);
  const int i = thread_index();
  if (i == 0) {
    mbarrier_init(barrier.address(), kWrong ? 32 : 64);
    mbarrier_init_fence();
  }
  block_sync();
  if (i < 20)
    cp_async_16(rows.address(4 * i), params.in + 4 * i);
  else
    rows.store_as(4 * i, float4v{0, 0, 0, 0});
  cp_async_arrive(barrier.address());
  if (!kWrong) mbarrier_arrive(barrier.address());
  mbarrier_wait(barrier.address(), 0);
  params.out.store(i, rows.load(4 * (31 - i)));  // fault: zero_fill
}
KGEN_KERNEL(zero_fill_right, 32, 1, Params, params) { zero_fill<false>(params); }
KGEN_KERNEL(zero_fill_wrong, 32, 1, Params, params) { zero_fill<true>(params); }
