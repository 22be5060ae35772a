// The state of one launch and its scheduler: which thread runs next, who waits for what, and how a launch ends.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "clocks.hpp"
#include "fiber.hpp"
#include "global_shadow.hpp"
#include "launch.hpp"
#include "shadow.hpp"

namespace kgen {
namespace emulator {

constexpr int kWarp = 32;
constexpr uint32_t kFullMask = 0xffffffffu;
// Shared addresses do not start at 0, as on a GPU, so that an offset used as an address is noticed.
constexpr uint32_t kSharedBase = 1024;
constexpr uint32_t kAccessesPerStep = 64;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint32_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((static_cast<uint64_t>(next()) * bound) >> 32); }

 private:
  uint64_t state_;
};

enum class Wait : uint8_t { kNone, kCollective, kNamedBarrier, kMbarrier, kUnwritten, kExited };

struct Thread {
  Wait wait;
  int object;  // named barrier id or mbarrier number
  int parity;
  const char* primitive;
  Location where;
  bool any;  // of the predicates at its last barrier

  void now(Wait wait_, int object_, int parity_, const char* primitive_, Location where_) {
    wait = wait_;
    object = object_;
    parity = parity_;
    primitive = primitive_;
    where = where_;
  }
};

struct Warp {
  uint32_t ready;    // lanes that can run
  uint32_t exited;
  uint32_t arrived;  // lanes at the collective that is being gathered
  const char* primitive;
  int detail;        // what lanes must agree on besides the primitive: a barrier id, a shuffle mask
  Location where;
  const void* operands[kWarp];
};

struct NamedBarrier {
  int expected;      // threads; 0: nobody is there
  int arrived;
  uint32_t there;    // warps that arrived
  uint32_t warps;    // that wait
  bool any;          // of the predicates so far
};

struct Mbarrier {
  uint32_t offset;
  int expected, pending;
  int64_t transactions;  // bytes that the phase still waits for
  int32_t phase;
  int32_t copies_phase, observed_phase;  // epochs: last phase given a copy, last phase somebody waited for
  int initialiser;
  int32_t initialised_epoch;
  bool fenced;
  Location where;
};

// A contiguous piece of an asynchronous copy.
struct CopyPart {
  uint64_t source;
  uint32_t offset, bytes;
  Location where;
};
// Something that happens by itself, later: parts land, then the mbarrier is told.
struct PendingCopy {
  int mbarrier;
  int32_t epoch;   // the parts' epoch in the mbarrier's column
  bool arrives;    // cp_async_arrive: one arrival; else `bytes` of the phase's transactions
  int thread;
  Location where;
  std::vector<CopyPart> parts;
};

struct Extent {
  uint32_t begin, end;
};

class Machine {
 public:
  using Body = void (*)(const void* params);

  Machine(const Launch& launch, Report& report, Body body)
      : launch(launch), report(report), random(launch.seed), body_(body) {}

  bool prepare();
  // Runs every block; false after a fault.
  bool run();

  [[noreturn]] __attribute__((format(printf, 6, 7))) void fault(const char* kind, Location where, const char* remedy,
                                                                const char* wrong, const char* seen, ...);
  [[noreturn]] void stop() { _longjmp(stopped_, 1); }
  void begin_report(const char* kind, Location where, int thread, const char* remedy, const char* wrong);

  // Scheduling, called by the running thread.
  void park(Wait wait, const char* primitive, Location where, int object = 0, int parity = 0);
  void wake_lanes(int warp, uint32_t lanes) {
    warps[warp].ready |= lanes;
    ready_warps_ |= 1u << warp;
  }
  void preempt_sometimes();
  void count_access(Location where) {
    if (++accesses_ == kAccessesPerStep) {
      accesses_ = 0;
      count_step(where);
    }
  }
  void count_step(Location where);

  // Warp meeting point. True for the lane that came last: it does the work of all, then calls release().
  bool gather(const char* primitive, int detail, Location where, const void* operand);
  void release();

  int lane() const { return thread % kWarp; }
  // Whose access it is: the running thread, or the lane that it works for in a collective.
  int actor() const { return acting_lane < 0 ? thread : thread / kWarp * kWarp + acting_lane; }
  Warp& warp() { return warps[static_cast<size_t>(thread / kWarp)]; }
  int warp_count() const { return launch.threads / kWarp; }

