// One PTX instruction a function. Memory orders are in the names; "sys" reaches other GPUs and the host.
#pragma once

#include "../shared/platform.cuh"

namespace expertwire {

struct alignas(16) Word {  // what one lane moves at a time
  u32 x, y, z, w;
};

// Polls and stores of wire data: relaxed and system-wide, so that each 32-bit word is single-copy atomic and never cached in L1.
__device__ inline Word load_relaxed_sys(const Word* address) {
  Word v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
__device__ inline void store_relaxed_sys(Word* address, Word v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ inline u32 load_relaxed_sys(const u32* address) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ inline void store_relaxed_sys(u32* address, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}
__device__ inline u64 load_relaxed_sys(const u64* address) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ inline void store_relaxed_sys(u64* address, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}
__device__ inline u64 load_acquire_sys(const u64* address) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ inline void store_release_sys(u64* address, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// Between the blocks of this GPU.
__device__ inline u32 load_acquire_gpu(const u32* address) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ inline void store_release_gpu(u32* address, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// Rows of this GPU that other kernels wrote: ordinary loads, not kept in L1 since each is read once.
__device__ inline Word load_once(const Word* address) {
  Word v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Programmatic dependent launch. Before wait, a kernel may touch nothing that an earlier one writes.
__device__ inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of the first `num_threads` threads of a block.
template <i32 num_threads>
__device__ inline void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(num_threads) : "memory");
}

__device__ inline u64 global_nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ inline float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 as_bits(float value) { return __float_as_uint(value); }
__device__ inline float bf16_low(u32 pair) { return as_float(pair << 16); }
__device__ inline float bf16_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }

// Two float32 to a pair of BF16, round to nearest even.
__device__ inline u32 to_bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

#if __CUDA_ARCH__ >= 890
// Two float32 to a pair of E4M3, round to nearest even, saturating; NaN stays NaN.
__device__ inline u32 to_e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// Product and sum each rounded: never a fused multiply-add, whatever the compiler's flags.
__device__ inline float add_product(float sum, float weight, float value) {
  return __fadd_rn(sum, __fmul_rn(weight, value));
}

}  // namespace expertwire
