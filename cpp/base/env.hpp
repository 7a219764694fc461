// The only reader of the environment. Read once, at first use; the library never sets a variable.
#pragma once

#include <string>

namespace expertwire {

struct Env {
  std::string cpu_isa;    // EXPERTWIRE_CPU_ISA: auto (default), plain, avx2, avx512, neon
  bool validate = false;  // EXPERTWIRE_VALIDATE: 1 checks expert ids on the device (CUDA); the CPU always does
  std::string cache_dir;  // EXPERTWIRE_CACHE_DIR: folder of compiled kernels
  std::string nvrtc_dir;  // EXPERTWIRE_NVRTC_DIR: folder of libnvrtc; empty: looked for
  bool nvtx = false;      // EXPERTWIRE_NVTX: 1 marks operations for a profiler (CUDA)
  std::string log;        // EXPERTWIRE_LOG: off (default), info: plans and set-up on stderr
};

const Env& env();

}  // namespace expertwire
