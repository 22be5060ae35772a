// Named barriers that some only arrive at, that vote, and copies that a warp issues as one. See memory.cu for the
// convention.
#include <kgen/primitives.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
  int tiles;
};

constexpr int kRounds = 3;

enum class Bug { kNone, kEarly, kTwice, kNobody, kCount, kOutside, kZero, kSomeLanes };

// Warp 1 writes a row, warp 0 reads it, in turn; each only arrives at the barrier that the other waits at.
template <Bug kBug>
KGEN_DEVICE void handoff(const Params& params) {
  constexpr int kThreads = kBug == Bug::kCount ? 96 : kBug == Bug::kOutside ? 128 : 64;
  const Shared<float> row = shared_array<float>(0, 32);
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  float sum = 0;
  for (int round = 0; round < kRounds && warp < 2; ++round) {
    const bool again = round + 1 < kRounds;
    if (warp == 1) {
      if (round > 0) named_barrier_sync(1, 64);
      row.store(lane, params.in.load(lane) + static_cast<float>(round));  // fault: writes
      named_barrier_arrive(2, 64);
      continue;
    }
    named_barrier_sync(2, 64);
    if (kBug == Bug::kEarly && again) named_barrier_arrive(1, 64);
    sum += row.load(31 - lane);  // fault: reads
    if (!again || kBug == Bug::kEarly || kBug == Bug::kNobody) continue;
    if (kBug == Bug::kSomeLanes && lane >= 7) continue;
    named_barrier_arrive(kBug == Bug::kZero ? 0 : 1, kThreads);  // fault: arrives
    if (kBug == Bug::kTwice) named_barrier_arrive(1, 64);
  }
  if (warp == 0) params.out.store(lane, sum);
}
KGEN_KERNEL(handoff_right, 96, 1, Params, params) { handoff<Bug::kNone>(params); }
KGEN_KERNEL(handoff_early, 96, 1, Params, params) { handoff<Bug::kEarly>(params); }
KGEN_KERNEL(handoff_twice, 96, 1, Params, params) { handoff<Bug::kTwice>(params); }
KGEN_KERNEL(handoff_nobody, 96, 1, Params, params) { handoff<Bug::kNobody>(params); }
KGEN_KERNEL(handoff_count, 96, 1, Params, params) { handoff<Bug::kCount>(params); }
KGEN_KERNEL(handoff_outside, 96, 1, Params, params) { handoff<Bug::kOutside>(params); }
KGEN_KERNEL(handoff_zero, 96, 1, Params, params) { handoff<Bug::kZero>(params); }
KGEN_KERNEL(handoff_some_lanes, 96, 1, Params, params) { handoff<Bug::kSomeLanes>(params); }

enum class Again { kNever, kArrives, kWaits };

// Warp 0 arrives at a barrier once a phase, and again only after the phase has ended; or else twice in the first.
template <Again kAgain>
KGEN_DEVICE void phases(const Params& params) {
  const int warp = thread_index() / 32;
  for (int round = 0; round < kRounds; ++round) {
    if (warp == 0) {
      named_barrier_arrive(1, 64);
      if (kAgain == Again::kArrives) named_barrier_arrive(1, 64);  // fault: arrives again
      if (kAgain == Again::kWaits) named_barrier_sync(1, 64);      // fault: waits again
    }
    block_sync();
    if (warp == 1) named_barrier_sync(1, 64);
    block_sync();
  }
  params.out.store(thread_index(), 1.0f);
}
KGEN_KERNEL(phases_right, 64, 1, Params, params) { phases<Again::kNever>(params); }
KGEN_KERNEL(phases_arrives, 64, 1, Params, params) { phases<Again::kArrives>(params); }
KGEN_KERNEL(phases_waits, 64, 1, Params, params) { phases<Again::kWaits>(params); }

