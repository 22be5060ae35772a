// Checked access to global and shared memory.
#pragma once

#include "machine.hpp"

namespace kgen {
namespace emulator {

inline const BufferSpan& Machine::find_buffer(uint64_t address, uint64_t bytes, const char* what, Location where) {
  const BufferSpan* nearest = nullptr;
  uint64_t nearest_distance = UINT64_MAX;
  for (int i = 0; i < launch.buffer_count; ++i) {
    const BufferSpan& each = launch.buffers[i];
    const bool inside = address >= each.address && address - each.address < each.size_bytes;
    if (inside && bytes <= each.size_bytes - (address - each.address)) return each;
    const uint64_t end = each.address + each.size_bytes;
    const uint64_t distance = address < each.address ? each.address - address : address - end;
    if (inside || distance < nearest_distance) {
      nearest_distance = inside ? 0 : distance;
      nearest = &each;
    }
  }
  const char* wrong = "global memory access outside every buffer";
  if (nearest == nullptr)
    fault("out_of_bounds", where, "pass the buffer to the launch", wrong,
          "%s of %llu bytes at 0x%llx; the launch has no buffers", what, static_cast<unsigned long long>(bytes),
          static_cast<unsigned long long>(address));
  fault("out_of_bounds", where, "check the index and the buffer's size", wrong,
        "%s of %llu bytes at 0x%llx, byte offset %lld of the nearest buffer '%s' (%llu bytes)", what,
        static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
        static_cast<long long>(address - nearest->address), nearest->name,
        static_cast<unsigned long long>(nearest->size_bytes));
}

inline void Machine::check_global(uint64_t address, uint64_t bytes, uint32_t alignment, bool write, const char* what,
                                  Location where) {
  count_access(where);
  const BufferSpan& buffer = find_buffer(address, bytes, what, where);
  const uint64_t offset = address - buffer.address;
  if (address % alignment != 0)
    fault("misaligned", where, "align the element index and the buffer", "misaligned global memory access",
          "%s of %llu bytes at byte offset %llu of buffer '%s' (0x%llx) needs %u-byte alignment", what,
          static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset), buffer.name,
          static_cast<unsigned long long>(address), alignment);
  if (write && buffer.writable == 0)
    fault("read_only_write", where, "declare the buffer writable, or do not write it", "write to a read-only buffer",
          "%s of %llu bytes at byte offset %llu of buffer '%s'", what, static_cast<unsigned long long>(bytes),
          static_cast<unsigned long long>(offset), buffer.name);
  if (buffer.writable != 0) check_global_order(buffer, offset, bytes, write, where);
  if (buffer.written != nullptr) check_written(buffer, offset, bytes, write, what, where);
}

inline void Machine::check_written(const BufferSpan& buffer, uint64_t offset, uint64_t bytes, bool write,
                                   const char* what, Location where) {
  uint8_t* flags = buffer.written + offset;
  if (write)
    std::memset(flags, 1, bytes);
  else if (std::memchr(flags, 0, bytes) != nullptr)
    fault("unwritten_global_read", where, "write it first, in this launch or an earlier one",
          "read of global memory that no launch wrote", "%s of %llu bytes at byte offset %llu of buffer '%s'", what,
          static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset), buffer.name);
}

inline void Machine::check_global_order(const BufferSpan& buffer, uint64_t offset, uint64_t bytes, bool write,
                                        Location where) {
  const uint32_t columns = static_cast<uint32_t>(launch.grid[0]), rows = static_cast<uint32_t>(launch.grid[1]);
  const uint32_t index = (static_cast<uint32_t>(block[2]) * rows + static_cast<uint32_t>(block[1])) * columns +
                         static_cast<uint32_t>(block[0]);
  const Access access = Access::make(clocks.epoch(thread), thread, write, locations.id(where));
  GlobalAccess other;
  uint64_t at;
  GlobalShadow& writers = global_shadows[static_cast<size_t>(&buffer - launch.buffers)];
  if (writers.touch(offset, bytes, GlobalAccess{index + 1, access}, clocks.row(thread), &other, &at)) return;
  const uint32_t there = other.block - 1;
  const Location place = locations[other.access.location()];
  fault("race", where,
        other.block == index + 1 ? "order them with a barrier" : "let one block write it, or split the kernel in two",
        "race on global memory",
        "byte offset %llu of buffer '%s' is %s, and block (%u, %u, %u) thread %d %s it at %s:%d; nothing orders "
        "the two",
        static_cast<unsigned long long>(at), buffer.name, write ? "written" : "read", there % columns,
        there / columns % rows, there / columns / rows, other.access.party(),
        other.access.write() ? "writes" : "reads", place.file, place.line);
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
        "shared memory access that no shared_array of this block holds",
        "%s of %u bytes at shared byte offset %u", what, bytes, offset);
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
    begin_report("unwritten_shared_read", where, actor(),
                 "write it first or wait for whoever does, and check the range that is filled",
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
          "shared byte offset %u %s, and the mbarrier there was initialised at %s:%d", at, what, there.file,
          there.line);
  if (other.party() >= launch.threads)
    fault("missing_wait", where, "wait on the mbarrier phase that tracks the copy, in this thread or before a barrier",
          "shared memory is used while an asynchronous copy may still write it",
          "shared byte offset %u %s, and nothing waited for the copy issued at %s:%d", at, what, there.file,
          there.line);
  fault("race", where, "order them with a barrier, an mbarrier or (within one warp) warp_sync",
        "race on shared memory",
        "shared byte offset %u %s, and thread %d (warp %d, lane %d) %s it at %s:%d; nothing orders the two", at, what,
        other.party(), other.party() / kWarp, other.party() % kWarp, other.write() ? "writes" : "reads",
        there.file, there.line);
}

}  // namespace emulator
}  // namespace kgen
