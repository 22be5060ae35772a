// The primitives of <kgen/primitives.cuh> on the CPU: the same kernel text, compiled by the host compiler
// with -DKGEN_EMULATOR, runs here with every access checked.
//
// How it runs. The threads of a block are fibers; blocks run one after another in a random order, and warps
// interleave in a random order, all from one seed: the same seed gives the same run. A primitive that waits
// parks its fiber, so nothing spins; when no thread can run, the launch ends with a report of who waits for what.
//
// What is modelled and checked:
//  * Global memory: each access lies in one buffer of the launch, is aligned, and writes only writable buffers;
//    a buffer may ask for a report when bytes are read before they were written. In one launch, no block reads or
//    writes what another writes, and within a block a barrier orders those that share; of each word the last write
//    and the last read are kept, so a reported race is one, and a few go unseen.
//  * Shared memory: starts as NaN; each access lies in a declared shared_array and reads only written bytes.
//  * Order: vector clocks a thread. Two conflicting accesses to shared memory that no barrier, mbarrier phase or
//    (within a warp) warp_sync orders are a race, whether or not this run shows it. Shuffles, votes, mma and
//    ldmatrix order nothing. A row of ldmatrix is read by the lane that gives its address.
//  * Asynchronous copies: land as late as the kernel's waits allow, or at random times before; issuing one is a
//    write that all earlier readers must happen before; it is visible to those who waited on the mbarrier phase,
//    or synchronised with one who did. cp_async_arrive publishes the thread's copies and not its ordinary writes.
//  * mbarriers: arrival counts, transaction bytes, phases and parity, initialisation published and fenced.
//  * Collectives: all 32 lanes at the same call; barriers count whole warps; block_sync counts the threads that
//    have not exited.
//  * bf16 and fp16 mma: exact products, fp32 sums in order of k (hardware adds in an order of its own).
//  * Arrays that a thread keeps for itself (registers): indices, by -fsanitize=bounds.
//
// What is not modelled: proxy fences, registers read before they are written, launch limits of a device, and time.
// exp2 and log2 are those of the host. AddressSanitizer can be added (-fsanitize=address, without -nodefaultlibs, its
// library preloaded into Python); it warns once that it does not know the fibers' stacks.
// A loop without a primitive in it is not interrupted; one with a primitive ends at the step limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "barriers.hpp"
#include "collectives.hpp"
#include "copies.hpp"
#include "machine.hpp"
#include "memory.hpp"
#include "narrow_floats.hpp"
#include "register_bounds.hpp"
#include "scheduler.hpp"

#define KGEN_DEVICE inline
#define KGEN_UNROLL
#define KGEN_UNROLL_BY(count)

