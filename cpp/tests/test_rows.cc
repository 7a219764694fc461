// Row operations of every instruction set this processor has, against references that work in doubles, one value at a time.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <doctest/doctest.h>

#include "backend/cpu/rows.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using cpu::all_row_ops;
using cpu::RowOps;
using cpu::ScaleRule;
using Row = std::vector<std::uint16_t>;

// ---- references -----------------------------------------------------------------------------------------------------

double bf16_value(std::uint16_t bits) {
  const int exponent = (bits >> 7) & 0xff;
  const int fraction = bits & 0x7f;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 255) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(fraction, -133) : std::ldexp(128 + fraction, exponent - 134));
}

// Nearest BF16, ties to the even one, found between the two neighbours; 2^128 stands for infinity.
std::uint16_t nearest_bf16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | 0x7f80);
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint16_t low = 0;
  for (std::uint16_t bit = 0x4000; bit != 0; bit = static_cast<std::uint16_t>(bit >> 1)) {
    const auto candidate = static_cast<std::uint16_t>(low | bit);
    if (candidate < 0x7f80 && bf16_value(candidate) <= magnitude) low = candidate;
  }
  const auto high = static_cast<std::uint16_t>(low + 1);
  const double above = high == 0x7f80 ? std::ldexp(1.0, 128) : bf16_value(high);
  const double to_low = magnitude - bf16_value(low);
  const double to_high = above - magnitude;
  const bool take_low = to_low < to_high || (to_low == to_high && low % 2 == 0);
  return static_cast<std::uint16_t>(sign | (take_low ? low : high));
}

Row reference_reduce(const std::vector<Row>& rows, const float* weights, std::size_t hidden_size) {
  Row out(hidden_size);
  for (std::size_t h = 0; h < hidden_size; ++h) {
    volatile float sum = 0.0f;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const volatile float product =
          (weights == nullptr ? 1.0f : weights[row]) * static_cast<float>(bf16_value(rows[row][h]));
      sum = sum + product;
    }
    out[h] = nearest_bf16(sum);
  }
  return out;
}

std::array<double, 127> finite_e4m3_values() {
  std::array<double, 127> values{};
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3;
    values[static_cast<std::size_t>(code)] =
        exponent == 0 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, exponent - 10);
  }
  return values;
}

// Nearest of the 127 finite magnitudes, ties to the even code; beyond the largest, the largest.
std::uint8_t nearest_e4m3(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isinf(value)) return sign | 0x7e;
  static const std::array<double, 127> values = finite_e4m3_values();
  const double magnitude = std::fabs(static_cast<double>(value));
  std::size_t best = 0;
  for (std::size_t code = 1; code < values.size(); ++code) {
    const double gain = std::fabs(magnitude - values[best]) - std::fabs(magnitude - values[code]);
    if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(sign | best);
}

struct Quantized {
  std::vector<std::uint8_t> q;
  std::vector<float> scales;
  std::vector<std::uint8_t> exponents;  // UE8M0 and MX, filled up to a multiple of four
  bool operator==(const Quantized&) const = default;
};

std::size_t block_of(ScaleRule rule) { return rule == ScaleRule::MX ? 32 : 128; }
bool packs_bytes(ScaleRule rule) { return rule == ScaleRule::UE8M0 || rule == ScaleRule::MX; }

Quantized reference_quantize(const Row& x, ScaleRule rule) {
  Quantized out;
  const std::size_t block = block_of(rule);
  for (std::size_t start = 0; start < x.size(); start += block) {
    double largest = 1e-4f;
    for (std::size_t i = start; i < start + block; ++i) {
      largest = std::fmax(largest, std::fabs(bf16_value(x[i])));  // a NaN is passed over
    }
    const volatile auto amax = static_cast<float>(std::fmin(largest, bf16_value(0x7f7f)));
    float scale = amax / 448.0f;
    float factor = 448.0f / amax;
    if (rule != ScaleRule::FLOAT32) {
      int exponent = 0;
      if (std::frexp(scale, &exponent) == 0.5f) --exponent;
      scale = std::ldexp(1.0f, exponent);
      factor = std::ldexp(1.0f, -exponent);
      out.exponents.push_back(static_cast<std::uint8_t>(exponent + 127));
    }
    out.scales.push_back(scale);
    for (std::size_t i = start; i < start + block; ++i) {
      const volatile float product = static_cast<float>(bf16_value(x[i])) * factor;
      const bool negative_nan = std::isnan(product) && (x[i] & 0x8000) != 0;
      out.q.push_back(negative_nan ? 0xff : std::isnan(product) ? 0x7f : nearest_e4m3(product));
    }
  }
  while (out.exponents.size() % 4 != 0) out.exponents.push_back(127);
  packs_bytes(rule) ? out.scales.clear() : out.exponents.clear();
  return out;
}

