// Accesses that are wrong by their order: races and misplaced waits. See memory.cu for the convention.
#include <kgen/primitives.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
};

// Each thread reads what a thread of another warp wrote.
template <bool kWrong>
KGEN_DEVICE void block_barrier(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 64);
  row.store(thread_index(), 1.0f);
  if (!kWrong) block_sync();
  params.out.store(thread_index(), row.load(63 - thread_index()));
}
KGEN_KERNEL(block_barrier_right, 64, 1, Params, params) { block_barrier<false>(params); }
KGEN_KERNEL(block_barrier_wrong, 64, 1, Params, params) { block_barrier<true>(params); }

// The row is written again before everybody has read it.
template <bool kWrong>
KGEN_DEVICE void write_after_read(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 64);
  float sum = 0;
  for (int i = 0; i < 3; ++i) {
    row.store(thread_index(), static_cast<float>(i));
    block_sync();
    sum += row.load(63 - thread_index());
    if (!kWrong) block_sync();
  }
  params.out.store(thread_index(), sum);
}
KGEN_KERNEL(write_after_read_right, 64, 1, Params, params) { write_after_read<false>(params); }
KGEN_KERNEL(write_after_read_wrong, 64, 1, Params, params) { write_after_read<true>(params); }

// Lanes exchange through memory; a shuffle between does not order them, warp_sync does.
template <bool kWrong>
KGEN_DEVICE void warp_order(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 32);
  row.store(thread_index(), 1.0f);
  if (kWrong)
    shuffle_xor(1.0f, 1);
  else
    warp_sync();
  params.out.store(thread_index(), row.load(31 - thread_index()));  // fault: warp_order
}
KGEN_KERNEL(warp_order_right, 32, 1, Params, params) { warp_order<false>(params); }
KGEN_KERNEL(warp_order_wrong, 32, 1, Params, params) { warp_order<true>(params); }

// A named barrier for two of four warps does not order the other two.
template <bool kWrong>
KGEN_DEVICE void named_pair(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 128);
  const int pair = thread_index() / 64;
  row.store(thread_index(), 1.0f);
  named_barrier_sync(1 + pair, 64);
  const int partner = kWrong ? 127 - thread_index() : pair * 64 + 63 - thread_index() % 64;
  params.out.store(thread_index(), row.load(partner));
}
KGEN_KERNEL(named_pair_right, 128, 1, Params, params) { named_pair<false>(params); }
KGEN_KERNEL(named_pair_wrong, 128, 1, Params, params) { named_pair<true>(params); }

// Two blocks write one element of global memory.
template <bool kWrong>
KGEN_DEVICE void two_blocks(const Params& params) {
  params.out.store(block_index_x() * (kWrong ? 31 : 32) + thread_index(), 1.0f);  // fault: two_blocks
}
KGEN_KERNEL(two_blocks_right, 32, 1, Params, params) { two_blocks<false>(params); }
KGEN_KERNEL(two_blocks_wrong, 32, 1, Params, params) { two_blocks<true>(params); }

// Threads of one block exchange through global memory.
template <bool kWrong>
KGEN_DEVICE void through_global(const Params& params) {
  const int t = thread_index();
  params.out.store(t, 1.0f);
  if (kWrong)
    warp_sync();
  else
    block_sync();
  if (t >= 32) params.out.store(t + 32, params.out.load(t - 32));
}
KGEN_KERNEL(through_global_right, 64, 1, Params, params) { through_global<false>(params); }
KGEN_KERNEL(through_global_wrong, 64, 1, Params, params) { through_global<true>(params); }

// Neighbouring threads write the two halves of one word: no conflict, unless the halves overlap.
template <bool kWrong>
KGEN_DEVICE void half_words(const Params& params) {
  const Shared<uint16_t> row = shared_array<uint16_t>(0, 64);
  row.store(kWrong ? thread_index() / 2 : thread_index(), static_cast<uint16_t>(thread_index()));  // fault: half_words
  params.out.store(thread_index(), 0.0f);
}
KGEN_KERNEL(half_words_right, 64, 1, Params, params) { half_words<false>(params); }
KGEN_KERNEL(half_words_wrong, 64, 1, Params, params) { half_words<true>(params); }

// One lane waits for the mbarrier; the others learn of it by warp_sync only.
template <bool kWrong>
KGEN_DEVICE void elected_wait(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  const Shared<float> cell = shared_array<float>(16, 1);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 1);
    mbarrier_init_fence();
  }
  block_sync();
  if (thread_index() == 32) {
    cell.store(0, 5.0f);
    mbarrier_arrive(barrier.address());
  }
  if (thread_index() < 32) {
    if (thread_index() == 0) mbarrier_wait(barrier.address(), 0);
    if (!kWrong) warp_sync();
    params.out.store(thread_index(), cell.load(0));  // fault: elected_wait
  }
}
KGEN_KERNEL(elected_wait_right, 64, 1, Params, params) { elected_wait<false>(params); }
KGEN_KERNEL(elected_wait_wrong, 64, 1, Params, params) { elected_wait<true>(params); }

// An mbarrier is used before block_sync has published its initialisation.
template <bool kWrong>
KGEN_DEVICE void unpublished_init(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 64);
    mbarrier_init_fence();
  }
  if (kWrong)
    warp_sync();
  else
    block_sync();
  mbarrier_arrive(barrier.address());  // fault: unpublished_init
  params.out.store(thread_index(), 0.0f);
}
KGEN_KERNEL(unpublished_init_right, 64, 1, Params, params) { unpublished_init<false>(params); }
KGEN_KERNEL(unpublished_init_wrong, 64, 1, Params, params) { unpublished_init<true>(params); }

template <bool kWrong>
KGEN_DEVICE void init_fence(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 32);
    if (!kWrong) mbarrier_init_fence();
  }
  block_sync();
  mbarrier_arrive(barrier.address());  // fault: init_fence
  params.out.store(thread_index(), 0.0f);
}
KGEN_KERNEL(init_fence_right, 32, 1, Params, params) { init_fence<false>(params); }
KGEN_KERNEL(init_fence_wrong, 32, 1, Params, params) { init_fence<true>(params); }

// An mbarrier's own bytes are overwritten.
template <bool kWrong>
KGEN_DEVICE void mbarrier_bytes(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 2);
  if (thread_index() == 0) mbarrier_init(barrier.address(), 32);
  block_sync();
  if (thread_index() == 0) barrier.store(kWrong ? 0 : 1, 0);  // fault: mbarrier_bytes
  params.out.store(thread_index(), 0.0f);
}
KGEN_KERNEL(mbarrier_bytes_right, 32, 1, Params, params) { mbarrier_bytes<false>(params); }
KGEN_KERNEL(mbarrier_bytes_wrong, 32, 1, Params, params) { mbarrier_bytes<true>(params); }
