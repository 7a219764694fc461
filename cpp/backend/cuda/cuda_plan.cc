#include "backend/cuda/cuda_plan.hpp"

#include <algorithm>
#include <cstdint>

#include "expertwire/error.hpp"
#include "shared/inbox.cuh"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {
namespace {

constexpr int kSmallWorkThreads = 256;
// At most what a block has besides what routing asks for: sets of lost ranks, and the first wrong id.
constexpr std::size_t kStaticSharedBytes = 64;
constexpr int kMostPairedBlocks = 64;
constexpr int kMostWarps = 31;  // of a block, beside that of the packets

// What a warp of dispatch moves at a time: 512 bytes of a row's payload, or its facts.
int parts_of_row(int row_bytes) { return (row_bytes + 511) / 512 + 1; }

// Whether warps of this many blocks would have more than two parts each, if there were as many as fit: then each had better
// move two words at once. `blocks`: 0 if not known, which leaves what one block would have, and what many.
std::vector<bool> list_lengths(const Problem& problem, int blocks) {
  const int row_bytes = problem.shape.hidden_size * (problem.shape.fp8 ? 1 : 2);
  const std::int64_t parts = std::int64_t{problem.shape.max_tokens_per_rank} * parts_of_row(row_bytes);
  const bool is_long = parts > std::int64_t{2} * kMostWarps * std::max(blocks, 1);
  if (blocks == 0 && is_long) return {false, true};
  return {is_long};
}

// Few tokens want short blocks, which start and end quickly; many want many warps, but RANK_MAJOR's dispatch rather room for
// the next kernel's blocks beside its own, unless it has long lists (docs/kernels.md). Threads and blocks bound the registers
// of a thread, 65536 over their product, so that nothing spills. kWords: of 16 bytes, that a lane moves at once; two where
// lists are long, and where combine gathers. kMarkBatch: ids that a thread of dispatch asks for at once. kSenders: where every
// other row stays here, and is large, half of the blocks place those. kGather: expert rows that a warp of combine asks for at
// once.
void choose_variants(CudaPlan& plan, const Problem& problem, const DeviceFacts& facts, bool many_tokens_occur) {
  const bool rank_major = problem.config.output_layout == DispatchLayout::RANK_MAJOR;
  // These take more registers; for other architectures than sm_90 the compiler does, too.
  const bool wide = problem.num_ranks > 2 || facts.major != 9, mask = problem.shape.mask;
  const int num_small = mask ? 1 : wide ? 2 : 3;
  plan.dispatch = {
      {Kernel::DISPATCH, kSmallWorkThreads, num_small, {{"kWords", 1}, {"kMarkBatch", 1}, {"kSenders", 0}}}};
  plan.combine = {{Kernel::COMBINE, kSmallWorkThreads, num_small, {{"kWords", 1}, {"kGather", 4}}}};
  if (!many_tokens_occur) return;
  const bool half = rank_major || mask;  // of the threads that fit
  const int num_senders = wide || half || problem.shape.fp8 ? 0 : 50;
  for (const bool is_long : list_lengths(problem, plan.dispatch_blocks)) {
    const int threads = half ? 480 : is_long ? (wide || problem.shape.fp8 ? 608 : 736) : wide ? 736 : 992;
    plan.dispatch.push_back({Kernel::DISPATCH,
                             threads,
                             rank_major && !mask && !is_long ? 2 : 1,
                             {{"kWords", is_long ? 2 : 1}, {"kMarkBatch", 2}, {"kSenders", num_senders}}});
  }
  for (const bool is_double : rank_major ? list_lengths(problem, plan.combine_blocks) : std::vector<bool>{true}) {
    const int threads = is_double || mask ? 480 : wide ? 608 : 992;
    plan.combine.push_back(
        {Kernel::COMBINE, threads, 1, {{"kWords", is_double ? 2 : 1}, {"kGather", is_double ? 4 : 2}}});
  }
}

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::Unsupported, text); }

void check_supported(const Problem& problem, const DeviceFacts& facts) {
  const std::string capability = std::to_string(facts.major) + "." + std::to_string(facts.minor);
  if (facts.major < 8) refuse("device: compute capability " + capability + ", the CUDA backend needs 8.0 or newer");
  if (problem.shape.fp8 && facts.major * 10 + facts.minor < 89) {
    const bool mx = problem.config.quant.format == DispatchDataType::MXFP8;
    refuse(std::string("quant.format = ") + (mx ? "MXFP8" : "FP8_E4M3") +
           ": needs compute capability 8.9 or newer, the device has " + capability);
  }
  if (problem.num_ranks > kMaxGpuRanks) {
    refuse("num_ranks = " + std::to_string(problem.num_ranks) + ": the CUDA backend takes at most " +
           std::to_string(kMaxGpuRanks));
  }
}

