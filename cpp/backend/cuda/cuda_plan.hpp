// Which kernels are compiled for a problem on a GPU, and how they are launched: a pure function, testable without a GPU.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.hpp"

namespace expertwire::cuda {

struct DeviceFacts {
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;           // 0: not known, when kernels are compiled ahead of time for any GPU of an architecture
  std::size_t max_shared_bytes = 0;  // a block may ask for
  int num_ranks_here = 1;            // ranks of the group on this device: they share its SMs
};

enum class Kernel { DISPATCH, COMBINE };

// Which part of an operation a kernel does: kPhase of its program.
enum class Phase { WHOLE, SEND, RECEIVE };

const char* name(Kernel kernel);  // "dispatch": of dispatch.cuh and dispatch_kernel

// One compiled program: a kernel and what it is tuned by.
struct Variant {
  Kernel kernel = Kernel::DISPATCH;
  int num_threads = 0;    // of a block that move rows; a block has one warp more
  int blocks_per_sm = 0;  // that must fit at once: the next kernel's blocks are there before the last one's have left
  std::vector<std::pair<const char*, int>> tuning;  // constants of this kernel alone, by name
  Phase phase = Phase::WHOLE;
  bool by_blocks = false;  // a combine that reads expert rows as their producer publishes them

  int block_threads() const { return num_threads + 32; }
};

struct CudaPlan {
  std::string architecture;  // "sm_90"
  int dispatch_blocks = 0;
  int combine_blocks = 0;
  bool dependent_launch = false;
  int most_paired_blocks = 0;  // grids of an even number of blocks, up to this one, are launched as clusters of two
  std::size_t dispatch_shared_bytes = 0;
  // For few tokens and, unless no call can bring more, for many: the small one is launched up to small_work_tokens. For a
  // device whose SMs are not known, all that there may be.
  std::vector<Variant> dispatch, combine;
  std::vector<Phase> phases;  // in each of which each of them is compiled
  bool by_blocks = false;     // those of combine that read expert rows also by blocks
  int small_work_tokens = 0;
  std::string to_string() const;
};

// Throws Unsupported for what the device or this version cannot do, InvalidArgument for grids that do not fit.
CudaPlan make_cuda_plan(const Problem& problem, const DeviceFacts& facts);

// The source of one program: namespace expertwire::config, and the kernel that reads it.
std::string program_source(const Problem& problem, const Variant& variant);
// All programs of a plan: by phase those of dispatch, then those of combine, then those of combine by blocks.
std::vector<Variant> programs(const CudaPlan& plan);
std::vector<std::string> program_sources(const Problem& problem, const CudaPlan& plan);

}  // namespace expertwire::cuda
