// BF16 to E4M3 in blocks of 128 or 32, by pieces: a lane holds 16 elements of a piece of 512, eight or two lanes share a
// scale.
#pragma once

#include "wire.cuh"

namespace expertwire {

constexpr i32 kScalesInRow = num_scales(kShape);  // 32-bit words

constexpr i32 kScaleLanes = config::kScaleBlock / 16;  // that share a scale
constexpr i32 kScaleWordLanes = kScaleLanes * (config::kUe8m0 ? 4 : 1);

// Which lanes of a piece hold a scale word, and which of the row's it is.
__device__ inline i32 scale_index(i32 piece, i32 lane) {
  return piece * (32 / kScaleWordLanes) + lane / kScaleWordLanes;
}
__device__ inline bool scale_lane(i32 piece, i32 lane) {
  return lane % kScaleWordLanes == 0 && scale_index(piece, lane) < kScalesInRow;
}

struct Quantized {
  Word payload;
  u32 scale;  // lanes that scale_lane() names
};

#if __CUDA_ARCH__ >= 890
__device__ inline float quiet_abs(float v) { return v != v ? 0.0f : fabsf(v); }

__device__ inline u32 quantize_quad(u32 pair0, u32 pair1, float factor) {
  const u32 low = to_e4m3_pair(__fmul_rn(bf16_low(pair0), factor), __fmul_rn(bf16_high(pair0), factor));
  const u32 high = to_e4m3_pair(__fmul_rn(bf16_low(pair1), factor), __fmul_rn(bf16_high(pair1), factor));
  return low | (high << 16);
}

__device__ inline Quantized quantize_piece(Word a, Word b, bool present) {
  const u32 pairs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  float amax = 0.0f;
#pragma unroll
  for (i32 i = 0; i < 8; ++i) amax = fmaxf(amax, fmaxf(quiet_abs(bf16_low(pairs[i])), quiet_abs(bf16_high(pairs[i]))));
#pragma unroll
  for (i32 step = 1; step < kScaleLanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
  amax = fminf(fmaxf(amax, 1e-4f), as_float(0x7F7F0000u));  // the largest finite BF16
  float scale = __fdiv_rn(amax, 448.0f), factor = __fdiv_rn(448.0f, amax);
  u32 exponent = 0;
  if constexpr (config::kPow2 || config::kUe8m0) {
    const u32 bits = as_bits(scale);
    exponent = (bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);  // biased; scale is normal and positive
    scale = as_float(exponent << 23);
    factor = as_float((254u - exponent) << 23);
  }
  Quantized out;
  out.payload = Word{quantize_quad(pairs[0], pairs[1], factor), quantize_quad(pairs[2], pairs[3], factor),
                     quantize_quad(pairs[4], pairs[5], factor), quantize_quad(pairs[6], pairs[7], factor)};
  out.scale = as_bits(scale);
  if constexpr (config::kUe8m0) {
    const u32 byte = present ? exponent : 127u;
    const i32 first = lane_idx() / kScaleWordLanes * kScaleWordLanes;
    out.scale = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) out.scale |= __shfl_sync(kAllLanes, byte, first + i * kScaleLanes) << (8 * i);
  }
  return out;
}
#else
__device__ inline Quantized quantize_piece(Word, Word, bool) {
  return Quantized{Word{0, 0, 0, 0}, 0};
}  // the host refuses FP8 below sm_89
#endif

}  // namespace expertwire