// The entry point that kgen/emulator.py calls: 0, done; 1, the report holds a fault; 2, not this version.
#define KGEN_KERNEL(name, max_threads, blocks_per_sm, Params, params)                                              \
  static void name##_body(const Params& params);                                                                   \
  extern "C" __attribute__((visibility("default"))) int name##_emulate(const ::kgen::emulator::Launch* launch,     \
                                                                       ::kgen::emulator::Report* report) {         \
    return ::kgen::emulator::emulate(                                                                              \
        *launch, *report, [](const void* bytes) { name##_body(*static_cast<const Params*>(bytes)); }, (max_threads), \
        sizeof(Params));                                                                                           \
  }                                                                                                                \
  static void name##_body(const Params& params)

namespace kgen {
namespace emulator {

// Where a launch itself is wrong, before any thread runs.
inline const char* launch_problem(const Launch& launch, int max_threads, size_t params_bytes) {
  if (static_cast<size_t>(launch.params_bytes) != params_bytes)
    return "the parameter bytes are not the kernel's struct";
  if (launch.threads < kWarp || launch.threads % kWarp != 0 || launch.threads > 1024)
    return "threads must be a multiple of 32 up to 1024";
  if (launch.threads > max_threads) return "more threads than the kernel was compiled for";
  if (launch.grid[0] < 1 || launch.grid[1] < 1 || launch.grid[2] < 1) return "the grid is empty";
  if (launch.shared_bytes < 0) return "negative shared bytes";
  return nullptr;
}

inline int emulate(const Launch& launch, Report& report, Machine::Body body, int max_threads, size_t params_bytes,
                   Location where = Location::current()) {
  if (launch.version != kLaunchVersion) return 2;
  report.kind[0] = 0;
  Machine* const outer = machine;
  Machine state(launch, report, body);
  machine = &state;
  bool fine = false;
  const char* problem = launch_problem(launch, max_threads, params_bytes);
  if (problem == nullptr && !state.prepare()) problem = "no memory for the stacks of the block's threads";
  if (problem == nullptr) {
    fine = state.run();
  } else {
    state.begin_report("launch_error", where, -1, "correct the launch parameters", problem);
    report.add_seen("%d threads, %d shared bytes, %d parameter bytes where the kernel has %zu", launch.threads,
                    launch.shared_bytes, launch.params_bytes, params_bytes);
  }
  machine = outer;
  return fine ? 0 : 1;
}

}  // namespace emulator

using emulator::Location;

// Indices.
KGEN_DEVICE int thread_index() { return emulator::machine->thread; }
KGEN_DEVICE int lane_index() { return emulator::machine->thread % emulator::kWarp; }
KGEN_DEVICE int block_index_x() { return emulator::machine->block[0]; }
KGEN_DEVICE int block_index_y() { return emulator::machine->block[1]; }
KGEN_DEVICE int block_index_z() { return emulator::machine->block[2]; }

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

KGEN_DEVICE float to_float(bf16 value) { return emulator::float_of_bf16(value.bits); }
// The elements of a bf16 pair.
KGEN_DEVICE float low_bf16(uint32_t pair) { return emulator::float_of_bits(pair << 16); }
KGEN_DEVICE float high_bf16(uint32_t pair) { return emulator::float_of_bits(pair & 0xffff0000u); }
// Round to nearest even. NaN becomes the canonical 0x7fff, as cvt.rn.bf16x2.f32 gives it.
KGEN_DEVICE uint32_t round_to_bf16_bits(float value) {
  const uint32_t bits = emulator::bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
KGEN_DEVICE uint32_t pack_bf16x2(float low, float high) {
  return round_to_bf16_bits(low) | round_to_bf16_bits(high) << 16;
}
KGEN_DEVICE bf16 to_bf16(float value) { return {static_cast<uint16_t>(round_to_bf16_bits(value))}; }
KGEN_DEVICE uint32_t pack_f16x2(float low, float high) {
  return emulator::bits_of_f16(low) | static_cast<uint32_t>(emulator::bits_of_f16(high)) << 16;
}
KGEN_DEVICE float to_float(e4m3 value) { return emulator::float_of_e4m3(value.bits); }
KGEN_DEVICE uint32_t low_e4m3x2_to_f16x2(uint32_t four) {
  return pack_f16x2(emulator::float_of_e4m3(four & 0xff), emulator::float_of_e4m3(four >> 8 & 0xff));
}
KGEN_DEVICE uint32_t high_e4m3x2_to_f16x2(uint32_t four) { return low_e4m3x2_to_f16x2(four >> 16); }
KGEN_DEVICE uint32_t swap_middle_bytes(uint32_t word) {
  return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
}
KGEN_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
// .ftz: subnormal operands and results are zero.
KGEN_DEVICE float flush_subnormal(float x) {
  return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x;
}
KGEN_DEVICE float exp2_approx(float x) { return flush_subnormal(__builtin_exp2f(flush_subnormal(x))); }
KGEN_DEVICE float log2_approx(float x) { return __builtin_log2f(flush_subnormal(x)); }
KGEN_DEVICE float infinity() { return emulator::float_of_bits(0x7f800000u); }

template <typename T>
struct Global {
  T* pointer;
  explicit operator bool() const { return pointer != nullptr; }
  Global<T> operator+(int64_t i) const { return {at(i)}; }
  T load(int64_t i, Location where = Location::current()) const { return load_as<T>(i, where); }
  void store(int64_t i, T value, Location where = Location::current()) const { store_as<T>(i, value, where); }
  template <typename V>
  V load_as(int64_t i, Location where = Location::current()) const {
    const T* source = at(i);
    emulator::machine->check_global(reinterpret_cast<uint64_t>(source), sizeof(V), alignof(V), false, "load", where);
    std::remove_cv_t<V> value;
    std::memcpy(&value, source, sizeof value);
    return value;
  }
  template <typename V>
  void store_as(int64_t i, V value, Location where = Location::current()) const {
    T* target = at(i);
    emulator::machine->check_global(reinterpret_cast<uint64_t>(target), sizeof(V), alignof(V), true, "store", where);
    std::memcpy(const_cast<std::remove_cv_t<T>*>(target), &value, sizeof value);
  }

 private:
  T* at(int64_t i) const {  // integer arithmetic: the index is not checked yet
    return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(pointer) + static_cast<uint64_t>(i) * sizeof(T));
  }
};

template <typename T>
struct Shared {
  uint32_t offset;
  int count;
  T load(int i, Location where = Location::current()) const { return load_as<T>(i, where); }
  void store(int i, T value, Location where = Location::current()) const { store_as<T>(i, value, where); }
  template <typename V>
  V load_as(int i, Location where = Location::current()) const {
    const uint32_t at = access(i, sizeof(V), alignof(V), false, where);
    std::remove_cv_t<V> value;
    std::memcpy(&value, emulator::machine->shared + at, sizeof value);
    return value;
  }
  template <typename V>
  void store_as(int i, V value, Location where = Location::current()) const {
    const uint32_t at = access(i, sizeof(V), alignof(V), true, where);
    std::memcpy(emulator::machine->shared + at, &value, sizeof value);
  }
  uint32_t address(int i = 0, Location where = Location::current()) const {
    if (i < 0 || i > count) outside(i, 0, where);
    return emulator::kSharedBase + offset + static_cast<uint32_t>(i) * static_cast<uint32_t>(sizeof(T));
  }

 private:
  [[noreturn]] void outside(int i, size_t bytes, Location where) const {
    emulator::machine->fault("out_of_bounds", where, "check the index and the count given to shared_array",
                             "shared array index out of bounds",
                             "element %d (%zu bytes) of an array of %d elements of %zu bytes at shared byte offset %u",
                             i, bytes, count, sizeof(T), offset);
  }
  uint32_t access(int i, size_t bytes, size_t alignment, bool write, Location where) const {
    if (i < 0 || i >= count || bytes > static_cast<size_t>(count - i) * sizeof(T)) outside(i, bytes, where);
    const uint32_t at = offset + static_cast<uint32_t>(i) * static_cast<uint32_t>(sizeof(T));
    if (at % alignment != 0)
      emulator::machine->fault("misaligned", where, "align the element index and the array",
                               "misaligned shared memory access",
                               "%s of %zu bytes at shared byte offset %u needs %zu-byte alignment",
                               write ? "store" : "load", bytes, at, alignment);
    emulator::machine->touch_shared(at, static_cast<uint32_t>(bytes), write, where);
    return at;
  }
};

template <typename T>
KGEN_DEVICE Shared<T> shared_array(int byte_offset, int count, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const int64_t end = byte_offset + static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T));
  if (byte_offset < 0 || count < 0 || end > m.launch.shared_bytes)
    m.fault("out_of_bounds", where, "compare the kernel's shared layout with the launch's shared bytes",
            "a shared array does not fit in the block's dynamic shared memory",
            "bytes %d to %lld, and the launch gives %d", byte_offset, static_cast<long long>(end),
            m.launch.shared_bytes);
  if (static_cast<size_t>(byte_offset) % alignof(T) != 0)
    m.fault("misaligned", where, "align the array's byte offset", "misaligned shared array",
            "byte offset %d of elements with %zu-byte alignment", byte_offset, alignof(T));
  m.declare_array(static_cast<uint32_t>(byte_offset), static_cast<uint32_t>(end));
  return {static_cast<uint32_t>(byte_offset), count};
}