// ---- the operations, with guards around what they write -------------------------------------------------------------

constexpr std::uint16_t kGuard = 0xa5a5;

Row run_reduce(const RowOps& ops, const std::vector<Row>& rows, const float* weights, std::size_t hidden_size) {
  std::vector<const std::uint16_t*> pointers;
  for (const Row& row : rows) pointers.push_back(row.data());
  Row out(hidden_size + 2, kGuard);  // starts 2 bytes off: no alignment beyond that of the element is asked for
  ops.reduce(pointers.data(), weights, static_cast<int>(rows.size()), static_cast<int>(hidden_size), out.data() + 1);
  INFO(ops.name, ": reduce wrote outside the row");
  REQUIRE_EQ(out.front(), kGuard);
  REQUIRE_EQ(out.back(), kGuard);
  return {out.begin() + 1, out.end() - 1};
}

Quantized run_quantize(const RowOps& ops, const Row& x, ScaleRule rule) {
  const std::size_t num_blocks = x.size() / block_of(rule);
  const std::size_t scale_bytes = packs_bytes(rule) ? (num_blocks + 3) / 4 * 4 : num_blocks * 4;
  std::vector<std::uint8_t> q(x.size() + 2, 0xa5);
  std::vector<std::uint8_t> scales(scale_bytes + 8, 0xa5);
  ops.quantize(x.data(), static_cast<int>(x.size()), rule, q.data() + 1, scales.data() + 4);
  INFO(ops.name, ": quantize wrote outside the row or its scales");
  REQUIRE_EQ(q.front(), 0xa5);
  REQUIRE_EQ(q.back(), 0xa5);
  for (std::size_t i = 0; i < 4; ++i) {
    REQUIRE_EQ(scales[i], 0xa5);
    REQUIRE_EQ(scales[scale_bytes + 4 + i], 0xa5);
  }
  Quantized out;
  out.q.assign(q.begin() + 1, q.end() - 1);
  if (packs_bytes(rule)) {
    out.exponents.assign(scales.begin() + 4, scales.end() - 4);
  } else {
    out.scales.resize(num_blocks);
    std::memcpy(out.scales.data(), scales.data() + 4, scale_bytes);
  }
  return out;
}

void check_reduce(const std::vector<Row>& rows, const float* weights, std::size_t hidden_size, const std::string& what,
                  const Location& where = Location::current()) {
  const Row wanted = reference_reduce(rows, weights, hidden_size);
  for (const RowOps* ops : all_row_ops()) {
    const Row got = run_reduce(*ops, rows, weights, hidden_size);
    if (got == wanted) continue;
    const auto h = static_cast<std::size_t>(std::mismatch(got.begin(), got.end(), wanted.begin()).first - got.begin());
    fail_at(where, std::string(ops->name) + ": reduce, " + what + ", " + std::to_string(rows.size()) + " rows of " +
                       std::to_string(hidden_size) + ": [" + std::to_string(h) + "] is " + std::to_string(got[h]) +
                       ", not " + std::to_string(wanted[h]));
  }
}

void check_quantize(const Row& x, const std::string& what, const Location& where = Location::current()) {
  for (const ScaleRule rule : {ScaleRule::FLOAT32, ScaleRule::POW2, ScaleRule::UE8M0, ScaleRule::MX}) {
    const Quantized wanted = reference_quantize(x, rule);
    for (const RowOps* ops : all_row_ops()) {
      const Quantized got = run_quantize(*ops, x, rule);
      const std::string head =
          std::string(ops->name) + ": quantize, " + what + ", rule " + std::to_string(static_cast<int>(rule));
      if (got.scales != wanted.scales || got.exponents != wanted.exponents) fail_at(where, head + ": scales differ");
      if (got.q == wanted.q) continue;
      const auto h =
          static_cast<std::size_t>(std::mismatch(got.q.begin(), got.q.end(), wanted.q.begin()).first - got.q.begin());
      fail_at(where, head + ": [" + std::to_string(h) + "] is " + std::to_string(got.q[h]) + " for bits " +
                         std::to_string(x[h]) + ", not " + std::to_string(wanted.q[h]));
    }
  }
}

// ---- cases ----------------------------------------------------------------------------------------------------------

std::mt19937 random_bits(7);

enum class Values { ANY_BITS, ORDINARY, TINY, HUGE_ONES };

