// Where in the kernel source something happened. Sources carry #line, so this names the template.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace kgen {
namespace emulator {

struct Location {
  const char* file;
  int line;
  // As a default argument this is the place of the call.
  static constexpr Location current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Location& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

// Numbers locations, so that a shadow entry needs 16 bits for one.
class LocationTable {
 public:
  uint32_t id(Location where) {
    const uintptr_t hash = (reinterpret_cast<uintptr_t>(where.file) >> 3) + static_cast<uintptr_t>(where.line);
    Slot& slot = cache_[hash % kCacheSlots];
    if (slot.file == where.file && slot.line == where.line) return slot.id;
    slot = {where.file, where.line, find_or_add(where)};
    return slot.id;
  }
  Location operator[](uint32_t id) const { return known_[id]; }

 private:
  static constexpr uintptr_t kCacheSlots = 512;
  struct Slot {
    const char* file = nullptr;
    int line = 0;
    uint32_t id = 0;
  };
  uint32_t find_or_add(Location where) {
    for (uint32_t i = 0; i < known_.size(); ++i)
      if (known_[i].file == where.file && known_[i].line == where.line) return i;
    if (known_.size() > 0xffff) return 0xffff;  // more call sites than a shadow entry can tell apart
    known_.push_back(where);
    return static_cast<uint32_t>(known_.size() - 1);
  }
  Slot cache_[kCacheSlots];
  std::vector<Location> known_;
};

}  // namespace emulator
}  // namespace kgen
