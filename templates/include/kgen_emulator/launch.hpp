// What crosses from Python (kgen/emulator.py mirrors these structures with ctypes) and what goes back.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "location.hpp"

namespace kgen {
namespace emulator {

constexpr uint32_t kLaunchVersion = 1;

struct BufferSpan {
  const char* name;
  uint64_t address;
  uint64_t size_bytes;
  uint8_t* written;  // one byte a byte of the buffer, non-zero once written; null: not tracked
  int32_t writable;
  int32_t reserved;
};

enum CopyTiming : int32_t { kCopiesLate = 0, kCopiesRandom = 1 };

struct Launch {
  uint32_t version;
  int32_t grid[3];
  int32_t threads;
  int32_t shared_bytes;
  int32_t params_bytes;
  int32_t buffer_count;
  const void* params;
  const BufferSpan* buffers;
  uint64_t seed;
  uint64_t max_steps;
  int32_t copy_timing;
  int32_t reserved;
};

// The first fault of a launch; `kind` is empty while there is none.
struct Report {
  char kind[40];
  char file[1024];
  int32_t line;
  int32_t block[3];
  int32_t thread;  // -1: no single thread
  char wrong[512];
  char seen[8192];
  char remedy[512];

  void set_location(Location where) {
    std::snprintf(file, sizeof file, "%s", where.file);
    line = where.line;
  }
  // Appends to `seen`; silently cut when full.
  __attribute__((format(printf, 2, 3))) void add_seen(const char* format, ...) {
    const size_t used = std::strlen(seen);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(seen + used, sizeof seen - used, format, arguments);
    va_end(arguments);
  }
};

}  // namespace emulator
}  // namespace kgen
