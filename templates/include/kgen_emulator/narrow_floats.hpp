// Floats of 8 and 16 bits as a GPU converts them.
#pragma once

#include <cstdint>
#include <cstring>

namespace kgen {
namespace emulator {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// Exponent and mantissa moved to where a float has them, times the power of two that the exponents' biases differ by:
// right for subnormal numbers too.
inline float float_of_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | rest << 13);
  return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}
inline float float_of_e4m3(uint32_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24, rest = bits & 0x7fu;
  if (rest == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
  return float_of_bits(sign | bits_of_float(float_of_bits(rest << 20) * 0x1p120f));
}

// To nearest even. NaN becomes the canonical 0x7fff, as cvt.rn.f16x2.f32 gives it; from 65520 on it is infinity.
inline uint16_t bits_of_f16(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: in units of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(float_of_bits(magnitude) * 0x1p24f)));
  }
  return static_cast<uint16_t>(sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112u << 10)));
}

}  // namespace emulator
}  // namespace kgen
