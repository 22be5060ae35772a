// Loads and stores of 16 bytes that nobody touches again soon.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen {

// How the caches are to treat what passes through: as they like, or (streaming) as what L1 need not keep and L2 gives up
// first, so that slot lists, maps and pointers stay.
template <bool kStreaming>
struct Caching {
#ifndef KGEN_EMULATOR
  KGEN_DEVICE static uint4v load_streaming(const void* from) {
    uint4v value;
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], policy;\n}"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from)
        : "memory");
    return value;
  }
  KGEN_DEVICE static void store_streaming(void* to, const uint4v& value) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, policy;\n}" ::"l"(to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
  }
#endif

  template <typename T>
  KGEN_DEVICE static uint4v load(Global<T> from, int64_t i) {
#ifndef KGEN_EMULATOR
    if (kStreaming) return load_streaming(from.pointer + i);
#endif
    return from.template load_as<uint4v>(i);
  }
  template <typename T>
  KGEN_DEVICE static void store(Global<T> to, int64_t i, const uint4v& value) {
#ifndef KGEN_EMULATOR
    if (kStreaming) return store_streaming(to.pointer + i, value);
#endif
    to.template store_as<uint4v>(i, value);
  }
};

}  // namespace kgen
