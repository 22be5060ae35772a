// Named barriers and mbarriers: counts, phases, and what their completion publishes.
#pragma once

#include "machine.hpp"

namespace kgen {
namespace emulator {

// A barrier instruction is a meeting point of the warp first: hardware counts whole warps. True for the lane that came
// last, with the warp's arrivals counted.
inline bool Machine::gather_at_barrier(int id, int count, bool* predicate, const char* primitive, Location where) {
  if (id < 0 || id > 15 || count % kWarp != 0 || count < 0 || count > launch.threads || (id != 0 && count == 0))
    fault("barrier_misuse", where, "give an id from 1 to 15 and a multiple of 32 threads, at most the block's",
          "a named barrier with an impossible id or count", "barrier %d with %d of %d threads", id, count,
          launch.threads);
  if (!gather(primitive, id * 2048 + count, where, predicate)) return false;
  NamedBarrier& barrier = named[id];
  if (barrier.arrived == 0) barrier.expected = count;
  if (barrier.expected != count)
    fault("barrier_misuse", where, "let all that meet at a barrier give the same count",
          "a named barrier was given two counts", "barrier %d: %d threads here, %d by those who wait", id, count,
          barrier.expected);
  const uint32_t mine = 1u << (thread / kWarp);
  if ((barrier.there & mine) != 0)  // hardware would count it as a warp that has not come yet, and go on without that one
    fault("barrier_misuse", where, "let a warp arrive again only once it knows that the others have",
          "a warp arrives twice at a named barrier in one phase", "barrier %d: %d of %d threads are there, warp %d's too",
          id, barrier.arrived, count, thread / kWarp);
  barrier.there |= mine;
  for (const void* operand : warp().operands) barrier.any |= *static_cast<const bool*>(operand);
  barrier.arrived += kWarp;
  for (int t = thread / kWarp * kWarp, end = t + kWarp; t < end; ++t) {
    clocks.join(clocks.named_row(id), t);
    clocks.advance(t);
  }
  return true;
}

inline bool Machine::named_barrier(int id, int count, bool predicate, const char* primitive, Location where) {
  const size_t self = static_cast<size_t>(thread);
  if (!gather_at_barrier(id, count, &predicate, primitive, where)) return threads[self].any;
  warp().arrived = 0;
  for (size_t t = self / kWarp * kWarp, end = t + kWarp; t < end; ++t)
    threads[t].now(Wait::kNamedBarrier, id, 0, primitive, where);
  NamedBarrier& barrier = named[id];
  barrier.warps |= 1u << (thread / kWarp);
  if (barrier.arrived == (id == 0 ? live_threads : count)) {
    complete_named_barrier(id);
    warp().ready &= ~(1u << lane());  // goes on itself
    threads[static_cast<size_t>(thread)].wait = Wait::kNone;
    preempt_sometimes();
  } else {
    park(Wait::kNamedBarrier, primitive, where, id);
  }
  return threads[self].any;
}

inline void Machine::arrive_named(int id, int count, Location where) {
  bool predicate = false;
  if (!gather_at_barrier(id, count, &predicate, "named_barrier_arrive", where)) return;
  if (named[id].arrived == count) complete_named_barrier(id);
  release();
}

inline void Machine::complete_named_barrier(int id) {
  NamedBarrier& barrier = named[id];
  for (int w = 0; w < warp_count(); ++w) {
    if ((barrier.warps >> w & 1) == 0) continue;
    for (int t = w * kWarp; t < (w + 1) * kWarp; ++t) {
      clocks.join(t, clocks.named_row(id));
      threads[static_cast<size_t>(t)].any = barrier.any;
    }
    wake_lanes(w, kFullMask);
  }
  clocks.clear(clocks.named_row(id));
  barrier = NamedBarrier{0, 0, 0, 0, false};
}

inline void Machine::init_mbarrier(uint32_t address, int arrivals, Location where) {
  const uint32_t offset = shared_offset(address, 8, "mbarrier", where);
  check_shared_range(offset, 8, 8, "mbarrier", where);
  if (arrivals < 1 || arrivals >= 1 << 20)
    fault("mbarrier_misuse", where, "expect from 1 to 2^20 - 1 arrivals", "mbarrier_init with an impossible count",
          "%d arrivals", arrivals);
  for (const Mbarrier& each : mbarriers)
    if (each.offset == offset)
      fault("mbarrier_misuse", where, "initialise each mbarrier once", "an mbarrier was initialised twice",
            "shared address %u, first at %s:%d", address, each.where.file, each.where.line);
  if (mbarriers.size() == static_cast<size_t>(Clocks::kMaxMbarriers))
    fault("mbarrier_misuse", where, "use fewer mbarriers", "more mbarriers than the emulator models", "%d are in use",
          Clocks::kMaxMbarriers);
  touch_shared(offset, 8, true, where);
  const int32_t epoch = clocks.epoch(thread);
  shadow.relabel(offset, 8, thread, epoch, clocks.object_party(), INT32_MAX);
  mbarriers.push_back(Mbarrier{offset, arrivals, arrivals, 0, 0, 0, 0, thread, epoch, false, where});
}

inline void Machine::fence_mbarrier_init() {
  for (Mbarrier& each : mbarriers)
    if (each.initialiser == thread) each.fenced = true;
}

inline Mbarrier& Machine::find_mbarrier(uint32_t address, const char* primitive, Location where) {
  for (Mbarrier& each : mbarriers) {
    if (each.offset + kSharedBase != address) continue;
    if (clocks.row(thread)[each.initialiser] < each.initialised_epoch)
      fault("race", where, "put mbarrier_init_fence and a block_sync between initialisation and use",
            "race on an mbarrier: used before its initialisation was published",
            "%s at shared address %u, initialised by thread %d at %s:%d", primitive, address, each.initialiser,
            each.where.file, each.where.line);
    if (!each.fenced)
      fault("missing_fence", where, "call mbarrier_init_fence after mbarrier_init, in the same thread",
            "an mbarrier is used without mbarrier_init_fence",
            "%s at shared address %u, initialised by thread %d at %s:%d", primitive, address, each.initialiser,
            each.where.file, each.where.line);
    return each;
  }
  fault("mbarrier_misuse", where, "initialise it first, and give its shared address",
        "no mbarrier was initialised at this address", "%s at shared address %u", primitive, address);
}

inline void Machine::take_arrival(Mbarrier& barrier, const char* primitive, Location where) {
  if (barrier.pending == 0)
    fault("mbarrier_misuse", where, "compare mbarrier_init's count with the arrivals of one phase",
          "an mbarrier got more arrivals than it expects",
          "%s at shared address %u: phase %d has all %d arrivals and %lld bytes to come", primitive,
          barrier.offset + kSharedBase, barrier.phase, barrier.expected, static_cast<long long>(barrier.transactions));
  --barrier.pending;
}

inline void Machine::arrive(Mbarrier& barrier, int64_t transactions, const char* primitive, Location where) {
  const int index = static_cast<int>(&barrier - mbarriers.data());
  if (transactions < 0 || transactions >= 1 << 20)
    fault("mbarrier_misuse", where, "expect from 0 to 2^20 - 1 bytes",
          "an mbarrier was told to expect impossible bytes", "%lld bytes", static_cast<long long>(transactions));
  take_arrival(barrier, primitive, where);
  barrier.transactions += transactions;
  clocks.join(clocks.arrived_row(index), thread);
  clocks.advance(thread);
  complete_phase_if_due(index);
}

inline void Machine::complete_phase_if_due(int index) {
  Mbarrier& barrier = mbarriers[static_cast<size_t>(index)];
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  const int32_t epoch = barrier.phase + 1;
  const int party = clocks.mbarrier_party(index);
  clocks.row(clocks.arrived_row(index))[party] = epoch;
  clocks.copy(clocks.completed_row(index), clocks.arrived_row(index));
  // Copies that this phase did not wait for stay unpublished.
  for (PendingCopy& copy : in_flight) {
    if (copy.mbarrier != index || copy.epoch > epoch) continue;
    for (const CopyPart& part : copy.parts)
      shadow.relabel(part.offset, part.bytes, party, copy.epoch, party, epoch + 1);
    copy.epoch = epoch + 1;
    barrier.copies_phase = epoch + 1;
  }
  const int parity = barrier.phase & 1;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  for (int t = 0; t < launch.threads; ++t) {
    const Thread& who = threads[static_cast<size_t>(t)];
    if (who.wait != Wait::kMbarrier || who.object != index || who.parity != parity) continue;
    if ((warps[static_cast<size_t>(t / kWarp)].ready >> (t % kWarp) & 1) != 0) continue;  // woken by an earlier phase
    clocks.join(t, clocks.completed_row(index));
    barrier.observed_phase = epoch;
    wake_lanes(t / kWarp, 1u << (t % kWarp));
  }
}

inline void Machine::wait_mbarrier(Mbarrier& barrier, int parity, Location where) {
  const int index = static_cast<int>(&barrier - mbarriers.data());
  if (parity != 0 && parity != 1)
    fault("mbarrier_misuse", where, "give the lowest bit of the phase number",
          "mbarrier_wait with an impossible parity", "parity %d", parity);
  if ((barrier.phase & 1) == parity) {
    park(Wait::kMbarrier, "mbarrier_wait", where, index, parity);
    return;
  }
  clocks.join(thread, clocks.completed_row(index));
  barrier.observed_phase = barrier.phase;
}

}  // namespace emulator
}  // namespace kgen
