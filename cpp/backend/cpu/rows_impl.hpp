// The one source of the row operations. Each rows_<isa>.cc compiles it with its own flags (see rows.hpp).
//
// Everything here has internal linkage and calls nothing of the standard library but memcpy. A shared inline function or a
// template instantiated with AVX flags would be merged by the linker with the plain copy of the same name, and a processor
// without AVX would then run the wrong one. Of layout.cuh, only constants are used.
//
// Two BF16 values are handled as one 32-bit word: the low half shifted up, or the high half with the low half masked off,
// is the float32 value itself, so that widening and narrowing need no shuffles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "backend/cpu/rows.hpp"
#include "shared/layout.cuh"

namespace expertwire::cpu {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are read as pairs of little-endian halves");
static_assert(__FLT_EVAL_METHOD__ == 0, "float arithmetic must round to float32 after each operation");

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

constexpr std::uint32_t kHighHalf = 0xffff0000u;

// The vector types of kBytes bytes; comparisons of floats yield signed masks.
template <std::size_t kBytes>
struct Vector;
template <>
struct Vector<16> {
  using Words = std::uint32_t __attribute__((vector_size(16)));
  using Floats = float __attribute__((vector_size(16)));
};
template <>
struct Vector<32> {
  using Words = std::uint32_t __attribute__((vector_size(32)));
  using Floats = float __attribute__((vector_size(32)));
};
template <>
struct Vector<64> {
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Floats = float __attribute__((vector_size(64)));
};

// Rounds to nearest, ties to even, denormals kept: what the bits are defined by. A caller that set flush-to-zero or
// another direction (torch.set_flush_denormal, code built with -ffast-math) gets its own setting back.
class DefaultRounding {
 public:
  DefaultRounding() : saved_(read()) {
    if (saved_ != kDefault) write(kDefault);
  }
  ~DefaultRounding() {
    if (saved_ != kDefault) write(saved_);
  }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
#if defined(__x86_64__)
  using Register = std::uint32_t;
  static constexpr Register kDefault = 0x1f80;
  // Exception flags are sticky results, not settings: they are left out of the comparison and so never force a write.
  static Register read() { return __builtin_ia32_stmxcsr() & ~Register{0x3f}; }
  static void write(Register value) { __builtin_ia32_ldmxcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;
  static constexpr Register kDefault = 0;
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
#error "rows: unknown floating-point control register; add it here"
#endif
  const Register saved_;
};

inline float to_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t to_bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }

// Float32 bits rounded to BF16 in the upper half of the word, lower half unspecified. Any NaN becomes 0x7fc0.
template <class Words, class Floats>
inline Words round_to_bf16(Floats value) {
  const Words bits = (Words)value;
  const Words is_nan = (Words)(value != value);
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (is_nan & 0x7fc00000u) | (~is_nan & rounded);
}

// Sums kCount vectors of words, starting `offset` bytes into the rows. The accumulators stay in registers.
template <std::size_t kBytes, int kCount>
inline void reduce_span(const std::uint16_t* const* rows, const float* weights, int num_rows, std::size_t offset,
                        std::uint16_t* out) {
  using Words = typename Vector<kBytes>::Words;
  using Floats = typename Vector<kBytes>::Floats;
  Floats low[kCount] = {};
  Floats high[kCount] = {};
  for (int row = 0; row < num_rows; ++row) {
    const float weight = weights == nullptr ? 1.0f : weights[row];
    const auto* source = reinterpret_cast<const unsigned char*>(rows[row]) + offset;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      Words words;
      std::memcpy(&words, source + static_cast<std::size_t>(i) * kBytes, kBytes);
      low[i] += weight * (Floats)(words << 16);
      high[i] += weight * (Floats)(words & kHighHalf);
    }
  }
  auto* target = reinterpret_cast<unsigned char*>(out) + offset;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const Words words = (round_to_bf16<Words>(low[i]) >> 16) | (round_to_bf16<Words>(high[i]) & kHighHalf);
    std::memcpy(target + static_cast<std::size_t>(i) * kBytes, &words, kBytes);
  }
}