// Barriers.
KGEN_DEVICE void block_sync(Location where = Location::current()) {
  emulator::machine->named_barrier(0, 0, false, "block_sync", where);
}
KGEN_DEVICE void named_barrier_sync(int id, int threads, Location where = Location::current()) {
  emulator::machine->named_barrier(id == 0 ? -1 : id, threads, false, "named_barrier_sync", where);
}
KGEN_DEVICE void named_barrier_arrive(int id, int threads, Location where = Location::current()) {
  emulator::machine->arrive_named(id <= 0 ? -1 : id, threads, where);
}
KGEN_DEVICE bool named_barrier_any(int id, int threads, bool predicate, Location where = Location::current()) {
  return emulator::machine->named_barrier(id == 0 ? -1 : id, threads, predicate, "named_barrier_any", where);
}

// Warp collectives.
KGEN_DEVICE void warp_sync(Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  if (!m.gather("warp_sync", 0, where, nullptr)) return;
  emulator::execute_warp_sync(m);
  m.release();
}
KGEN_DEVICE float shuffle_xor(float value, int lane_mask, Location where = Location::current()) {
  return emulator::exchange("shuffle_xor", value, (thread_index() % emulator::kWarp) ^ lane_mask, lane_mask, where);
}
KGEN_DEVICE int shuffle_xor(int value, int lane_mask, Location where = Location::current()) {
  return emulator::exchange("shuffle_xor", value, (thread_index() % emulator::kWarp) ^ lane_mask, lane_mask, where);
}
KGEN_DEVICE uint32_t shuffle_xor(uint32_t value, int lane_mask, Location where = Location::current()) {
  return emulator::exchange("shuffle_xor", value, (thread_index() % emulator::kWarp) ^ lane_mask, lane_mask, where);
}
KGEN_DEVICE float shuffle(float value, int source_lane, Location where = Location::current()) {
  return emulator::exchange("shuffle", value, source_lane, 0, where);
}
KGEN_DEVICE int shuffle(int value, int source_lane, Location where = Location::current()) {
  return emulator::exchange("shuffle", value, source_lane, 0, where);
}
template <typename T>
KGEN_DEVICE Global<T> shuffle(Global<T> value, int source_lane, Location where = Location::current()) {
  return {emulator::exchange("shuffle", value.pointer, source_lane, 0, where)};
}
KGEN_DEVICE int warp_sum(int value, Location where = Location::current()) {
  return emulator::reduce("warp_sum", value, [](int a, int b) { return a + b; }, where);
}
KGEN_DEVICE uint32_t warp_ballot(bool predicate, Location where = Location::current()) {
  const uint32_t mine = predicate ? 1u << (thread_index() % emulator::kWarp) : 0;
  return emulator::reduce("warp_ballot", mine, [](uint32_t a, uint32_t b) { return a | b; }, where);
}
KGEN_DEVICE int lowest_lane(uint32_t lanes) { return lanes == 0 ? -1 : __builtin_ctz(lanes); }
KGEN_DEVICE bool warp_any(bool predicate, Location where = Location::current()) {
  return emulator::reduce("warp_any", predicate, [](bool a, bool b) { return a || b; }, where);
}
KGEN_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const emulator::LdmatrixOperand mine{r, address};
  if (!m.gather("ldmatrix_x4", 0, where, &mine)) return;
  emulator::execute_ldmatrix(m, false, where);
  m.release();
}
KGEN_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const emulator::LdmatrixOperand mine{r, address};
  if (!m.gather("ldmatrix_x4_trans", 0, where, &mine)) return;
  emulator::execute_ldmatrix(m, true, where);
  m.release();
}
KGEN_DEVICE void mma_bf16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                  Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const emulator::MmaOperand mine{d, a, b0, b1};
  if (!m.gather("mma_bf16_16x8x16", 0, where, &mine)) return;
  emulator::execute_mma(m.warp(), emulator::float_of_bf16);
  m.release();
}
KGEN_DEVICE void mma_f16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                 Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const emulator::MmaOperand mine{d, a, b0, b1};
  if (!m.gather("mma_f16_16x8x16", 0, where, &mine)) return;
  emulator::execute_mma(m.warp(), emulator::float_of_f16);
  m.release();
}

