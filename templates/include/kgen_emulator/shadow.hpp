// Shadow of shared memory: for every four bytes, what was written and the accesses that a later access
// could still race with.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace kgen {
namespace emulator {

// Packed: party 11 bits, byte mask 4 bits, write 1 bit, location 16 bits.
struct Access {
  int32_t epoch;
  uint32_t packed;

  static Access make(int32_t epoch, int party, bool write, uint32_t location) {
    return {epoch, static_cast<uint32_t>(party) | (write ? 1u << 15 : 0u) | location << 16};
  }
  int party() const { return static_cast<int>(packed & 0x7ff); }
  uint32_t mask() const { return packed >> 11 & 0xf; }
  bool write() const { return (packed >> 15 & 1) != 0; }
  uint32_t location() const { return packed >> 16; }
  Access with_mask(uint32_t bytes) const { return {epoch, (packed & ~(0xfu << 11)) | bytes << 11}; }
};

struct Granule {
  static constexpr int kInline = 3;
  uint16_t count;
  uint16_t capacity;  // 0: the entries are inline
  uint8_t written;    // bit per byte
  union {
    Access inline_entries[kInline];
    Access* entries;
  };
  Access* begin() { return capacity == 0 ? inline_entries : entries; }
};

enum class AccessResult { kFine, kConflict, kUnwritten };

// The bytes of [begin, end) among the four from `base`, as bits.
inline uint32_t byte_mask(uint64_t base, uint64_t begin, uint64_t end) {
  uint32_t mask = 0xf;
  if (base < begin) mask &= 0xfu << (begin - base);
  if (base + 4 > end) mask &= 0xfu >> (base + 4 - end);
  return mask & 0xf;
}

class Shadow {
 public:
  static constexpr uint32_t kGranuleBytes = 4;

  void allocate(uint32_t bytes) { cells_.resize((bytes + kGranuleBytes - 1) / kGranuleBytes); }
  void reset() {
    if (!cells_.empty()) std::memset(static_cast<void*>(cells_.data()), 0, cells_.size() * sizeof(Granule));
    overflow_.clear();
  }

  // Records a read or write of [offset, offset + bytes) by `access`, whose author knows `known` (a row of
  // the clocks). A write that `lands` leaves its bytes written; an asynchronous one does so later. On a
  // conflict `other` is the earlier access; `at` is the first offending byte offset.
  AccessResult touch(uint32_t offset, uint32_t bytes, Access access, bool lands, const int32_t* known, Access* other,
                     uint32_t* at) {
    const uint32_t end = offset + bytes;
    for (uint32_t base = offset & ~3u; base < end; base += kGranuleBytes) {
      const uint32_t mask = byte_mask(base, offset, end);
      Granule& cell = cells_[base / kGranuleBytes];
      *at = base < offset ? offset : base;
      if (!record(cell, access.with_mask(mask), known, other)) return AccessResult::kConflict;
      if (access.write()) {
        if (lands) cell.written |= static_cast<uint8_t>(mask);
      } else if ((cell.written & mask) != mask) {
        return AccessResult::kUnwritten;
      }
    }
    return AccessResult::kFine;
  }
  void mark_written(uint32_t offset, uint32_t bytes) {
    const uint32_t end = offset + bytes;
    for (uint32_t base = offset & ~3u; base < end; base += kGranuleBytes)
      cells_[base / kGranuleBytes].written |= static_cast<uint8_t>(byte_mask(base, offset, end));
  }
  // The writes that `party` made at `epoch` become those of `new_party` at `new_epoch`. 16-byte aligned range.
  void relabel(uint32_t offset, uint32_t bytes, int party, int32_t epoch, int new_party, int32_t new_epoch) {
    for (uint32_t g = offset / kGranuleBytes; g < (offset + bytes) / kGranuleBytes; ++g)
      for (Access *entry = cells_[g].begin(), *end = entry + cells_[g].count; entry != end; ++entry)
        if (entry->party() == party && entry->epoch == epoch)
          *entry = Access::make(new_epoch, new_party, true, entry->location()).with_mask(entry->mask());
  }

 private:
  // False on a conflict. Entries that happened before `access` and are covered by it are dropped: whoever
  // is ordered after `access` is ordered after them.
  bool record(Granule& cell, Access access, const int32_t* known, Access* other) {
    Access* entries = cell.begin();
    const int count = cell.count;
    const bool repeated = count > 0 && entries[count - 1].epoch == access.epoch &&
                          ((entries[count - 1].packed ^ access.packed) & 0xffff) == 0;
    if (repeated && known[access.party()] >= access.epoch) return true;
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const Access entry = entries[i];
      const bool before = known[entry.party()] >= entry.epoch;
      if (!before && (entry.mask() & access.mask()) != 0 && (entry.write() || access.write())) {
        *other = entry;
        return false;
      }
      const bool covered = (entry.mask() & ~access.mask()) == 0 && (access.write() || !entry.write());
      if (!(before && covered)) entries[kept++] = entry;
    }
    cell.count = static_cast<uint16_t>(kept);
    append(cell, access);
    return true;
  }
  void append(Granule& cell, Access access) {
    const int room = cell.capacity == 0 ? Granule::kInline : cell.capacity;
    if (cell.count == room) grow(cell, room * 4);
    cell.begin()[cell.count++] = access;
  }
  void grow(Granule& cell, int room) {
    overflow_.emplace_back(static_cast<size_t>(room));
    Access* larger = overflow_.back().data();
    std::memcpy(static_cast<void*>(larger), cell.begin(), cell.count * sizeof(Access));
    cell.entries = larger;
    cell.capacity = static_cast<uint16_t>(room);
  }

  std::vector<Granule> cells_;
  std::vector<std::vector<Access>> overflow_;
};

}  // namespace emulator
}  // namespace kgen