void reduce(const std::uint16_t* const* rows, const float* weights, int num_rows, int hidden_size, std::uint16_t* out) {
  const DefaultRounding rounding;
  const std::size_t row_bytes = static_cast<std::size_t>(hidden_size) * 2;
  constexpr int kCount = 4;
  std::size_t offset = 0;
  for (; offset + kCount * kVectorBytes <= row_bytes; offset += kCount * kVectorBytes)
    reduce_span<kVectorBytes, kCount>(rows, weights, num_rows, offset, out);
  for (; offset + kVectorBytes <= row_bytes; offset += kVectorBytes)
    reduce_span<kVectorBytes, 1>(rows, weights, num_rows, offset, out);
  for (; offset < row_bytes; offset += 16) reduce_span<16, 1>(rows, weights, num_rows, offset, out);
}

// Largest |x| of a block as BF16 bits, over all values or over those that are no NaN.
template <int kBlock, bool kSkipNan>
inline std::int16_t largest_magnitude(const std::uint16_t* x) {
  std::int16_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    auto magnitude = static_cast<std::int16_t>(x[i] & 0x7fff);
    if constexpr (kSkipNan) magnitude = magnitude > 0x7f80 ? std::int16_t{0} : magnitude;
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest;
}

struct BlockScale {
  float scale;
  float factor;
};

inline BlockScale block_scale(std::int16_t largest, ScaleRule rule) {
  constexpr float kSmallestAmax = 1e-4f;
  constexpr float kLargestE4m3 = 448.0f;
  const int largest_finite = largest > 0x7f7f ? 0x7f7f : largest;
  const float magnitude = to_float(static_cast<std::uint32_t>(largest_finite) << 16);
  const float amax = magnitude > kSmallestAmax ? magnitude : kSmallestAmax;
  const float scale = amax / kLargestE4m3;
  if (rule == ScaleRule::FLOAT32) return {scale, kLargestE4m3 / amax};
  // amax is bounded on both sides, so neither power of two leaves the normal range.
  const std::uint32_t bits = to_bits(scale);
  const std::uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
  return {to_float(exponent << 23), to_float((254u - exponent) << 23)};
}

// E4M3 codes of |x| * factor are found by one float addition. Added to an anchor, 2^20 times its own power of two (that
// of the smallest normal E4M3 value, 2^-6, at least), a float32 keeps as many low bits as E4M3 has, and the addition itself
// rounds them to nearest even. The code is those bits plus eight for each power of two above the smallest.
// All of it happens 2^19 higher, where the smallest anchor's exponent field times eight is a multiple of 256, so that it
// need not be subtracted from a byte.
constexpr float kCodeLift = 0x1p19f;
constexpr std::uint32_t kExponentMask = 0x7f800000u;
constexpr std::uint32_t kSmallestPower = (127u - 6 + 19) << 23;
constexpr std::uint32_t kPowerToAnchor = 20u << 23;

inline std::uint32_t code_anchor(float lifted) {
  const std::uint32_t power = to_bits(lifted) & kExponentMask;
  return (power > kSmallestPower ? power : kSmallestPower) + kPowerToAnchor;
}