  // barriers.hpp
  bool named_barrier(int id, int count, bool predicate, const char* primitive, Location where);
  bool gather_at_barrier(int id, int count, bool* predicate, const char* primitive, Location where);
  void arrive_named(int id, int count, Location where);
  void complete_named_barrier(int id);
  Mbarrier& find_mbarrier(uint32_t address, const char* primitive, Location where);
  void init_mbarrier(uint32_t address, int arrivals, Location where);
  void fence_mbarrier_init();
  void arrive(Mbarrier& barrier, int64_t transactions, const char* primitive, Location where);
  void take_arrival(Mbarrier& barrier, const char* primitive, Location where);
  void wait_mbarrier(Mbarrier& barrier, int parity, Location where);
  void complete_phase_if_due(int index);

  // copies.hpp
  void issue_bulk(uint32_t destination, uint64_t source, int bytes, uint32_t barrier, Location where);
  void issue_cp_async(uint32_t destination, uint64_t source, Location where);
  void arrive_after_cp_async(uint32_t barrier, Location where);
  void land(size_t index);
  bool land_for_a_waiter();
  void land_sometimes();
  void check_nothing_in_flight();

  // memory.hpp
  void check_global(uint64_t address, uint64_t bytes, uint32_t alignment, bool write, const char* what, Location where);
  const BufferSpan& find_buffer(uint64_t address, uint64_t bytes, const char* what, Location where);
  void check_written(const BufferSpan& buffer, uint64_t offset, uint64_t bytes, bool write, const char* what,
                     Location where);
  void check_global_order(const BufferSpan& buffer, uint64_t offset, uint64_t bytes, bool write, Location where);
  void check_shared_range(uint32_t offset, uint32_t bytes, uint32_t alignment, const char* what, Location where);
  void touch_shared(uint32_t offset, uint32_t bytes, bool write, Location where);
  void touch_shared_as(uint32_t offset, uint32_t bytes, Access access, bool lands, const char* what, Location where);
  [[noreturn]] void suspend_reader(uint32_t offset, uint32_t bytes, uint32_t at, Location where);
  [[noreturn]] void report_conflict(uint32_t at, Access other, const char* what, Location where);
  void declare_array(uint32_t begin, uint32_t end);
  uint32_t shared_offset(uint32_t address, uint32_t bytes, const char* what, Location where);

  const Launch& launch;
  Report& report;
  Random random;
  Clocks clocks;
  Shadow shadow;
  std::vector<GlobalShadow> global_shadows;  // one a buffer, empty where it is read-only
  LocationTable locations;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  NamedBarrier named[16];
  std::vector<Mbarrier> mbarriers;
  std::vector<PendingCopy> in_flight;
  std::vector<std::vector<CopyPart>> untracked;  // a thread's cp_async_16 before its cp_async_arrive
  std::vector<Extent> arrays;
  std::vector<unsigned char> shared_storage;
  unsigned char* shared = nullptr;  // 128-byte aligned
  int block[3] = {0, 0, 0};
  int thread = 0;        // the running one
  int acting_lane = -1;  // see actor()
  int live_threads = 0;
  bool suspended = false;  // the report holds an unwritten read, and the others may yet show who should write

 private:
  static void fiber_main();
  void reset_block();
  void run_block();
  void resume_some_warp();
  void exit_thread();
  size_t take_lane(Warp& from, int index);
  [[noreturn]] void report_stuck();
  [[noreturn]] void report_divergence(const char* primitive, Location where);
  void describe_wait(const Thread& thread);
  void describe_lanes(int warp_index);

  Body body_;
  Fibers fibers_;
  std::vector<uint32_t> order_;  // of the blocks
  uint32_t ready_warps_ = 0;
  uint32_t rotation_ = 0;
  uint32_t accesses_ = 0;
  uint64_t steps_ = 0;
  bool in_fiber_ = false;
  jmp_buf stopped_;
};

// The launch that runs on this operating-system thread.
inline thread_local Machine* machine = nullptr;

}  // namespace emulator
}  // namespace kgen
