// The command line of expertwire-bench.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "expertwire/types.hpp"

namespace expertwire::bench {

// An option that cannot be used: one line, and exit status 2.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  int num_experts = 128;
  int num_tokens = 128;
  int hidden_size = 7168;
  int num_topk = 8;
  int num_ranks = 2;
  DispatchLayout layout = DispatchLayout::EXPERT_MAJOR;
  CombineMode combine_mode = CombineMode::RANK_LOCAL_REDUCE;
  DispatchDataType dispatch_dtype = DispatchDataType::BF16;
  std::string routing = "uniform";
  int seed = 1;
  std::string inputs;  // folder; empty: drawn here

  DeviceType backend = DeviceType::CPU;
  bool cuda_graph = false;  // filled in: on for CUDA unless refused
  int iters_per_graph = 50;
  int dispatch_num_blocks = 0;
  int combine_num_blocks = 0;
  bool mpi = false;  // ranks are processes of mpirun

  int warmup = 10;
  int iters = 100;
  int rounds = 5;
  bool validate = false;  // check every timed pair (CUDA: every round), outside the timed part
  double timeout_s = 100.0;
  std::string json;
  std::string nvrtc_dir;
  bool help = false;
  bool version = false;

  // What the runtime is given, with the placement filled in: the first ranks take one expert more where R does not divide E.
  RuntimeConfig config() const;
  // Timed pairs, or replays, of each round.
  std::vector<int> parts() const;
};

// Throws UsageError.
Options parse_options(const std::vector<std::string>& arguments);

std::string help_text();

// A value as the options spell it: "expert-major".
std::string option_text(DispatchLayout layout);
std::string option_text(CombineMode mode);
std::string option_text(DispatchDataType format);

}  // namespace expertwire::bench
