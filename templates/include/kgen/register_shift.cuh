// Registers that the warps of a block hand each other, where the target can (sm_90a, sm_120a and their like): by all
// warps of an aligned group of four.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen {

#ifdef KGEN_EMULATOR
template <int kRegisters>
KGEN_DEVICE void give_registers() {}
template <int kRegisters>
KGEN_DEVICE void take_registers() {}
#else
// Keeps this many a thread.
template <int kRegisters>
KGEN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Waits until there are this many a thread.
template <int kRegisters>
KGEN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

}  // namespace kgen
