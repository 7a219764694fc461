// Arithmetic on rows: BF16 sums and FP8 quantisation, once per instruction set with identical bits (docs/numerics.md).
// The same source (rows_impl.hpp) is compiled with other flags; nothing here uses fused multiply-add or flushes to zero,
// whatever the calling thread has set. No pointer needs more alignment than its element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace expertwire::cpu {

// MX: as UE8M0, with blocks of 32 instead of 128.
enum class ScaleRule { FLOAT32, POW2, UE8M0, MX };

struct RowOps {
  std::string_view name;  // "plain", "avx2", "avx512", "neon"

  // out[h] = bf16(((+0 + w0 * rows[0][h]) + w1 * rows[1][h]) + ...), float32 throughout, product and sum each rounded;
  // NaN comes out as 0x7fc0. weights == nullptr: plain sum. num_rows == 0: zeros. hidden_size: a multiple of 8.
  // out may not overlap a row.
  void (*reduce)(const std::uint16_t* const* rows, const float* weights, int num_rows, int hidden_size,
                 std::uint16_t* out);

  // BF16 row to E4M3 by blocks (hidden_size: a multiple of 128); NaN keeps its sign and becomes 0x7f or 0xff.
  // scales: float32 [S], or bytes in int32 [ceil(S / 4)]. q may not overlap x.
  void (*quantize)(const std::uint16_t* x, int hidden_size, ScaleRule rule, std::uint8_t* q, void* scales);

  // Copies one row to several places, fetching it from memory once.
  void (*copy)(const void* row, std::size_t bytes, void* const* destinations, int num_destinations);
};

// The best table this processor can run, or the one EXPERTWIRE_CPU_ISA names (throws Unsupported if it cannot run).
const RowOps& row_ops();
// Every table this build and processor can run, plain first (on AArch64 the first is called neon). For tests.
std::vector<const RowOps*> all_row_ops();

}  // namespace expertwire::cpu