// kFinite: no element is Inf or NaN, and the products round to 448 at most. The sign and NaN of q are those of x.
template <int kBlock, bool kFinite>
inline void quantize_block(const std::uint16_t* x, float factor, std::uint8_t* q) {
  constexpr float kLargest = 448.0f * kCodeLift;
  const float lifted_factor = factor * kCodeLift;
  std::uint32_t pairs[kBlock / 2];
#pragma GCC unroll 1
  for (int i = 0; i < kBlock / 2; ++i) {
    std::uint32_t word;
    std::memcpy(&word, x + 2 * i, sizeof word);
    float low = to_float((word << 16) & 0x7fff0000u) * lifted_factor;
    float high = to_float(word & 0x7fff0000u) * lifted_factor;
    if constexpr (!kFinite) {
      low = low < kLargest ? low : kLargest;
      high = high < kLargest ? high : kLargest;
    }
    const std::uint32_t low_anchor = code_anchor(low);
    const std::uint32_t high_anchor = code_anchor(high);
    std::uint32_t codes =
        (to_bits(low + to_float(low_anchor)) & 0xffffu) + (to_bits(high + to_float(high_anchor)) << 16);
    codes += (low_anchor >> 20) + (high_anchor >> 4);
    if constexpr (!kFinite) {
      const std::uint32_t nans = ((word & 0x7fff7fffu) + 0x007f007fu) & 0x80008000u;  // bit 15 is set above 0x7f80
      codes |= (nans >> 8) - (nans >> 15);
    }
    pairs[i] = codes | ((word >> 8) & 0x00800080u);
  }
  for (int i = 0; i < kBlock; ++i) {
    std::uint16_t code;
    std::memcpy(&code, reinterpret_cast<const unsigned char*>(pairs) + 2 * i, sizeof code);
    q[i] = static_cast<std::uint8_t>(code);
  }
}

inline bool packs_bytes(ScaleRule rule) { return rule == ScaleRule::UE8M0 || rule == ScaleRule::MX; }

// What quantising a few blocks needs. Several at a time, so that the long ways from elements to factors overlap.
constexpr int kGroup = 16;
struct GroupFactors {
  float factor[kGroup];
  bool finite[kGroup];
};

// Fills `group` for `count` blocks of x and writes their scales from index `first` on.
template <int kBlock>
inline void scale_group(const std::uint16_t* x, int first, int count, ScaleRule rule, void* scales,
                        GroupFactors& group) {
  for (int i = 0; i < count; ++i, x += kBlock) {
    std::int16_t largest = largest_magnitude<kBlock, false>(x);
    group.finite[i] = largest < 0x7f80;
    if (!group.finite[i]) largest = largest_magnitude<kBlock, true>(x);
    const BlockScale of_block = block_scale(largest, rule);
    group.factor[i] = of_block.factor;
    const auto index = static_cast<std::size_t>(first + i);
    if (packs_bytes(rule))
      static_cast<std::uint8_t*>(scales)[index] = static_cast<std::uint8_t>(to_bits(of_block.scale) >> 23);
    else
      std::memcpy(static_cast<unsigned char*>(scales) + index * sizeof(float), &of_block.scale, sizeof(float));
  }
}

template <int kBlock>
inline void quantize_blocks(const std::uint16_t* x, int num_blocks, ScaleRule rule, std::uint8_t* q, void* scales) {
  for (int first = 0; first < num_blocks; first += kGroup) {
    const int count = num_blocks - first < kGroup ? num_blocks - first : kGroup;
    GroupFactors group;
    scale_group<kBlock>(x, first, count, rule, scales, group);
    for (int i = 0; i < count; ++i, x += kBlock, q += kBlock) {
      if (group.finite[i])
        quantize_block<kBlock, true>(x, group.factor[i], q);
      else
        quantize_block<kBlock, false>(x, group.factor[i], q);
    }
  }
  constexpr std::uint8_t kExponentOfOne = 127;
  if (packs_bytes(rule))
    for (int block = num_blocks; block % 4 != 0; ++block) static_cast<std::uint8_t*>(scales)[block] = kExponentOfOne;
}

void quantize(const std::uint16_t* x, int hidden_size, ScaleRule rule, std::uint8_t* q, void* scales) {
  const DefaultRounding rounding;
  if (rule == ScaleRule::MX)
    quantize_blocks<kMxScaleBlock>(x, hidden_size / kMxScaleBlock, rule, q, scales);
  else
    quantize_blocks<kScaleBlock>(x, hidden_size / kScaleBlock, rule, q, scales);
}

void copy(const void* row, std::size_t bytes, void* const* destinations, int num_destinations) {
  for (int i = 0; i < num_destinations; ++i) std::memcpy(destinations[i], row, bytes);
}

}  // namespace
}  // namespace expertwire::cpu
