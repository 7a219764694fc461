// The plan of the CUDA backend is a pure function of the problem and the device: which programs there are, what each is
// compiled for, and what is refused.
#include <algorithm>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include "backend/cuda/cuda_plan.hpp"
#include "core/config.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;
using cuda::CudaPlan;
using cuda::DeviceFacts;
using cuda::make_cuda_plan;

constexpr int kHidden = 7168, kPartsOfRow = 29;

RuntimeConfig make_config(int max_tokens) {
  RuntimeConfig config;
  config.num_experts = 16;
  config.hidden_size = kHidden;
  config.num_topk = 4;
  config.max_tokens_per_rank = max_tokens;
  config.device.type = DeviceType::CUDA;
  return config;
}

Problem make_cuda_problem(int max_tokens) { return make_problem(make_config(max_tokens), 0, 2); }

DeviceFacts make_device(int num_sms, int num_ranks_here = 1) { return {9, 0, num_sms, 200'000, num_ranks_here}; }

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("kernels for many tokens are there where they occur") {
  const int most = make_cuda_plan(make_cuda_problem(1), make_device(132)).small_work_tokens;
  REQUIRE_EQ(most, 132 * 8 / kPartsOfRow);  // a warp for each piece of 256 elements and for the row's facts
  for (const int num_ranks_here : {1, 4}) {
    const int few = most / num_ranks_here;
    const DeviceFacts device = make_device(132, num_ranks_here);
    const CudaPlan small = make_cuda_plan(make_cuda_problem(few), device);
    REQUIRE_EQ(small.small_work_tokens, few);
    REQUIRE_EQ(small.dispatch.size(), 1U);
    REQUIRE_EQ(small.combine.size(), 1U);
    const CudaPlan large = make_cuda_plan(make_cuda_problem(few + 1), device);
    REQUIRE_EQ(large.dispatch.size(), 2U);
    REQUIRE_EQ(large.combine.size(), 2U);
  }
}

TEST_CASE("nothing is left out for an unknown device") {
  const auto num_dispatches = [](int max_tokens) {
    return make_cuda_plan(make_cuda_problem(max_tokens), make_device(0)).dispatch.size();
  };
  REQUIRE_EQ(num_dispatches(1), 2U);  // warps never have more than two parts
  REQUIRE_EQ(num_dispatches(3), 3U);
  // What a communicator asks for has been compiled ahead of time.
  for (const DispatchLayout layout : {DispatchLayout::EXPERT_MAJOR, DispatchLayout::RANK_MAJOR}) {
    RuntimeConfig config = make_config(100);
    config.output_layout = layout;
    const Problem problem = make_problem(config, 0, 2);
    const auto ahead = program_sources(problem, make_cuda_plan(problem, make_device(0)));
    for (const int num_sms : {1, 8, 32, 132}) {
      for (const std::string& source : program_sources(problem, make_cuda_plan(problem, make_device(num_sms))))
        REQUIRE(std::find(ahead.begin(), ahead.end(), source) != ahead.end());
    }
  }
}

TEST_CASE("warps with many parts each move two words at once") {
  const auto words = [](const CudaPlan& plan) {
    const auto of = [](const cuda::Variant& variant) {
      for (const auto& [name, value] : variant.tuning)
        if (std::string(name) == "kWords") return value;
      return 0;
    };
    return std::pair(of(plan.dispatch.back()), of(plan.combine.back()));
  };
  RuntimeConfig config = make_config(128);
  const auto words_with = [&](int num_blocks) {
    config.dispatch_num_blocks = config.combine_num_blocks = num_blocks;
    return words(make_cuda_plan(make_problem(config, 0, 2), make_device(132)));
  };
  const int most = 128 * kPartsOfRow / (2 * 31);  // blocks
  REQUIRE(words_with(most) == std::pair(2, 2));   // expert rows are gathered two words at once always
  REQUIRE(words_with(most + 1) == std::pair(1, 2));
  config.output_layout = DispatchLayout::RANK_MAJOR;
  REQUIRE(words_with(most) == std::pair(2, 2));
  REQUIRE(words_with(most + 1) == std::pair(1, 1));
  config.max_tokens_per_rank = 512;
  REQUIRE(words_with(132) == std::pair(2, 2));
}

TEST_CASE("a program is one kernel with its constants") {
  const Problem problem = make_cuda_problem(100);
  const CudaPlan plan = make_cuda_plan(problem, make_device(132));
  for (const auto* variants : {&plan.dispatch, &plan.combine}) {
    for (const cuda::Variant& variant : *variants) {
      const bool is_dispatch = variant.kernel == cuda::Kernel::DISPATCH;
      const std::string source = program_source(problem, variant);
      REQUIRE_EQ(has(source, "#include \"dispatch.cuh\""), is_dispatch);
      REQUIRE_EQ(has(source, "#include \"combine.cuh\""), !is_dispatch);
      REQUIRE_EQ(has(source, "kMarkBatch"), is_dispatch);
      REQUIRE_EQ(has(source, "kGather"), !is_dispatch);
      REQUIRE_MESSAGE(has(source, "kNumThreads = " + std::to_string(variant.num_threads) + ";"), source);
      REQUIRE_MESSAGE(has(source, "kHiddenSize = 7168;"), source);
      REQUIRE_MESSAGE(has(source, "kFirstExpert[] = {0, 8, 16}"), source);
    }
  }
}

TEST_CASE("combines by blocks are there where they are asked for") {
  RuntimeConfig config = make_config(100);
  const auto plan_of = [&] { return make_cuda_plan(make_problem(config, 0, 2), make_device(132)); };
  const auto count = [&] {
    std::size_t found = 0;
    for (const cuda::Variant& variant : programs(plan_of())) {
      const bool by_blocks = has(program_source(make_problem(config, 0, 2), variant), "kByBlocks = true;");
      REQUIRE_EQ(by_blocks, variant.by_blocks);
      REQUIRE((!by_blocks || variant.kernel == cuda::Kernel::COMBINE));  // dispatch makes no difference
      REQUIRE((!by_blocks || variant.phase != cuda::Phase::RECEIVE));    // a receive reads no expert rows
      found += by_blocks ? 1 : 0;
    }
    return found;
  };
  REQUIRE_EQ(count(), 0U);
  config.block_overlap = true;
  REQUIRE_EQ(count(), plan_of().combine.size());
  config.two_phase = true;
  REQUIRE_EQ(count(), 2 * plan_of().combine.size());
  REQUIRE_MESSAGE(has(plan_of().to_string(), "combine also by blocks"), plan_of().to_string());
}

TEST_CASE("grids fit the share of the device") {
  RuntimeConfig config = make_config(8);
  const auto plan_of = [&](int num_ranks_here) {
    return make_cuda_plan(make_problem(config, 0, 2), make_device(132, num_ranks_here));
  };
  REQUIRE_EQ(plan_of(1).dispatch_blocks, 132);
  REQUIRE_EQ(plan_of(4).combine_blocks, 33);
  REQUIRE(plan_of(1).dependent_launch);
  REQUIRE(!plan_of(2).dependent_launch);  // or a waiting kernel would keep a peer out
  REQUIRE(plan_of(1).most_paired_blocks > 0);
  REQUIRE_EQ(plan_of(2).most_paired_blocks, 0);  // nor is a peer's block kept out by half a pair
  config.dispatch_num_blocks = 34;
  REQUIRE_EQ(plan_of(1).dispatch_blocks, 34);
  check_throws(ErrorCode::InvalidArgument, "num_blocks of dispatch = 34: at most 33 on 132 SMs shared by 4 ranks",
               [&] { plan_of(4); });
}

TEST_CASE("what a device cannot do is refused") {
  const Problem problem = make_cuda_problem(8);
  check_throws(ErrorCode::Unsupported, "compute capability 7.5",
               [&] { make_cuda_plan(problem, {7, 5, 80, 200'000, 1}); });
  check_throws(ErrorCode::Unsupported, "bytes of shared memory, the device has 100",
               [&] { make_cuda_plan(problem, {9, 0, 132, 100, 1}); });
  RuntimeConfig fp8 = make_config(8);
  fp8.quant.format = DispatchDataType::FP8_E4M3;
  check_throws(ErrorCode::Unsupported, "needs compute capability 8.9",
               [&] { make_cuda_plan(make_problem(fp8, 0, 2), {8, 0, 108, 200'000, 1}); });
}

TEST_CASE("a plan prints as one line") {
  for (const int max_tokens : {1, 1000}) {
    const CudaPlan plan = make_cuda_plan(make_cuda_problem(max_tokens), make_device(132));
    const std::string text = plan.to_string();
    CAPTURE(text);
    REQUIRE(!has(text, "\n"));
    REQUIRE(has(text, "sm_90"));
    REQUIRE(has(text, "blocks 132 and 132"));
    REQUIRE_EQ(has(text, "up to " + std::to_string(plan.small_work_tokens) + " tokens"), max_tokens == 1000);
  }
}

}  // namespace