// mbarriers.
KGEN_DEVICE void mbarrier_init(uint32_t barrier, int arrivals, Location where = Location::current()) {
  emulator::machine->init_mbarrier(barrier, arrivals, where);
}
KGEN_DEVICE void mbarrier_init_fence() { emulator::machine->fence_mbarrier_init(); }
KGEN_DEVICE void mbarrier_arrive(uint32_t barrier, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  m.arrive(m.find_mbarrier(barrier, "mbarrier_arrive", where), 0, "mbarrier_arrive", where);
}
KGEN_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  m.arrive(m.find_mbarrier(barrier, "mbarrier_arrive_expect", where), bytes, "mbarrier_arrive_expect", where);
}
KGEN_DEVICE void mbarrier_wait(uint32_t barrier, int parity, Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  m.count_access(where);
  m.wait_mbarrier(m.find_mbarrier(barrier, "mbarrier_wait", where), parity, where);
}

// Registers are not counted here.
template <int kRegisters>
KGEN_DEVICE void keep_registers() {}
template <int kRegisters>
KGEN_DEVICE void take_registers() {}

// Asynchronous copies.
template <typename T>
KGEN_DEVICE void bulk_copy(uint32_t destination, Global<T> source, int bytes, uint32_t barrier,
                           Location where = Location::current()) {
  emulator::machine->issue_bulk(destination, reinterpret_cast<uint64_t>(source.pointer), bytes, barrier, where);
}
template <typename T>
KGEN_DEVICE void warp_bulk_copy(uint32_t destination, Global<T> source, int bytes, uint32_t barrier,
                                Location where = Location::current()) {
  emulator::Machine& m = *emulator::machine;
  const emulator::BulkOperand mine{destination, reinterpret_cast<uint64_t>(source.pointer), bytes, barrier};
  if (!m.gather("warp_bulk_copy", 0, where, &mine)) return;
  emulator::execute_bulk(m, where);
  m.release();
}
template <typename T>
KGEN_DEVICE void cp_async_16(uint32_t destination, Global<T> source, Location where = Location::current()) {
  emulator::machine->issue_cp_async(destination, reinterpret_cast<uint64_t>(source.pointer), where);
}
KGEN_DEVICE void cp_async_arrive(uint32_t barrier, Location where = Location::current()) {
  emulator::machine->arrive_after_cp_async(barrier, where);
}

}  // namespace kgen
