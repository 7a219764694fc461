// BF16 and E4M3 to float32 and back, one element at a time and by the book: this program checks results with them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace expertwire::bench {

inline constexpr int kScaleBlock = 128, kMxScaleBlock = 32;  // elements that share a scale
inline constexpr float kLargestE4m3 = 448.0f;

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Rounds to nearest, ties to even.
inline std::uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Sign, four bits of exponent with a bias of 7, three of mantissa; 0x7F is NaN, and there is no infinity.
inline float from_e4m3(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 0xF, mantissa = bits & 7;
  float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                             : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((bits & 0x7F) == 0x7F) size = std::nanf("");
  return (bits & 0x80) != 0 ? -size : size;
}

// Rounds to nearest, ties to even, and saturates.
inline std::uint8_t to_e4m3(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7F);
  const float size = std::fmin(std::fabs(value), kLargestE4m3);
  int exponent = 0;
  std::frexp(size, &exponent);                          // size = m * 2^exponent, m in [0.5, 1)
  const int step = size < 0x1p-6f ? -9 : exponent - 4;  // of the last mantissa bit
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));
  // Below 2^-6 the steps are the bits. Above, 8 to 16 of them: 16 is the next exponent's first.
  return static_cast<std::uint8_t>(sign | (size < 0x1p-6f ? steps : (step + 9) * 8 + steps));
}

}  // namespace expertwire::bench
