// Collectives that not all lanes reach, and waits that never end. See memory.cu for the convention.
#include <kgen/primitives.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
};

template <bool kWrong>
KGEN_DEVICE void subset_vote(const Params& params) {
  bool any = false;
  if (!kWrong || thread_index() < 20) any = warp_any(thread_index() == 3);  // fault: subset_vote
  params.out.store(thread_index(), any ? 1.0f : 0.0f);
}
KGEN_KERNEL(subset_vote_right, 32, 1, Params, params) { subset_vote<false>(params); }
KGEN_KERNEL(subset_vote_wrong, 32, 1, Params, params) { subset_vote<true>(params); }

// Both branches call the same primitive, from two places.
template <bool kWrong>
KGEN_DEVICE void two_places(const Params& params) {
  float value;
  if (kWrong && thread_index() % 2 == 0)
    value = shuffle_xor(1.0f, 1);
  else
    value = shuffle_xor(2.0f, 1);
  params.out.store(thread_index(), value);
}
KGEN_KERNEL(two_places_right, 32, 1, Params, params) { two_places<false>(params); }
KGEN_KERNEL(two_places_wrong, 32, 1, Params, params) { two_places<true>(params); }

template <bool kWrong>
KGEN_DEVICE void divergent_barrier(const Params& params) {
  if (!kWrong || thread_index() != 40) block_sync();  // fault: divergent_barrier
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(divergent_barrier_right, 64, 1, Params, params) { divergent_barrier<false>(params); }
KGEN_KERNEL(divergent_barrier_wrong, 64, 1, Params, params) { divergent_barrier<true>(params); }

template <bool kWrong>
KGEN_DEVICE void barrier_count(const Params& params) {
  if (thread_index() < 64) named_barrier_sync(3, kWrong ? 96 : 64);  // fault: barrier_count
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(barrier_count_right, 96, 1, Params, params) { barrier_count<false>(params); }
KGEN_KERNEL(barrier_count_wrong, 96, 1, Params, params) { barrier_count<true>(params); }

template <bool kWrong>
KGEN_DEVICE void two_counts(const Params& params) {
  named_barrier_sync(2, kWrong && thread_index() >= 32 ? 32 : 64);
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(two_counts_right, 64, 1, Params, params) { two_counts<false>(params); }
KGEN_KERNEL(two_counts_wrong, 64, 1, Params, params) { two_counts<true>(params); }

template <int kExpected>
KGEN_DEVICE void arrivals(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), kExpected);
    mbarrier_init_fence();
  }
  block_sync();
  if (thread_index() >= 32) {
    mbarrier_arrive(barrier.address());
    mbarrier_arrive(barrier.address());
  } else {
    mbarrier_wait(barrier.address(), 0);  // fault: too_few_arrivals
  }
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(too_few_arrivals_right, 64, 1, Params, params) { arrivals<64>(params); }
KGEN_KERNEL(too_few_arrivals_wrong, 64, 1, Params, params) { arrivals<65>(params); }

// A phase already has all its arrivals and waits for bytes only.
template <bool kWrong>
KGEN_DEVICE void too_many_arrivals(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier.address(), 16);
    if (kWrong) mbarrier_arrive(barrier.address());  // fault: too_many_arrivals
  }
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(too_many_arrivals_right, 32, 1, Params, params) { too_many_arrivals<false>(params); }
KGEN_KERNEL(too_many_arrivals_wrong, 32, 1, Params, params) { too_many_arrivals<true>(params); }

template <bool kWrong>
KGEN_DEVICE void uninitialised(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 2);
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(0), 1);
    mbarrier_init_fence();
    mbarrier_arrive(barrier.address(kWrong ? 1 : 0));  // fault: uninitialised
  }
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(uninitialised_right, 32, 1, Params, params) { uninitialised<false>(params); }
KGEN_KERNEL(uninitialised_wrong, 32, 1, Params, params) { uninitialised<true>(params); }
