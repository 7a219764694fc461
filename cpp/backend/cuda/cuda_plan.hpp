// Which kernels are compiled for a problem on a GPU, and how they are launched: a pure function, testable without a GPU.
#pragma once

#include <cstddef>
#include <string>

#include "backend/backend.hpp"

namespace expertwire::cuda {

struct DeviceFacts {
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
  std::size_t max_shared_bytes = 0;  // a block may ask for
  int num_ranks_here = 1;            // ranks of the group on this device: they share its SMs
};

// One compilation of both kernels.
struct Variant {
  int num_threads = 0;    // of a block
  int blocks_per_sm = 0;  // that must fit at once: the next kernel's blocks are there before the last one's have left
  int gather = 0;         // expert rows that a warp of combine loads at once
  int in_flight = 0;      // pieces of rows that a warp of dispatch loads at once
};

struct CudaPlan {
  std::string architecture;  // "sm_90"
  int dispatch_blocks = 0;
  int combine_blocks = 0;
  bool dependent_launch = false;
  std::size_t dispatch_shared_bytes = 0;
  Variant small_work, large_dispatch, large_combine;
  int small_work_pieces = 0;  // up to this many pieces of 512 bytes of own tokens, small_work is launched
  std::string to_string() const;
};

// Throws Unsupported for what the device or this version cannot do, InvalidArgument for grids that do not fit.
CudaPlan make_cuda_plan(const Problem& problem, const DeviceFacts& facts);

// The text of namespace expertwire::config for one variant.
std::string config_source(const Problem& problem, const Variant& variant);

}  // namespace expertwire::cuda