// Three of four warps vote, and what they wrote before is there after. `in` is each thread's vote, by round.
template <Bug kBug>
KGEN_DEVICE void vote(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 128);
  const int t = thread_index();
  const bool apart = t >= 96;
  for (int round = 0; round < kRounds; ++round) {
    row.store(t, static_cast<float>(round));
    const bool mine = params.in.load(round * 128 + t) != 0;
    bool any = mine;
    if (kBug == Bug::kSomeLanes && t == 40) break;
    if (kBug == Bug::kEarly)
      any = warp_any(mine);
    else
      any = named_barrier_any(apart ? 2 : 1, apart ? 32 : kBug == Bug::kCount ? 128 : 96, mine);  // fault: votes
    const float other = row.load(apart ? t : (t + 32) % 96);  // fault: reads_votes
    params.out.store(round * 128 + t, any && other == static_cast<float>(round) ? 1.0f : 0.0f);
    block_sync();
  }
}
KGEN_KERNEL(vote_right, 128, 1, Params, params) { vote<Bug::kNone>(params); }
KGEN_KERNEL(vote_early, 128, 1, Params, params) { vote<Bug::kEarly>(params); }
KGEN_KERNEL(vote_count, 128, 1, Params, params) { vote<Bug::kCount>(params); }
KGEN_KERNEL(vote_some_lanes, 128, 1, Params, params) { vote<Bug::kSomeLanes>(params); }

enum class CopyBug { kNone, kDisagree, kSomeLanes, kNoWait, kNoMeeting, kNoArrival, kPastArray };
constexpr int kTile = 64;  // floats

// Warp 0 copies tile after tile to one place; warp 1 adds them up.
template <CopyBug kBug>
KGEN_DEVICE void warp_copies(const Params& params) {
  const Shared<uint64_t> barrier = shared_array<uint64_t>(0, 1);
  const Shared<float> tile = shared_array<float>(128, kTile);
  const int lane = thread_index() % 32;
  if (thread_index() == 0) {
    mbarrier_init(barrier.address(), 1);
    mbarrier_init_fence();
  }
  block_sync();
  float sum = 0;
  for (int t = 0; t < params.tiles; ++t) {
    if (thread_index() < 32) {
      if (t > 0 && kBug == CopyBug::kNoMeeting) mbarrier_wait(barrier.address(), (t - 1) & 1);
      if (t > 0 && kBug != CopyBug::kNoMeeting) named_barrier_sync(1, 64);
      if (lane == 0) mbarrier_arrive_expect(barrier.address(), kTile * 4);
      if (kBug == CopyBug::kSomeLanes && lane == 9) break;
      const int aside = kBug == CopyBug::kDisagree && lane == 7 ? 4 : 0;
      const int past = kBug == CopyBug::kPastArray ? 4 : 0;
      const Global<const float> source = params.in + (t * kTile + aside);
      warp_bulk_copy(tile.address(past), source, kTile * 4, barrier.address());  // fault: copies
      continue;
    }
    if (kBug != CopyBug::kNoWait) mbarrier_wait(barrier.address(), t & 1);
    sum += tile.load(lane) + tile.load(lane + 32);  // fault: adds
    if (t + 1 < params.tiles && kBug != CopyBug::kNoArrival) named_barrier_arrive(1, 64);
  }
  if (thread_index() >= 32) params.out.store(lane, sum);
}
KGEN_KERNEL(warp_copies_right, 64, 1, Params, params) { warp_copies<CopyBug::kNone>(params); }
KGEN_KERNEL(warp_copies_disagree, 64, 1, Params, params) { warp_copies<CopyBug::kDisagree>(params); }
KGEN_KERNEL(warp_copies_some_lanes, 64, 1, Params, params) { warp_copies<CopyBug::kSomeLanes>(params); }
KGEN_KERNEL(warp_copies_no_wait, 64, 1, Params, params) { warp_copies<CopyBug::kNoWait>(params); }
KGEN_KERNEL(warp_copies_no_meeting, 64, 1, Params, params) { warp_copies<CopyBug::kNoMeeting>(params); }
KGEN_KERNEL(warp_copies_no_arrival, 64, 1, Params, params) { warp_copies<CopyBug::kNoArrival>(params); }
KGEN_KERNEL(warp_copies_past_array, 64, 1, Params, params) { warp_copies<CopyBug::kPastArray>(params); }

// Reductions that not all lanes reach.
KGEN_KERNEL(sum_some_lanes, 32, 1, Params, params) {
  int sum = 0;
  if (thread_index() != 5) sum = warp_sum(1);  // fault: sum
  params.out.store(thread_index(), static_cast<float>(sum));
}
KGEN_KERNEL(ballot_some_lanes, 32, 1, Params, params) {
  uint32_t lanes = 0;
  if (thread_index() < 31) lanes = warp_ballot(true);  // fault: ballot
  params.out.store(thread_index(), static_cast<float>(lanes));
}
