// Loads and stores of 16 bytes that nobody touches again soon.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen {

// How caches are to treat what passes through. Both others keep it out of L1, where slot lists and pointers then stay;
// kStreaming stores are what L2 gives up first, with kEvictFirst loads are too.
enum CachingKind { kNormal = 0, kStreaming = 1, kEvictFirst = 2 };

template <int kKind>
struct Caching {
  template <typename T>
  KGEN_DEVICE static uint4v load(Global<T> from, int64_t i) {
#ifndef KGEN_EMULATOR
    if (kKind != kNormal) return load_hinted(from.pointer + i);
#endif
    return from.template load_as<uint4v>(i);
  }
  template <typename T>
  KGEN_DEVICE static void store(Global<T> to, int64_t i, const uint4v& value) {
#ifndef KGEN_EMULATOR
    if (kKind != kNormal) return store_hinted(to.pointer + i, value);
#endif
    to.template store_as<uint4v>(i, value);
  }

#ifndef KGEN_EMULATOR
 private:
  KGEN_DEVICE static uint4v load_hinted(const void* from) {
    uint4v value;
    if (kKind == kStreaming) {
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "l"(from)
                   : "memory");
    } else {
      asm volatile(
          "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
          "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], policy;\n}"
          : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
          : "l"(from)
          : "memory");
    }
    return value;
  }
  KGEN_DEVICE static void store_hinted(void* to, const uint4v& value) {
    if (kKind == kStreaming) {
      asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                   "r"(value.w)
                   : "memory");
    } else {
      asm volatile(
          "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
          "st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, policy;\n}" ::"l"(to),
          "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
          : "memory");
    }
  }
#endif
};

}  // namespace kgen
