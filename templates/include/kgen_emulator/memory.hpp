// Checked access to global and shared memory.
#pragma once

#include "machine.hpp"

namespace kgen {
namespace emulator {

inline const BufferSpan& Machine::check_global(uint64_t address, uint64_t bytes, uint32_t alignment, bool write,
                                               const char* what, Location where) {
  count_access(where);
  const BufferSpan* found = nullptr;
  const BufferSpan* nearest = nullptr;
  uint64_t nearest_distance = UINT64_MAX;
  for (int i = 0; i < launch.buffer_count; ++i) {
    const BufferSpan& each = launch.buffers[i];
    if (address >= each.address && address - each.address < each.size_bytes &&
        bytes <= each.size_bytes - (address - each.address)) {
      found = &each;
      break;
    }
    const uint64_t distance = address < each.address ? each.address - address : address - each.address - each.size_bytes;
    const bool inside = address >= each.address && address - each.address < each.size_bytes;
    if (inside || distance < nearest_distance) {
      nearest_distance = inside ? 0 : distance;
      nearest = &each;
    }
  }
  if (found == nullptr) {
    if (nearest == nullptr)
      fault("out_of_bounds", where, "pass the buffer to the launch", "global memory access outside every buffer",
            "%s of %llu bytes at 0x%llx; the launch has no buffers", what, static_cast<unsigned long long>(bytes),
            static_cast<unsigned long long>(address));
    fault("out_of_bounds", where, "check the index and the buffer's size",
          "global memory access outside every buffer",
          "%s of %llu bytes at 0x%llx, byte offset %lld of the nearest buffer '%s' (%llu bytes)", what,
          static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
          static_cast<long long>(address - nearest->address), nearest->name,
          static_cast<unsigned long long>(nearest->size_bytes));
  }
  if (address % alignment != 0)
    fault("misaligned", where, "align the element index and the buffer", "misaligned global memory access",
          "%s of %llu bytes at byte offset %llu of buffer '%s' (0x%llx) needs %u-byte alignment", what,
          static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address - found->address), found->name,
          static_cast<unsigned long long>(address), alignment);
  if (write && found->writable == 0)
    fault("read_only_write", where, "declare the buffer writable, or do not write it", "write to a read-only buffer",
          "%s of %llu bytes at byte offset %llu of buffer '%s'", what, static_cast<unsigned long long>(bytes),
          static_cast<unsigned long long>(address - found->address), found->name);
  if (found->written != nullptr) {
    uint8_t* flags = found->written + (address - found->address);
    if (write) {
      std::memset(flags, 1, bytes);
    } else if (std::memchr(flags, 0, bytes) != nullptr) {
      fault("unwritten_global_read", where, "write it first, in this launch or an earlier one",
            "read of global memory that no launch wrote", "%s of %llu bytes at byte offset %llu of buffer '%s'", what,
            static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address - found->address),
            found->name);
    }
  }
  return *found;
}

inline uint32_t Machine::shared_offset(uint32_t address, uint32_t bytes, const char* what, Location where) {
  const uint32_t size = static_cast<uint32_t>(launch.shared_bytes);
  if (address < kSharedBase || address - kSharedBase > size || bytes > size - (address - kSharedBase))
    fault("out_of_bounds", where, "take addresses from Shared::address and keep them inside the array",
          "shared memory access outside the block's dynamic shared memory",
          "%s of %u bytes at shared address %u; the block has %u bytes from address %u", what, bytes, address, size,
          kSharedBase);
  return address - kSharedBase;
}

inline void Machine::declare_array(uint32_t begin, uint32_t end) {
  for (const Extent& each : arrays)
    if (each.begin <= begin && end <= each.end) return;
  arrays.push_back(Extent{begin, end});
}

inline void Machine::check_shared_range(uint32_t offset, uint32_t bytes, uint32_t alignment, const char* what,
                                        Location where) {
  if (offset % alignment != 0)
    fault("misaligned", where, "align the row stride and the array", "misaligned shared memory access",
          "%s of %u bytes at shared byte offset %u needs %u-byte alignment", what, bytes, offset, alignment);
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (offset < arrays[i].begin || offset + bytes > arrays[i].end) continue;
    if (i > 0) std::swap(arrays[i], arrays[i - 1]);  // the busy arrays move to the front
    return;
  }
  fault("out_of_bounds", where, "keep the range inside one shared_array",
        "shared memory access that no shared_array of this block holds", "%s of %u bytes at shared byte offset %u", what,
        bytes, offset);
}

inline void Machine::touch_shared(uint32_t offset, uint32_t bytes, bool write, Location where) {
  count_access(where);
  touch_shared_as(offset, bytes, Access::make(clocks.epoch(actor()), actor(), write, locations.id(where)), true,
                  write ? "is written" : "is read", where);
}

inline void Machine::touch_shared_as(uint32_t offset, uint32_t bytes, Access access, bool lands, const char* what,
                                     Location where) {
  Access other;
  uint32_t at;
  const AccessResult result = shadow.touch(offset, bytes, access, lands, clocks.row(actor()), &other, &at);
  if (result == AccessResult::kFine) return;
  if (result == AccessResult::kUnwritten) suspend_reader(offset, bytes, at, where);
  report_conflict(at, other, what, where);
}

// The report holds the unwritten read from now on, and this thread stays here. The others go on: if one writes
// those bytes, that race is the better report.
inline void Machine::suspend_reader(uint32_t offset, uint32_t bytes, uint32_t at, Location where) {
  if (!suspended) {
    begin_report("unwritten_shared_read", where, actor(), "write it first, and check the range that the kernel fills",
                 "read of shared memory that nothing wrote");
    report.add_seen("%u bytes at shared byte offset %u; byte %u was never written", bytes, offset, at);
    suspended = true;
  }
  acting_lane = -1;
  for (;;) park(Wait::kUnwritten, "", where);
}

inline void Machine::report_conflict(uint32_t at, Access other, const char* what, Location where) {
  if (other.party() < launch.threads && threads[static_cast<size_t>(other.party())].wait == Wait::kUnwritten)
    suspended = false;
  const Location there = locations[other.location()];
  if (other.party() == clocks.object_party())
    fault("mbarrier_misuse", where, "keep mbarriers apart from data", "an mbarrier is accessed as data",
          "shared byte offset %u %s, and the mbarrier there was initialised at %s:%d", at, what, there.file, there.line);
  if (other.party() >= launch.threads)
    fault("missing_wait", where, "wait on the mbarrier phase that tracks the copy, in this thread or before a barrier",
          "shared memory is used while an asynchronous copy may still write it",
          "shared byte offset %u %s, and nothing waited for the copy issued at %s:%d", at, what, there.file, there.line);
  fault("race", where, "order them with a barrier, an mbarrier or (within one warp) warp_sync",
        "race on shared memory", "shared byte offset %u %s, and thread %d (warp %d, lane %d) %s it at %s:%d; nothing orders the two",
        at, what, other.party(), other.party() / kWarp, other.party() % kWarp, other.write() ? "writes" : "reads",
        there.file, there.line);
}

}  // namespace emulator
}  // namespace kgen
