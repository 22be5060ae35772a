// <kgen/bulk_store.cuh> on the CPU: a store takes its bytes from shared memory when it is waited for, which is as
// late as a GPU may; until then its source must not be written.
#pragma once

#include <kgen_emulator/primitives.hpp>

namespace kgen {
namespace emulator {

inline void Machine::issue_bulk_store(uint64_t destination, uint32_t source, int bytes, Location where) {
  if (bytes <= 0 || bytes % 16 != 0)
    fault("misaligned", where, "copy a multiple of 16 bytes", "bulk_store of an impossible size", "%d bytes", bytes);
  const uint32_t size = static_cast<uint32_t>(bytes);
  const uint32_t offset = shared_offset(source, size, "bulk_store source", where);
  check_shared_range(offset, size, 16, "bulk_store source", where);
  touch_shared(offset, size, false, where);
  check_global(destination, size, 16, true, "bulk_store destination", where);
  stores.push_back(PendingStore{destination, offset, size, thread, store_groups[static_cast<size_t>(thread)], where});
}

// Lands this thread's committed stores but for those of its last `pending` groups.
inline void Machine::land_bulk_stores(int pending) {
  const int first_left = store_groups[static_cast<size_t>(thread)] - pending;
  std::vector<PendingStore> left;
  for (const PendingStore& store : stores) {
    if (store.thread == thread && store.group < first_left) {
      std::memcpy(reinterpret_cast<void*>(store.destination), shared + store.offset, store.bytes);
    } else {
      left.push_back(store);
    }
  }
  stores.swap(left);
}

}  // namespace emulator

template <typename T>
KGEN_DEVICE void bulk_store(Global<T> destination, uint32_t source, int bytes, Location where = Location::current()) {
  emulator::machine->issue_bulk_store(reinterpret_cast<uint64_t>(destination.pointer), source, bytes, where);
}
KGEN_DEVICE void bulk_store_commit() {
  ++emulator::machine->store_groups[static_cast<size_t>(emulator::machine->thread)];
}
template <int kPending>
KGEN_DEVICE void bulk_store_wait_read(Location where = Location::current()) {
  emulator::machine->count_access(where);
  emulator::machine->land_bulk_stores(kPending);
}

}  // namespace kgen
