// Asynchronous copies: issued now, landed as late as the kernel's waits allow or at a random time before.
#pragma once

#include "machine.hpp"

namespace kgen {
namespace emulator {

inline void Machine::issue_bulk(uint32_t destination, uint64_t source, int bytes, uint32_t barrier_address,
                                Location where) {
  if (bytes <= 0 || bytes % 16 != 0)
    fault("misaligned", where, "copy a multiple of 16 bytes", "bulk_copy of an impossible size", "%d bytes", bytes);
  Mbarrier& barrier = find_mbarrier(barrier_address, "bulk_copy", where);
  const int index = static_cast<int>(&barrier - mbarriers.data());
  const uint32_t size = static_cast<uint32_t>(bytes);
  const uint32_t offset = shared_offset(destination, size, "bulk_copy destination", where);
  check_shared_range(offset, size, 16, "bulk_copy destination", where);
  check_global(source, size, 16, false, "bulk_copy source", where);
  const int32_t epoch = barrier.phase + 1;
  touch_shared_as(offset, size, Access::make(epoch, clocks.mbarrier_party(index), true, locations.id(where)), false,
                  "is the destination of bulk_copy", where);
  barrier.copies_phase = epoch;
  in_flight.push_back(PendingCopy{index, epoch, false, thread, where, {CopyPart{source, offset, size, where}}});
}

inline void Machine::issue_cp_async(uint32_t destination, uint64_t source, Location where) {
  const uint32_t offset = shared_offset(destination, 16, "cp_async_16 destination", where);
  check_shared_range(offset, 16, 16, "cp_async_16 destination", where);
  check_global(source, 16, 16, false, "cp_async_16 source", where);
  // The epoch names the thread until an mbarrier tracks the copy.
  touch_shared_as(offset, 16, Access::make(thread + 1, clocks.untracked_party(), true, locations.id(where)), false,
                  "is the destination of cp_async_16", where);
  untracked[static_cast<size_t>(thread)].push_back(CopyPart{source, offset, 16, where});
}

inline void Machine::arrive_after_cp_async(uint32_t barrier_address, Location where) {
  Mbarrier& barrier = find_mbarrier(barrier_address, "cp_async_arrive", where);
  const int index = static_cast<int>(&barrier - mbarriers.data());
  const int32_t epoch = barrier.phase + 1;
  std::vector<CopyPart>& parts = untracked[static_cast<size_t>(thread)];
  for (const CopyPart& part : parts)
    shadow.relabel(part.offset, part.bytes, clocks.untracked_party(), thread + 1, clocks.mbarrier_party(index), epoch);
  if (!parts.empty()) barrier.copies_phase = epoch;
  in_flight.push_back(PendingCopy{index, epoch, true, thread, where, std::move(parts)});
  parts.clear();
}

inline void Machine::land(size_t index) {
  PendingCopy copy = std::move(in_flight[index]);
  in_flight[index] = std::move(in_flight.back());
  in_flight.pop_back();
  int64_t bytes = 0;
  for (const CopyPart& part : copy.parts) {
    std::memcpy(shared + part.offset, reinterpret_cast<const void*>(part.source), part.bytes);
    shadow.mark_written(part.offset, part.bytes);
    bytes += part.bytes;
  }
  std::vector<CopyPart>().swap(copy.parts);  // a fault below runs no destructor
  Mbarrier& barrier = mbarriers[static_cast<size_t>(copy.mbarrier)];
  if (copy.arrives)
    take_arrival(barrier, "cp_async_arrive", copy.where);
  else
    barrier.transactions -= bytes;
  complete_phase_if_due(copy.mbarrier);
}

// As late as possible: only when nobody can run, and only what somebody waits for.
inline bool Machine::land_for_a_waiter() {
  uint64_t waited = 0;
  for (const Thread& who : threads)
    if (who.wait == Wait::kMbarrier) waited |= uint64_t{1} << who.object;
  uint32_t candidates = 0;
  size_t chosen = 0;
  for (size_t i = 0; i < in_flight.size(); ++i)
    if ((waited >> in_flight[i].mbarrier & 1) != 0 && random.below(++candidates) == 0) chosen = i;
  if (candidates == 0) return false;
  land(chosen);
  return true;
}

inline void Machine::land_sometimes() {
  while (!in_flight.empty() && random.next() % 4 == 0) land(random.below(static_cast<uint32_t>(in_flight.size())));
}

// A block must not end before its copies: they would land in another block's memory.
inline void Machine::check_nothing_in_flight() {
  const char* remedy = "wait on the mbarrier phase of every copy, or do not issue it";
  const char* wrong = "the block ended and nobody had waited for an asynchronous copy";
  for (size_t t = 0; t < untracked.size(); ++t)
    if (!untracked[t].empty())
      fault("missing_wait", untracked[t].front().where, remedy, wrong,
            "cp_async_16 by thread %zu, without cp_async_arrive", t);
  for (const PendingCopy& copy : in_flight)
    if (!copy.parts.empty())
      fault("missing_wait", copy.where, remedy, wrong,
            "copy issued by thread %d, tracked by the mbarrier at shared address %u", copy.thread,
            mbarriers[static_cast<size_t>(copy.mbarrier)].offset + kSharedBase);
  for (const Mbarrier& barrier : mbarriers)
    if (barrier.copies_phase > barrier.observed_phase)
      fault("missing_wait", barrier.where, remedy, wrong, "phase %d of the mbarrier at shared address %u",
            barrier.copies_phase - 1, barrier.offset + kSharedBase);
}

}  // namespace emulator
}  // namespace kgen
