#include "backend/cuda/cuda_plan.hpp"

#include <algorithm>

#include "expertwire/error.hpp"
#include "shared/inbox.cuh"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {
namespace {

// Measured on two H200 (docs/kernels.md): few tokens want short blocks, which start and end quickly; many want as many
// warps as fit, dispatch with room for the next kernel's blocks beside its own.
constexpr Variant kSmallWork{256, 4, 4, 1};
constexpr Variant kLargeDispatch{512, 2, 4, 1};
constexpr Variant kLargeCombine{1024, 1, 4, 1};

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::Unsupported, text); }

void check_supported(const Problem& problem, const DeviceFacts& facts) {
  const RuntimeConfig& config = problem.config;
  const std::string capability = std::to_string(facts.major) + "." + std::to_string(facts.minor);
  if (facts.major < 8) refuse("device: compute capability " + capability + ", the CUDA backend needs 8.0 or newer");
  if (problem.shape.fp8 && facts.major * 10 + facts.minor < 89) {
    refuse("quant.format = FP8_E4M3: needs compute capability 8.9 or newer, the device has " + capability);
  }
  if (problem.num_ranks > kMaxGpuRanks) {
    refuse("num_ranks = " + std::to_string(problem.num_ranks) + ": the CUDA backend takes at most " +
           std::to_string(kMaxGpuRanks));
  }
  if (config.on_peer_loss == PeerLossPolicy::MASK) refuse("on_peer_loss = MASK: not on CUDA in this version");
  if (config.validate) refuse("validate: ids are not checked on CUDA in this version; wrong ones are dropped");
}

int choose_blocks(const char* field, int asked, const DeviceFacts& facts) {
  const int most = std::max(1, facts.num_sms / facts.num_ranks_here);
  if (asked > most) {
    throw Error(ErrorCode::InvalidArgument, std::string(field) + " = " + std::to_string(asked) + ": at most " +
                                                std::to_string(most) + " on " + std::to_string(facts.num_sms) +
                                                " SMs shared by " + std::to_string(facts.num_ranks_here) + " ranks");
  }
  return asked > 0 ? asked : std::min(most, kMaxBlocks);
}

}  // namespace

CudaPlan make_cuda_plan(const Problem& problem, const DeviceFacts& facts) {
  check_supported(problem, facts);
  CudaPlan plan;
  plan.architecture = "sm_" + std::to_string(facts.major) + std::to_string(facts.minor);
  plan.dispatch_blocks = choose_blocks("dispatch_num_blocks", problem.config.dispatch_num_blocks, facts);
  plan.combine_blocks = choose_blocks("combine_num_blocks", problem.config.combine_num_blocks, facts);
  // A kernel that waits for its predecessor holds its place: with several ranks on a device it could keep a peer's out.
  plan.dependent_launch = facts.major >= 9 && facts.num_ranks_here == 1;
  plan.dispatch_shared_bytes =
      dispatch_shared_bytes(problem.shape, problem.config.output_layout == DispatchLayout::RANK_MAJOR);
  if (plan.dispatch_shared_bytes > facts.max_shared_bytes) {
    refuse("num_experts = " + std::to_string(problem.shape.num_experts) +
           " with max_tokens_per_rank = " + std::to_string(problem.shape.max_tokens_per_rank) + ": routing needs " +
           std::to_string(plan.dispatch_shared_bytes) + " bytes of shared memory, the device has " +
           std::to_string(facts.max_shared_bytes));
  }
  plan.small_work = kSmallWork;
  plan.large_dispatch = kLargeDispatch;
  plan.large_combine = kLargeCombine;
  plan.small_work_pieces = facts.num_sms / facts.num_ranks_here * kSmallWork.num_threads / 32;
  return plan;
}

std::string CudaPlan::to_string() const {
  return "cuda plan: " + architecture + ", blocks " + std::to_string(dispatch_blocks) + " and " +
         std::to_string(combine_blocks) + ", threads " + std::to_string(small_work.num_threads) + " up to " +
         std::to_string(small_work_pieces) + " pieces, then " + std::to_string(large_dispatch.num_threads) + " and " +
         std::to_string(large_combine.num_threads) + ", shared " + std::to_string(dispatch_shared_bytes) +
         " B, dependent launch " + (dependent_launch ? "on" : "off");
}

std::string config_source(const Problem& problem, const Variant& variant) {
  const RuntimeConfig& config = problem.config;
  const Shape& shape = problem.shape;
  std::string text = "namespace expertwire::config {\n";
  const auto number = [&](const char* name, int value) {
    text.append("constexpr int ").append(name).append(" = ").append(std::to_string(value)).append(";\n");
  };
  const auto flag = [&](const char* name, bool value) {
    text.append("constexpr bool ").append(name).append(" = ").append(value ? "true" : "false").append(";\n");
  };
  number("kHiddenSize", shape.hidden_size);
  number("kNumExperts", shape.num_experts);
  number("kNumTopk", shape.num_topk);
  number("kNumRanks", shape.num_ranks);
  number("kMaxTokens", shape.max_tokens_per_rank);
  number("kMaxLocalExperts", shape.max_local_experts);
  number("kMaxInFlight", shape.max_in_flight);
  text += "__device__ constexpr int kFirstExpert[] = {0";
  int end = 0;
  for (const int count : config.experts_per_rank) text.append(", ").append(std::to_string(end += count));
  text += "};\n";
  flag("kEvenExperts", std::all_of(config.experts_per_rank.begin(), config.experts_per_rank.end(),
                                   [&](int count) { return count == shape.max_local_experts; }));
  flag("kRankMajor", config.output_layout == DispatchLayout::RANK_MAJOR);
  flag("kDirectSend", shape.direct_send);
  flag("kFp8", shape.fp8);
  flag("kPow2", config.quant.round_scale_pow2);
  flag("kUe8m0", shape.ue8m0);
  flag("kColumnScales", config.quant.scale_layout == ScaleLayout::COLUMN);
  number("kInvalidId", config.invalid_token_expert_id);
  number("kNumThreads", variant.num_threads);
  number("kBlocksPerSm", variant.blocks_per_sm);
  number("kGather", variant.gather);
  number("kInFlight", variant.in_flight);
  return text + "}\n";
}

}  // namespace expertwire::cuda
