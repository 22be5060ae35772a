// Vector clocks: which accesses of which thread happened before a thread's next step.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace kgen {
namespace emulator {

// One row a thread, one row pair an mbarrier, one a named barrier, one scratch row. Column c of a row is the last epoch
// of party c that happened before the owner of the row. Parties are the threads, then the mbarriers (epoch
// p + 1 stands for the copies of phase p), then two that nobody ever knows: copies that no barrier tracks
// yet, and the bytes of mbarrier objects.
class Clocks {
 public:
  static constexpr int kMaxMbarriers = 62, kNamedBarriers = 16;

  void allocate(int threads) {
    threads_ = threads;
    columns_ = (threads + kMaxMbarriers + 2 + 15) / 16 * 16;
    rows_.assign(static_cast<size_t>(threads + 2 * kMaxMbarriers + kNamedBarriers + 1) * columns_ / kLanes, Lanes{});
  }
  void reset() {
    std::memset(static_cast<void*>(rows_.data()), 0, rows_.size() * sizeof(Lanes));
    for (int t = 0; t < threads_; ++t) row(t)[t] = 1;
  }

  int mbarrier_party(int mbarrier) const { return threads_ + mbarrier; }
  int untracked_party() const { return threads_ + kMaxMbarriers; }
  int object_party() const { return threads_ + kMaxMbarriers + 1; }

  int32_t* row(int r) { return reinterpret_cast<int32_t*>(rows_.data()) + static_cast<size_t>(r) * columns_; }
  int32_t epoch(int thread) { return row(thread)[thread]; }
  int arrived_row(int mbarrier) const { return threads_ + 2 * mbarrier; }
  int completed_row(int mbarrier) const { return threads_ + 2 * mbarrier + 1; }
  int named_row(int id) const { return threads_ + 2 * kMaxMbarriers + id; }
  int scratch_row() const { return threads_ + 2 * kMaxMbarriers + kNamedBarriers; }

  // What `from` knows, `to` knows too.
  void join(int to, int from) {
    Lanes* target = lanes(to);
    const Lanes* source = lanes(from);
    for (int i = 0; i < columns_ / kLanes; ++i) target[i] = source[i] > target[i] ? source[i] : target[i];
  }
  void copy(int to, int from) { std::memcpy(row(to), row(from), static_cast<size_t>(columns_) * sizeof(int32_t)); }
  void clear(int r) { std::memset(row(r), 0, static_cast<size_t>(columns_) * sizeof(int32_t)); }
  // A release: what the thread does from here on is not part of what it published.
  void advance(int thread) { ++row(thread)[thread]; }

 private:
  static constexpr int kLanes = 4;
  typedef int32_t Lanes __attribute__((vector_size(16)));
  Lanes* lanes(int r) { return rows_.data() + static_cast<size_t>(r) * columns_ / kLanes; }

  int threads_ = 0, columns_ = 0;
  std::vector<Lanes> rows_;
};

}  // namespace emulator
}  // namespace kgen