int choose_blocks(const char* field, int asked, const DeviceFacts& facts) {
  if (facts.num_sms == 0) return asked;
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
  plan.dispatch_blocks = choose_blocks("num_blocks of dispatch", problem.config.dispatch_num_blocks, facts);
  plan.combine_blocks = choose_blocks("num_blocks of combine", problem.config.combine_num_blocks, facts);
  // A kernel that waits for its predecessor holds its place: with several ranks on a device it could keep a peer's out.
  plan.dependent_launch = facts.major >= 9 && facts.num_ranks_here == 1;
  // Few blocks leave the other SMs to a GEMM, whose clusters need both SMs of a pair: so these take whole pairs.
  plan.most_paired_blocks = plan.dependent_launch && facts.major <= 10 ? kMostPairedBlocks : 0;
  const bool rank_major = problem.config.output_layout == DispatchLayout::RANK_MAJOR;
  plan.dispatch_shared_bytes = dispatch_shared_bytes(problem.shape, rank_major);
  if (plan.dispatch_shared_bytes + kStaticSharedBytes > facts.max_shared_bytes) {
    refuse("num_experts = " + std::to_string(problem.shape.num_experts) +
           " with max_tokens_per_rank = " + std::to_string(problem.shape.max_tokens_per_rank) + ": routing needs " +
           std::to_string(plan.dispatch_shared_bytes + kStaticSharedBytes) +
           " bytes of shared memory, the device has " + std::to_string(facts.max_shared_bytes));
  }
  // A warp for each part of an own token's row, as if it were BF16.
  plan.small_work_tokens =
      plan.dispatch_blocks * (kSmallWorkThreads / 32) / parts_of_row(2 * problem.shape.hidden_size);
  choose_variants(plan, problem, facts,
                  plan.dispatch_blocks == 0 || problem.shape.max_tokens_per_rank > plan.small_work_tokens);
  plan.phases = {Phase::WHOLE};
  if (problem.config.two_phase) plan.phases.insert(plan.phases.end(), {Phase::SEND, Phase::RECEIVE});
  plan.by_blocks = problem.config.block_overlap;
  return plan;
}

const char* name(Kernel kernel) { return kernel == Kernel::DISPATCH ? "dispatch" : "combine"; }

std::string CudaPlan::to_string() const {
  std::string text = "cuda plan: " + architecture + ", blocks " + std::to_string(dispatch_blocks) + " and " +
                     std::to_string(combine_blocks);
  const auto add_threads = [&](std::size_t which) {
    text += ", threads " + std::to_string(dispatch[which].num_threads) + " and " +
            std::to_string(combine[which].num_threads);
  };
  add_threads(0);
  if (dispatch.size() > 1) {
    text += " up to " + std::to_string(small_work_tokens) + " tokens";
    add_threads(1);
  }
  if (phases.size() > 1) text += ", also in two phases";
  if (by_blocks) text += ", combine also by blocks";
  return text + ", shared " + std::to_string(dispatch_shared_bytes) + " B, dependent launch " +
         (dependent_launch ? "on" : "off");
}

std::string program_source(const Problem& problem, const Variant& variant) {
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
  number("kNumLogicalExperts", problem.num_logical_experts);
  flag("kPlaced", !problem.physical_of_logical.empty());
  number("kNumTopk", shape.num_topk);
  number("kNumRanks", shape.num_ranks);
  number("kMaxTokens", shape.max_tokens_per_rank);
  number("kMaxLocalExperts", shape.max_local_experts);
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
  number("kScaleBlock", shape.scale_block);
  flag("kColumnScales", config.quant.scale_layout == ScaleLayout::COLUMN);
  number("kInvalidId", config.invalid_token_expert_id);
  flag("kValidate", config.validate);
  flag("kMask", shape.mask);
  number("kPhase", static_cast<int>(variant.phase));
  flag("kByBlocks", variant.by_blocks);
  number("kNumThreads", variant.num_threads);
  number("kBlocksPerSm", variant.blocks_per_sm);
  for (const auto& [constant, value] : variant.tuning) number(constant, value);
  return text + "}\n#include \"" + name(variant.kernel) + ".cuh\"\n";
}

std::vector<Variant> programs(const CudaPlan& plan) {
  std::vector<Variant> all;
  for (const Phase phase : plan.phases) {
    for (const auto* variants : {&plan.dispatch, &plan.combine}) {
      for (const Variant& variant : *variants) all.emplace_back(variant).phase = phase;
    }
    if (!plan.by_blocks || phase == Phase::RECEIVE) continue;  // a receive reads no expert rows
    for (const Variant& variant : plan.combine) {
      all.emplace_back(variant).phase = phase;
      all.back().by_blocks = true;
    }
  }
  return all;
}

std::vector<std::string> program_sources(const Problem& problem, const CudaPlan& plan) {
  std::vector<std::string> sources;
  for (const Variant& variant : programs(plan)) sources.push_back(program_source(problem, variant));
  return sources;
}

}  // namespace expertwire::cuda
