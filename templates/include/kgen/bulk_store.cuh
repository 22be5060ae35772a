// Asynchronous copies from shared to global memory.
#pragma once

#include <kgen/primitives.cuh>

#ifdef KGEN_EMULATOR
#include <kgen_emulator/bulk_store.hpp>
#else

namespace kgen {

// One thread copies `bytes` (a multiple of 16) from shared memory that a bulk_copy filled and this thread waited for;
// both addresses are 16-byte aligned.
template <typename T>
KGEN_DEVICE void bulk_store(Global<T> destination, uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination.pointer), "r"(source),
               "r"(bytes)
               : "memory");
}
// Makes this thread's bulk_stores since the last commit, none perhaps, into a group.
KGEN_DEVICE void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns once no more than the last `kPending` groups of this thread still read shared memory.
template <int kPending>
KGEN_DEVICE void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace kgen

#endif