// ANY_BITS: all 65536 values alike. Otherwise signs and fractions are random and exponents fall into a narrow range, so
// that sums cancel, round and tie.
Row random_row(std::size_t hidden_size, Values values) {
  Row row(hidden_size);
  for (std::uint16_t& element : row) {
    const auto bits = random_bits();
    const auto exponent = [&](unsigned first, unsigned count) { return (first + (bits >> 16) % count) << 7; };
    const unsigned sign_and_fraction = bits & 0x807fu;
    switch (values) {
      case Values::ANY_BITS: element = static_cast<std::uint16_t>(bits); break;
      case Values::ORDINARY: element = static_cast<std::uint16_t>(sign_and_fraction | exponent(120, 12)); break;
      case Values::TINY: element = static_cast<std::uint16_t>(sign_and_fraction | exponent(0, 3)); break;
      case Values::HUGE_ONES: element = static_cast<std::uint16_t>(sign_and_fraction | exponent(252, 3)); break;
    }
  }
  return row;
}

std::vector<Row> random_rows(std::size_t num_rows, std::size_t hidden_size, Values values) {
  std::vector<Row> rows;
  for (std::size_t row = 0; row < num_rows; ++row) rows.push_back(random_row(hidden_size, values));
  return rows;
}

// The environment is read once in a process, so each choice is made in a child: the name of its table, or "refused".
std::string choose_in_child(const std::string& isa) {
  std::array<int, 2> ends{};
  REQUIRE(pipe(ends.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    setenv("EXPERTWIRE_CPU_ISA", isa.c_str(), 1);
    std::string answer = "refused";
    try {
      answer = cpu::row_ops().name;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Unsupported) answer = error.what();
    }
    _exit(write(ends[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::array<char, 256> answer{};
  const ssize_t length = read(ends[0], answer.data(), answer.size());
  close(ends[0]);
  REQUIRE_EQ(waitpid(child, nullptr, 0), child);
  return {answer.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

TEST_CASE("chooses by name") {
  std::vector<std::string> names;
  for (const RowOps* ops : all_row_ops()) names.emplace_back(ops->name);
  REQUIRE_EQ(choose_in_child("auto"), names.back());
  REQUIRE_EQ(choose_in_child("plain"), names.front());
  for (const std::string isa : {"avx2", "avx512", "neon"})
    REQUIRE_EQ(choose_in_child(isa), std::count(names.begin(), names.end(), isa) > 0 ? isa : "refused");
}

TEST_CASE("reduces random rows") {
  const std::array<float, 10> odd_weights = {0.0f, -0.0f, 1.0f, -1.0f, 0.3333f, 1e-40f, -3e38f, 1e-30f, INFINITY, NAN};
  for (const Values values : {Values::ANY_BITS, Values::ORDINARY, Values::TINY, Values::HUGE_ONES}) {
    for (const std::size_t num_rows : {0u, 1u, 2u, 3u, 7u, 8u, 17u, 32u}) {
      for (const std::size_t hidden_size : {8u, 16u, 24u, 56u, 64u, 72u, 136u, 264u, 520u, 1000u}) {
        const std::vector<Row> rows = random_rows(num_rows, hidden_size, values);
        std::vector<float> softmax(num_rows);
        std::vector<float> odd(num_rows);
        for (float& weight : softmax) weight = static_cast<float>(random_bits() % 65537) / 65536.0f / 3.0f;
        for (float& weight : odd) weight = odd_weights[random_bits() % odd_weights.size()];
        check_reduce(rows, nullptr, hidden_size, "no weights");
        check_reduce(rows, softmax.data(), hidden_size, "weights in [0, 1/3]");
        check_reduce(rows, odd.data(), hidden_size, "odd weights");
      }
    }
  }
  check_reduce(random_rows(8, 7168, Values::ORDINARY), nullptr, 7168, "a model's row");
}

// Every BF16 value plus about half a unit of its last place, from both sides: rounding, ties, overflow, denormals.
TEST_CASE("reduces every value") {
  Row every(65536);
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::uint16_t>(i);
  check_reduce({every}, nullptr, every.size(), "every value alone");
  for (const float half_unit : {0x1p-8f, -0x1p-8f, 0x1.01p-8f, 0x1.fcp-9f, 0x1.8p-7f}) {
    const std::array<float, 2> weights = {1.0f, half_unit};
    Row unit = every;
    for (std::uint16_t& element : unit)
      if ((element & 0x7f80) != 0x7f80) element &= 0xff80;
    check_reduce({every, unit}, weights.data(), every.size(), "every value plus " + std::to_string(half_unit));
  }
  const Row negative_zeros(64, 0x8000);
  check_reduce({negative_zeros, negative_zeros}, nullptr, 64, "+0 + -0 is +0");
}

TEST_CASE("quantizes every value") {
  // Blocks share their largest magnitude with a first element; larger values raise it, smaller ones are seen under it.
  for (const unsigned first : {0x0000u, 0x0001u, 0x38d1u, 0x38d2u, 0x3f80u, 0x3fe0u, 0x43dfu, 0x43e0u, 0x43e1u, 0x4460u,
                               0x7f7fu, 0x7f80u, 0xff80u, 0x7fc1u, 0xff81u}) {
    Row x;
    for (unsigned value = 0; value < 65536; ++value) {
      if (x.size() % 128 == 0) x.push_back(static_cast<std::uint16_t>(first));
      x.push_back(static_cast<std::uint16_t>(value));
    }
    x.resize((x.size() + 127) / 128 * 128, 0);
    check_quantize(x, "every value with " + std::to_string(first));
  }
}

TEST_CASE("quantizes random rows") {
  for (const Values values : {Values::ANY_BITS, Values::ORDINARY, Values::TINY, Values::HUGE_ONES})
    for (const std::size_t num_blocks : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 56u})
      check_quantize(random_row(num_blocks * 128, values), "random");
  for (std::size_t position = 0; position < 128; ++position) {
    for (const unsigned special : {0x7f80u, 0xff80u, 0x7f81u, 0xffffu, 0x42ffu}) {
      Row x = random_row(384, Values::ORDINARY);
      x[128 + position] = static_cast<std::uint16_t>(special);
      check_quantize(x, "one special value");
    }
  }
  for (const unsigned value : {0x0000u, 0x8000u, 0x7fffu, 0x7f80u, 0x0001u})
    check_quantize(Row(256, static_cast<std::uint16_t>(value)), "all alike");
}

void check_copy(decltype(RowOps::copy) copy, std::size_t bytes, std::size_t num_destinations, const std::string& what) {
  constexpr std::size_t kMargin = 64;
  std::vector<unsigned char> row(bytes + 1);
  for (unsigned char& byte : row) byte = static_cast<unsigned char>(random_bits());
  std::vector<std::vector<unsigned char>> buffers(num_destinations,
                                                  std::vector<unsigned char>(bytes + 2 * kMargin, 0xa5));
  std::vector<void*> destinations;
  for (std::size_t i = 0; i < num_destinations; ++i) destinations.push_back(buffers[i].data() + 16 + i);
  copy(row.data(), bytes, destinations.data(), static_cast<int>(num_destinations));
  for (std::size_t i = 0; i < num_destinations; ++i) {
    std::vector<unsigned char> wanted(bytes + 2 * kMargin, 0xa5);
    std::copy_n(row.begin(), bytes, wanted.begin() + 16 + static_cast<std::ptrdiff_t>(i));
    REQUIRE_MESSAGE(buffers[i] == wanted, what, " of ", bytes, " bytes, destination ", i);
  }
}

TEST_CASE("copies") {
  for (const RowOps* ops : all_row_ops()) {
    for (const std::size_t bytes : {0u, 1u, 15u, 16u, 17u, 64u, 1000u, 7168u, 14336u}) {
      for (std::size_t num_destinations = 0; num_destinations <= 17; ++num_destinations) {
        check_copy(ops->copy, bytes, num_destinations, std::string(ops->name) + ": copy");
      }
    }
  }
}

// The caller's rounding direction and flush-to-zero change no bit, and are found again afterwards.
TEST_CASE("ignores the caller's float settings") {
  const std::vector<Row> rows = random_rows(5, 520, Values::TINY);
  const Row x = random_row(512, Values::ORDINARY);
  const std::array<float, 5> weights = {0.3f, -0.7f, 1.1f, 1e-3f, 0.9f};
  const Row wanted_sum = reference_reduce(rows, weights.data(), 520);
  const Quantized wanted_quantized = reference_quantize(x, ScaleRule::FLOAT32);
  for (const RowOps* ops : all_row_ops()) {
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);  // flush to zero, denormals are zero
    const auto settings = _mm_getcsr() & ~0x3fu;
#endif
    const Row sum = run_reduce(*ops, rows, weights.data(), 520);
    const Quantized quantized = run_quantize(*ops, x, ScaleRule::FLOAT32);
    const bool direction_kept = std::fegetround() == FE_UPWARD;
#if defined(__x86_64__)
    const bool settings_kept = (_mm_getcsr() & ~0x3fu) == settings;
    _mm_setcsr(0x1f80);
    REQUIRE_MESSAGE(settings_kept, ops->name, ": flush-to-zero setting lost");
#endif
    std::fesetround(FE_TONEAREST);
    REQUIRE_MESSAGE(direction_kept, ops->name, ": rounding direction lost");
    REQUIRE_MESSAGE(sum == wanted_sum, ops->name, ": reduce follows the caller's float settings");
    REQUIRE_MESSAGE(quantized == wanted_quantized, ops->name, ": quantize follows the caller's float settings");
  }
}

}  // namespace
}  // namespace expertwire::test
