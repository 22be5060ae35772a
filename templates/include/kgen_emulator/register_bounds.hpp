// Indices of arrays that a thread keeps for itself, which -fsanitize=bounds checks.
#pragma once

#include "scheduler.hpp"

namespace kgen {
namespace emulator {

// How the compiler describes the place of a check; its other fields tell the types.
struct BoundsCheck {
  const char* file;
  uint32_t line, column;
};

}  // namespace emulator
}  // namespace kgen

// Compilers call this instead of the sanitizer's library, because it is found in the same object.
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds(
    void* data, uintptr_t index) {
  const auto& check = *static_cast<const kgen::emulator::BoundsCheck*>(data);
  kgen::emulator::machine->fault("out_of_bounds", {check.file, static_cast<int>(check.line)}, "check the index",
                                 "array index out of bounds", "index %lld of an array of the thread's own",
                                 static_cast<long long>(index));
}
