// Fibers: one stack a thread of the block, switched without a system call.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <vector>

namespace kgen {
namespace emulator {

// makecontext builds each stack once; afterwards _setjmp/_longjmp switch, because swapcontext would cost a
// system call for the signal mask each time.
class Fibers {
 public:
  static constexpr size_t kStackBytes = 256 * 1024;

  Fibers() = default;
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;
  ~Fibers() {
    if (memory_ != MAP_FAILED) munmap(memory_, count_ * stride_);
  }

  // Maps `count` stacks, each below a guard page; false when the system has no memory for them.
  bool allocate(size_t count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    count_ = count;
    stride_ = kStackBytes + page;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    memory_ = mmap(nullptr, count_ * stride_, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (memory_ == MAP_FAILED) return false;
    for (size_t i = 0; i < count_; ++i)
      if (mprotect(static_cast<char*>(memory_) + i * stride_, page, PROT_NONE) != 0) return false;
    points_.resize(count_);
    return true;
  }

  // Fiber `i` will run `entry`, which must call `ready(i)` first and must never return.
  void create(size_t i, void (*entry)()) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = static_cast<char*>(memory_) + i * stride_ + (stride_ - kStackBytes);
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
    if (_setjmp(outside_.registers) == 0) setcontext(&context);
  }
  // Called on the new stack: goes back to create(), and returns when the fiber is first resumed.
  __attribute__((noinline)) void ready(size_t i) {
    if (_setjmp(points_[i].registers) == 0) _longjmp(outside_.registers, 1);
  }

  __attribute__((noinline)) void enter(size_t to) {  // from the scheduler's stack
    if (_setjmp(outside_.registers) == 0) _longjmp(points_[to].registers, 1);
  }
  __attribute__((noinline)) void switch_to(size_t from, size_t to) {
    if (_setjmp(points_[from].registers) == 0) _longjmp(points_[to].registers, 1);
  }
  __attribute__((noinline)) void leave(size_t from) {  // to the scheduler's stack
    if (_setjmp(points_[from].registers) == 0) _longjmp(outside_.registers, 1);
  }

 private:
  struct Point {
    jmp_buf registers;
  };
  void* memory_ = MAP_FAILED;
  size_t count_ = 0, stride_ = 0;
  std::vector<Point> points_;
  Point outside_;
};

}  // namespace emulator
}  // namespace kgen
