// Machine: running blocks, choosing threads, meeting points of a warp, and the reports on who waits where.
#pragma once

#include "machine.hpp"

namespace kgen {
namespace emulator {

inline bool Machine::prepare() {
  const size_t count = static_cast<size_t>(launch.threads);
  if (!fibers_.allocate(count)) return false;
  threads.resize(count);
  warps.resize(count / kWarp);
  untracked.resize(count);
  clocks.allocate(launch.threads);
  shadow.allocate(static_cast<uint32_t>(launch.shared_bytes));
  shared_storage.resize(static_cast<size_t>(launch.shared_bytes) + 128);
  const uintptr_t start = reinterpret_cast<uintptr_t>(shared_storage.data());
  shared = shared_storage.data() + ((128 - start % 128) % 128);
  global_shadows.resize(static_cast<size_t>(launch.buffer_count));
  for (size_t i = 0; i < global_shadows.size(); ++i)
    if (launch.buffers[i].writable != 0) global_shadows[i].allocate(launch.buffers[i].size_bytes);
  for (size_t i = 0; i < count; ++i) {
    thread = static_cast<int>(i);
    fibers_.create(i, &Machine::fiber_main);
  }
  return true;
}

// Each fiber lives for the whole launch and runs the kernel once a block.
inline void Machine::fiber_main() {
  Machine& self = *machine;
  self.fibers_.ready(static_cast<size_t>(self.thread));
  for (;;) {
    self.body_(self.launch.params);
    self.exit_thread();
  }
}

inline bool Machine::run() {
  if (_setjmp(stopped_) != 0) return false;
  const uint32_t columns = static_cast<uint32_t>(launch.grid[0]), rows = static_cast<uint32_t>(launch.grid[1]);
  const uint32_t count = columns * rows * static_cast<uint32_t>(launch.grid[2]);
  order_.resize(count);
  for (uint32_t i = 0; i < count; ++i) {  // a shuffle, inside out
    const uint32_t j = random.below(i + 1);
    order_[i] = order_[j];
    order_[j] = i;
  }
  for (const uint32_t index : order_) {
    block[0] = static_cast<int>(index % columns);
    block[1] = static_cast<int>(index / columns % rows);
    block[2] = static_cast<int>(index / columns / rows);
    run_block();
  }
  return true;
}

inline void Machine::reset_block() {
  for (Thread& each : threads) each = Thread{Wait::kNone, 0, 0, "", {"", 0}, false};
  for (Warp& each : warps) each = Warp{kFullMask, 0, 0, "", 0, {"", 0}, {}};
  for (NamedBarrier& each : named) each = NamedBarrier{0, 0, 0, 0, false};
  for (std::vector<CopyPart>& each : untracked) each.clear();
  mbarriers.clear();
  in_flight.clear();
  arrays.clear();
  clocks.reset();
  shadow.reset();
  std::memset(shared, 0xff, static_cast<size_t>(launch.shared_bytes));
  live_threads = launch.threads;
  suspended = false;
  ready_warps_ = warp_count() == 32 ? kFullMask : (1u << warp_count()) - 1;
}

inline void Machine::run_block() {
  reset_block();
  while (live_threads > 0) {
    count_step(threads[static_cast<size_t>(thread)].where);
    if (launch.copy_timing == kCopiesRandom) land_sometimes();
    if (ready_warps_ != 0)
      resume_some_warp();
    else if (!land_for_a_waiter())
      report_stuck();
  }
  check_nothing_in_flight();
}

inline void Machine::resume_some_warp() {
  uint32_t pick = random.below(static_cast<uint32_t>(__builtin_popcount(ready_warps_)));
  uint32_t candidates = ready_warps_;
  while (pick-- > 0) candidates &= candidates - 1;
  const int index = __builtin_ctz(candidates);
  rotation_ = random.next() % kWarp;
  thread = static_cast<int>(take_lane(warps[static_cast<size_t>(index)], index));
  in_fiber_ = true;
  fibers_.enter(static_cast<size_t>(thread));
  in_fiber_ = false;
}

// The next ready lane of a warp, counted from a random one.
inline size_t Machine::take_lane(Warp& from, int index) {
  const uint32_t rotated = rotation_ == 0 ? from.ready : from.ready >> rotation_ | from.ready << (kWarp - rotation_);
  const uint32_t lane = (static_cast<uint32_t>(__builtin_ctz(rotated)) + rotation_) % kWarp;
  from.ready &= ~(1u << lane);
  if (from.ready == 0) ready_warps_ &= ~(1u << index);
  return static_cast<size_t>(index) * kWarp + lane;
}

// Gives way; returns when somebody has made this lane ready and it was chosen.
inline void Machine::park(Wait wait, const char* primitive, Location where, int object, int parity) {
  const size_t self = static_cast<size_t>(thread);
  threads[self].now(wait, object, parity, primitive, where);
  Warp& mine = warp();
  if (mine.ready != 0) {
    const size_t next = take_lane(mine, thread / kWarp);
    thread = static_cast<int>(next);
    if (next != self) fibers_.switch_to(self, next);
  } else {
    fibers_.leave(self);
  }
  threads[self].wait = Wait::kNone;
}

inline void Machine::preempt_sometimes() {
  if (random.next() % 16 != 0) return;
  const size_t self = static_cast<size_t>(thread);
  wake_lanes(thread / kWarp, 1u << lane());
  fibers_.leave(self);
}

inline void Machine::count_step(Location where) {
  if (++steps_ > launch.max_steps)
    fault("step_limit", where, "look for a loop that never ends, or raise max_steps", "the launch does not end",
          "more than %llu scheduler steps", static_cast<unsigned long long>(launch.max_steps));
}

inline void Machine::exit_thread() {
  Warp& mine = warp();
  mine.exited |= 1u << lane();
  threads[static_cast<size_t>(thread)].wait = Wait::kExited;
  if (mine.arrived != 0) report_divergence(mine.primitive, mine.where);
  --live_threads;
  NamedBarrier& whole_block = named[0];
  if (whole_block.arrived > 0 && whole_block.arrived == live_threads) complete_named_barrier(0);
  if (live_threads == 0) {  // the next block starts from here
    fibers_.leave(static_cast<size_t>(thread));
  } else {
    park(Wait::kExited, "", {"", 0});
  }
}

inline bool Machine::gather(const char* primitive, int detail, Location where, const void* operand) {
  Warp& mine = warp();
  if (mine.arrived == 0) {
    mine.primitive = primitive;
    mine.detail = detail;
    mine.where = where;
  } else if (mine.primitive != primitive || mine.detail != detail || !(mine.where == where)) {
    report_divergence(primitive, where);
  }
  mine.operands[lane()] = operand;
  mine.arrived |= 1u << lane();
  if (mine.exited != 0) report_divergence(primitive, where);
  if (mine.arrived == kFullMask) return true;
  park(Wait::kCollective, primitive, where, detail);
  return false;
}

inline void Machine::release() {
  Warp& mine = warp();
  mine.arrived = 0;
  wake_lanes(thread / kWarp, kFullMask & ~(1u << lane()));
  count_access(mine.where);
  preempt_sometimes();
}

inline void Machine::begin_report(const char* kind, Location where, int who, const char* remedy, const char* wrong) {
  std::snprintf(report.kind, sizeof report.kind, "%s", kind);
  std::snprintf(report.wrong, sizeof report.wrong, "%s", wrong);
  std::snprintf(report.remedy, sizeof report.remedy, "%s", remedy);
  report.set_location(where);
  std::memcpy(report.block, block, sizeof block);
  report.thread = who;
  report.seen[0] = 0;
  report.add_seen("block (%d, %d, %d)", block[0], block[1], block[2]);
  if (who >= 0) report.add_seen(" thread %d (warp %d, lane %d)", who, who / kWarp, who % kWarp);
  report.add_seen(": ");
}

inline void Machine::fault(const char* kind, Location where, const char* remedy, const char* wrong, const char* seen,
                           ...) {
  if (suspended) stop();  // came of an earlier fault, which the report holds already
  begin_report(kind, where, in_fiber_ ? actor() : -1, remedy, wrong);
  const size_t used = std::strlen(report.seen);
  va_list arguments;
  va_start(arguments, seen);
  std::vsnprintf(report.seen + used, sizeof report.seen - used, seen, arguments);
  va_end(arguments);
  stop();
}

inline void Machine::describe_wait(const Thread& who) {
  switch (who.wait) {
    case Wait::kExited:
      report.add_seen("exited");
      return;
    case Wait::kNone:
      report.add_seen("not there yet");
      return;
    case Wait::kUnwritten:
      report.add_seen("stopped at an unwritten read");
      break;
    case Wait::kCollective:
      report.add_seen("in %s, waiting for the rest of the warp", who.primitive);
      break;
    case Wait::kNamedBarrier: {
      const NamedBarrier& barrier = named[who.object];
      report.add_seen("in %s (barrier %d): %d of %d threads arrived", who.primitive, who.object, barrier.arrived,
                      who.object == 0 ? live_threads : barrier.expected);
      break;
    }
    case Wait::kMbarrier: {
      const Mbarrier& barrier = mbarriers[static_cast<size_t>(who.object)];
      report.add_seen("in mbarrier_wait (shared address %u, parity %d): phase %d has %d of %d arrivals and %lld %s",
                      barrier.offset + kSharedBase, who.parity, barrier.phase, barrier.expected - barrier.pending,
                      barrier.expected, std::llabs(barrier.transactions),
                      barrier.transactions < 0 ? "bytes too many" : "bytes to come");
      break;
    }
  }
  report.add_seen(", at %s:%d", who.where.file, who.where.line);
}

inline bool same_wait(const Thread& a, const Thread& b) {
  return a.wait == b.wait && (a.wait == Wait::kExited || a.wait == Wait::kNone ||
                              (a.object == b.object && a.parity == b.parity && a.where == b.where));
}

inline void Machine::report_stuck() {
  if (suspended) stop();  // the others cannot help: that read is the fault
  int first = 0;  // the report's line: who waits at the rarest kind of place, an mbarrier before the rest
  for (int t = launch.threads - 1; t >= 0; --t)
    if (threads[static_cast<size_t>(t)].wait != Wait::kExited &&
        (threads[static_cast<size_t>(t)].wait >= threads[static_cast<size_t>(first)].wait ||
         threads[static_cast<size_t>(first)].wait == Wait::kExited))
      first = t;
  begin_report("deadlock", threads[static_cast<size_t>(first)].where, -1,
               "compare the counts with the arrivals, expected bytes and parities of the kernel", "deadlock");
  std::vector<bool> told(threads.size(), false);
  const char* separator = "";
  for (size_t t = 0; t < threads.size(); ++t) {
    if (told[t]) continue;
    size_t alike = 0;
    for (const Thread& other : threads) alike += same_wait(other, threads[t]) ? 1 : 0;
    report.add_seen(alike == 1 ? "%sthread" : "%sthreads", separator);
    separator = "; ";
    for (size_t begin = t; begin < threads.size(); ++begin) {
      if (told[begin] || !same_wait(threads[begin], threads[t])) continue;
      size_t end = begin;
      while (end < threads.size() && same_wait(threads[end], threads[t])) told[end++] = true;
      report.add_seen(" %zu", begin);
      if (end - begin > 1) report.add_seen("-%zu", end - 1);
    }
    report.add_seen(": ");
    describe_wait(threads[t]);
  }
  std::vector<bool>().swap(told);  // stop() runs no destructor
  stop();
}

inline void Machine::describe_lanes(int warp_index) {
  const size_t base = static_cast<size_t>(warp_index) * kWarp;
  for (int l = 0; l < kWarp; ++l) {
    const Thread& who = threads[base + static_cast<size_t>(l)];
    if (static_cast<int>(base) + l == thread) continue;
    int end = l + 1;
    while (end < kWarp && static_cast<int>(base) + end != thread &&
           same_wait(threads[base + static_cast<size_t>(end)], who))
      ++end;
    if (end - l == 1)
      report.add_seen("; lane %d: ", l);
    else
      report.add_seen("; lanes %d-%d: ", l, end - 1);
    describe_wait(who);
    l = end - 1;
  }
}

inline void Machine::report_divergence(const char* primitive, Location where) {
  if (suspended) stop();
  begin_report("divergent_collective", where, thread, "let all 32 lanes of the warp reach the same call",
               "a warp collective was not reached by all 32 lanes");
  if (threads[static_cast<size_t>(thread)].wait == Wait::kExited)
    report.add_seen("exited while its warp waits in %s", primitive);
  else
    report.add_seen("is in %s", primitive);
  describe_lanes(thread / kWarp);
  stop();
}

}  // namespace emulator
}  // namespace kgen
