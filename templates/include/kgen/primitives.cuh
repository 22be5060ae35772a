// What a kernel may ask of the machine. Kernel bodies use these names only, so that the same text runs
// on a GPU (this file) and in the emulator (kgen_emulator/primitives.hpp, the same names on the CPU).
#pragma once

#ifdef KGEN_EMULATOR
#include <kgen_emulator/primitives.hpp>
#else

#include <cstddef>
#include <cstdint>

#define KGEN_DEVICE __device__ __forceinline__
#define KGEN_PRAGMA(text) _Pragma(#text)
#define KGEN_UNROLL KGEN_PRAGMA(unroll)
#define KGEN_UNROLL_BY(count) KGEN_PRAGMA(unroll count)

// An entry point: one parameter struct by value. The caller gives threads a block and blocks an SM.
#define KGEN_KERNEL(name, threads, blocks_per_sm, Params, params) \
  extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name(const __grid_constant__ Params params)

namespace kgen {

// Indices.
KGEN_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
// This thread's place in its warp, read anew by each call: an instruction, but no register from one call to the next.
KGEN_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  __builtin_assume(lane >= 0 && lane < 32);
  return lane;
}
KGEN_DEVICE int block_index_x() { return static_cast<int>(blockIdx.x); }
KGEN_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }
KGEN_DEVICE int block_index_z() { return static_cast<int>(blockIdx.z); }

// Types.
struct bf16 {
  uint16_t bits;
};
struct e4m3 {  // 8-bit float of 4 exponent and 3 mantissa bits, no infinities
  uint8_t bits;
};
struct alignas(8) float2v {
  float x, y;
};
struct alignas(16) float4v {
  float x, y, z, w;
};
struct alignas(8) uint2v {
  uint32_t x, y;
};
struct alignas(16) uint4v {
  uint32_t x, y, z, w;
};

KGEN_DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }
// The elements of a bf16 pair.
KGEN_DEVICE float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
KGEN_DEVICE float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// Round to nearest even; `low` lands in the lower half (the lower address).
KGEN_DEVICE uint32_t pack_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
KGEN_DEVICE bf16 to_bf16(float value) { return {static_cast<uint16_t>(pack_bf16x2(value, 0))}; }
// Two floats as an fp16 pair, rounded to nearest even; `low` lands in the lower half.
KGEN_DEVICE uint32_t pack_f16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The lower and the upper two of four e4m3, exactly, as an fp16 pair.
KGEN_DEVICE uint32_t low_e4m3x2_to_f16x2(uint32_t four) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(pair) : "r"(four));
  return pair;
}
KGEN_DEVICE uint32_t high_e4m3x2_to_f16x2(uint32_t four) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(pair) : "r"(four));
  return pair;
}
KGEN_DEVICE float to_float(e4m3 value) {
  float single;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(single)
      : "r"(low_e4m3x2_to_f16x2(value.bits)));
  return single;
}
// Bytes 0, 2, 1, 3 of a word.
KGEN_DEVICE uint32_t swap_middle_bytes(uint32_t word) { return __byte_perm(word, 0, 0x3120); }
KGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KGEN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KGEN_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
KGEN_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

// One load or store of 8 or 16 bytes, as such: the compiler splits those of structs as it likes.
KGEN_DEVICE void load_wide(uint2v& value, const void* from) {
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from) : "memory");
}
KGEN_DEVICE void load_wide(uint4v& value, const void* from) {
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
}
KGEN_DEVICE void store_wide(void* to, const uint2v& value) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(value.x), "r"(value.y) : "memory");
}
KGEN_DEVICE void store_wide(void* to, const uint4v& value) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// A pointer to device memory. `load_as<V>` and `store_as<V>` move one uint2v or uint4v that starts at element
// `i` and must be aligned for it.
template <typename T>
struct Global {
  T* pointer;
  KGEN_DEVICE explicit operator bool() const { return pointer != nullptr; }
  KGEN_DEVICE Global<T> operator+(int64_t i) const { return {pointer + i}; }
  KGEN_DEVICE T load(int64_t i) const { return pointer[i]; }
  KGEN_DEVICE void store(int64_t i, T value) const { pointer[i] = value; }
  template <typename V>
  KGEN_DEVICE V load_as(int64_t i) const {
    V value;
    load_wide(value, pointer + i);
    return value;
  }
  template <typename V>
  KGEN_DEVICE void store_as(int64_t i, V value) const {
    store_wide(pointer + i, value);
  }
};

