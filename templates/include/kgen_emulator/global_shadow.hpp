// Shadow of the writable buffers of a launch: who wrote and who read last, in which block.
#pragma once

#include <cstdint>
#include <vector>

#include "shadow.hpp"

namespace kgen {
namespace emulator {

struct GlobalAccess {
  uint32_t block;  // 1 + index in the grid; 0: nobody
  Access access;
};

// One cell per four bytes, made when first touched. Only the last write and the last read are kept, so that a
// reported conflict is one, and a conflict with an older access may go unseen.
class GlobalShadow {
 public:
  void allocate(uint64_t size_bytes) { pages_.resize((size_bytes + kPageBytes - 1) / kPageBytes); }

  // Records a read or write of [offset, offset + bytes). Two blocks are never ordered; within one block, `known`
  // (a row of the clocks) tells. False on a conflict, with the earlier access in `other`.
  bool touch(uint64_t offset, uint64_t bytes, GlobalAccess mine, const int32_t* known, GlobalAccess* other,
             uint64_t* at) {
    for (uint64_t base = offset & ~uint64_t{3}; base < offset + bytes; base += 4) {
      Cell& cell = find(base);
      const uint32_t mask = byte_mask(base, offset, offset + bytes);
      const bool write = mine.access.write();
      *at = base < offset ? offset : base;
      *other = cell.write;
      if (conflicts(cell.write, mine.block, mask, known)) return false;
      *other = cell.read;
      if (write && conflicts(cell.read, mine.block, mask, known)) return false;
      (write ? cell.write : cell.read) = GlobalAccess{mine.block, mine.access.with_mask(mask)};
    }
    return true;
  }

 private:
  static constexpr uint64_t kPageBytes = 4096;
  struct Cell {
    GlobalAccess write, read;
  };
  Cell& find(uint64_t base) {
    std::vector<Cell>& page = pages_[base / kPageBytes];
    if (page.empty()) page.resize(kPageBytes / 4);
    return page[base % kPageBytes / 4];
  }
  static bool conflicts(const GlobalAccess& earlier, uint32_t block, uint32_t mask, const int32_t* known) {
    if (earlier.block == 0 || (earlier.access.mask() & mask) == 0) return false;
    return earlier.block != block || known[earlier.access.party()] < earlier.access.epoch;
  }

  std::vector<std::vector<Cell>> pages_;
};

}  // namespace emulator
}  // namespace kgen
