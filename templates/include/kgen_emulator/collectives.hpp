// Warp collectives: the last lane to arrive does the work of all 32.
#pragma once

#include <cstring>

#include "machine.hpp"
#include "narrow_floats.hpp"

namespace kgen {
namespace emulator {

struct LdmatrixOperand {
  uint32_t* registers;  // 4
  uint32_t address;
};

struct MmaOperand {
  float* d;           // 4
  const uint32_t* a;  // 4
  uint32_t b0, b1;
};

template <typename T>
struct ShuffleOperand {
  T value;
  int source_lane;
  T result;
};

struct BulkOperand {
  uint32_t destination;
  uint64_t source;
  int bytes;
  uint32_t barrier;
  bool operator==(const BulkOperand& other) const {
    return destination == other.destination && source == other.source && bytes == other.bytes &&
           barrier == other.barrier;
  }
};

template <typename T>
struct ReduceOperand {
  T value;
  T result;
};

// PTX ISA, ldmatrix .m8n8.x4 .b16: lane l receives elements 2*(l%4) and 2*(l%4)+1 of row l/4 of each
// matrix; with .trans, of column l/4.
inline void execute_ldmatrix(Machine& m, bool transpose, Location where) {
  const Warp& warp = m.warp();
  uint16_t rows[kWarp][8];
  for (int l = 0; l < kWarp; ++l) {
    m.acting_lane = l;  // a row is read by the lane that gives its address
    const uint32_t address = static_cast<const LdmatrixOperand*>(warp.operands[l])->address;
    const uint32_t offset = m.shared_offset(address, 16, "ldmatrix row", where);
    m.check_shared_range(offset, 16, 16, "ldmatrix row", where);
    m.touch_shared(offset, 16, false, where);
    std::memcpy(rows[l], m.shared + offset, 16);
  }
  m.acting_lane = -1;
  for (int l = 0; l < kWarp; ++l) {
    uint32_t* registers = static_cast<const LdmatrixOperand*>(warp.operands[l])->registers;
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * (l % 4), j = l / 4;
      const uint32_t low = transpose ? rows[8 * i + k][j] : rows[8 * i + j][k];
      const uint32_t high = transpose ? rows[8 * i + k + 1][j] : rows[8 * i + j][k + 1];
      registers[i] = low | high << 16;
    }
  }
}

// PTX ISA, mma.m16n8k16 of 16-bit floats. Their products are exact in fp32; they are added in order of k.
template <typename Decode>
void execute_mma(const Warp& warp, Decode decode) {
  const auto unpack = [&](uint32_t pair, float* first, int stride) {
    first[0] = decode(static_cast<uint16_t>(pair));
    first[stride] = decode(static_cast<uint16_t>(pair >> 16));
  };
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < kWarp; ++l) {
    const MmaOperand& operand = *static_cast<const MmaOperand*>(warp.operands[l]);
    const int group = l / 4, pair = 2 * (l % 4);
    unpack(operand.a[0], &a[group][pair], 1);
    unpack(operand.a[1], &a[group + 8][pair], 1);
    unpack(operand.a[2], &a[group][pair + 8], 1);
    unpack(operand.a[3], &a[group + 8][pair + 8], 1);
    unpack(operand.b0, &b[pair][group], 8);
    unpack(operand.b1, &b[pair + 8][group], 8);
    std::memcpy(&d[group][pair], operand.d, 8);
    std::memcpy(&d[group + 8][pair], operand.d + 2, 8);
  }
  typedef float Row __attribute__((vector_size(32)));
  for (int i = 0; i < 16; ++i) {
    Row sum;
    std::memcpy(&sum, d[i], sizeof sum);
    for (int k = 0; k < 16; ++k) {
      Row column;
      std::memcpy(&column, b[k], sizeof column);
      sum += a[i][k] * column;
    }
    std::memcpy(d[i], &sum, sizeof sum);
  }
  for (int l = 0; l < kWarp; ++l) {
    const MmaOperand& operand = *static_cast<const MmaOperand*>(warp.operands[l]);
    const int group = l / 4, pair = 2 * (l % 4);
    std::memcpy(operand.d, &d[group][pair], 8);
    std::memcpy(operand.d + 2, &d[group + 8][pair], 8);
  }
}

inline void execute_warp_sync(Machine& m) {
  const int first = m.thread / kWarp * kWarp, joined = m.clocks.scratch_row();
  m.clocks.copy(joined, first);
  for (int t = first + 1; t < first + kWarp; ++t) m.clocks.join(joined, t);
  for (int t = first; t < first + kWarp; ++t) {
    m.clocks.copy(t, joined);
    m.clocks.advance(t);
  }
}

// Every lane gets the value of the lane it names; `detail` is what the lanes must agree on.
template <typename T>
T exchange(const char* primitive, T value, int source_lane, int detail, Location where) {
  Machine& m = *machine;
  ShuffleOperand<T> mine{value, source_lane & (kWarp - 1), value};
  if (m.gather(primitive, detail, where, &mine)) {
    const Warp& warp = m.warp();
    for (const void* operand : warp.operands) {
      auto* to = static_cast<ShuffleOperand<T>*>(const_cast<void*>(operand));
      to->result = static_cast<const ShuffleOperand<T>*>(warp.operands[to->source_lane])->value;
    }
    m.release();
  }
  return mine.result;
}

// Every lane gets the sum, in whatever sense `add` gives it.
template <typename T, typename Add>
T reduce(const char* primitive, T value, Add add, Location where) {
  Machine& m = *machine;
  ReduceOperand<T> mine{value, value};
  if (m.gather(primitive, 0, where, &mine)) {
    const Warp& warp = m.warp();
    T sum = static_cast<const ReduceOperand<T>*>(warp.operands[0])->value;
    for (int l = 1; l < kWarp; ++l) sum = add(sum, static_cast<const ReduceOperand<T>*>(warp.operands[l])->value);
    for (const void* operand : warp.operands) static_cast<ReduceOperand<T>*>(const_cast<void*>(operand))->result = sum;
    m.release();
  }
  return mine.result;
}

// Issued by one lane, which no kernel may know: a random one.
inline void execute_bulk(Machine& m, Location where) {
  const Warp& warp = m.warp();
  const BulkOperand& copy = *static_cast<const BulkOperand*>(warp.operands[0]);
  for (int l = 1; l < kWarp; ++l) {
    if (*static_cast<const BulkOperand*>(warp.operands[l]) == copy) continue;
    m.fault("divergent_collective", where, "give every lane of the warp the same arguments",
            "the lanes of warp_bulk_copy do not agree", "lanes 0 and %d of warp %d", l, m.thread / kWarp);
  }
  m.acting_lane = static_cast<int>(m.random.below(kWarp));
  m.issue_bulk(copy.destination, copy.source, copy.bytes, copy.barrier, where);
  m.acting_lane = -1;
}

}  // namespace emulator
}  // namespace kgen