// An array in the block's dynamic shared memory.
extern __shared__ __align__(128) unsigned char shared_memory[];
template <typename T>
struct Shared {
  T* pointer;
  KGEN_DEVICE T load(int i) const { return pointer[i]; }
  KGEN_DEVICE void store(int i, T value) const { pointer[i] = value; }
  template <typename V>
  KGEN_DEVICE V load_as(int i) const {
    return *reinterpret_cast<const V*>(pointer + i);
  }
  template <typename V>
  KGEN_DEVICE void store_as(int i, V value) const {
    *reinterpret_cast<V*>(pointer + i) = value;
  }
  // The byte address that ldmatrix, copies and mbarriers take.
  KGEN_DEVICE uint32_t address(int i = 0) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer + i));
  }
};
template <typename T>
KGEN_DEVICE Shared<T> shared_array(int byte_offset, int count) {
  (void)count;  // the emulator checks it
  return {reinterpret_cast<T*>(shared_memory + byte_offset)};
}

// Barriers. A named barrier has an id from 1 to 15 and a thread count that is a multiple of 32.
KGEN_DEVICE void block_sync() { __syncthreads(); }
KGEN_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting for the others.
KGEN_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The barrier, and whether the predicate holds for any of its threads.
KGEN_DEVICE bool named_barrier_any(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, all;\nsetp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\nselp.b32 %0, 1, 0, all;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

// Warp collectives: all 32 lanes take part, always.
KGEN_DEVICE void warp_sync() { __syncwarp(); }
KGEN_DEVICE float shuffle_xor(float value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
KGEN_DEVICE int shuffle_xor(int value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
KGEN_DEVICE uint32_t shuffle_xor(uint32_t value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
KGEN_DEVICE float shuffle(float value, int source_lane) { return __shfl_sync(0xffffffffu, value, source_lane); }
KGEN_DEVICE int shuffle(int value, int source_lane) { return __shfl_sync(0xffffffffu, value, source_lane); }
template <typename T>
KGEN_DEVICE Global<T> shuffle(Global<T> value, int source_lane) {
  const auto bits = reinterpret_cast<unsigned long long>(value.pointer);
  return {reinterpret_cast<T*>(__shfl_sync(0xffffffffu, bits, source_lane))};
}
KGEN_DEVICE int warp_sum(int value) { return __reduce_add_sync(0xffffffffu, value); }
// The lanes for which the predicate holds, as bits; and the lowest of them.
KGEN_DEVICE uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
KGEN_DEVICE int lowest_lane(uint32_t lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
KGEN_DEVICE bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.
KGEN_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
KGEN_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// d[16x8] += a[16x16] * b[16x8], bf16 in, fp32 accumulate. Not volatile: the compiler may move it.
KGEN_DEVICE void mma_bf16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of fp16.
KGEN_DEVICE void mma_f16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mbarriers, by shared byte address.
KGEN_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// After mbarrier_init, before the block_sync that publishes the barriers.
KGEN_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KGEN_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival that also adds `bytes` to what the phase waits for.
KGEN_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns once the phase with this parity is complete.
KGEN_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\n"
      "bra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Registers that warps hand each other, by all warps of an aligned group of four: what one keeps of those that the launch
// gave each thread, and what one takes once there are so many. Where the target can: sm_90a, sm_120a and their like.
template <int kRegisters>
KGEN_DEVICE void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
KGEN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Asynchronous copies from global to shared memory; source and destination are 16-byte aligned.
// One thread copies `bytes` (a multiple of 16) and completes them on the mbarrier.
template <typename T>
KGEN_DEVICE void bulk_copy(uint32_t destination, Global<T> source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source.pointer), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same by a warp: all lanes give the same arguments and one elected lane issues the copy. (Lanes with a copy each
// would cost a loop over them.)
template <typename T>
KGEN_DEVICE void warp_bulk_copy(uint32_t destination, Global<T> source, int bytes, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
      ::"r"(destination), "l"(source.pointer), "r"(bytes), "r"(barrier)
      : "memory");
}
template <typename T>
KGEN_DEVICE void cp_async_16(uint32_t destination, Global<T> source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source.pointer) : "memory");
}
// This thread arrives on the mbarrier once all its earlier cp_async_16 have landed.
KGEN_DEVICE void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace kgen

#endif
