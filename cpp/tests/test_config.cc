// What a configuration is held against: every field, against itself, the others and the number of ranks.
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/config.hpp"
#include "core/plan.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

constexpr int kNumRanks = 4;

RuntimeConfig valid() {
  RuntimeConfig config;
  config.num_experts = 8;
  config.hidden_size = 128;
  config.num_topk = 2;
  config.max_tokens_per_rank = 16;
  return config;
}

struct Refusal {
  std::function<void(RuntimeConfig&)> change;
  std::string text;
  ErrorCode code = ErrorCode::InvalidArgument;
};

void check_refusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& one : refusals) {
    RuntimeConfig config = valid();
    one.change(config);
    check_throws(one.code, one.text, [&] { make_problem(config, 1, kNumRanks); });
  }
}

template <typename Enum>
Refusal out_of_range(Enum RuntimeConfig::* field, int number, const std::string& text) {
  return {[=](RuntimeConfig& config) { config.*field = static_cast<Enum>(number); }, text};
}

TEST_CASE("sizes") {
  constexpr int kHuge = std::numeric_limits<int>::max();
  check_refusals({
      {[](auto& c) { c.num_experts = 0; }, "num_experts = 0: must be between 1 and"},
      {[](auto& c) { c.num_experts = -8; }, "num_experts = -8"},
      {[](auto& c) { c.num_experts = kHuge; }, "num_experts = 2147483647"},
      {[](auto& c) { c.hidden_size = 0; }, "hidden_size = 0"},
      {[](auto& c) { c.hidden_size = -128; }, "hidden_size = -128"},
      {[](auto& c) { c.hidden_size = kHuge; }, "hidden_size = 2147483647"},
      {[](auto& c) { c.hidden_size = 132; }, "hidden_size = 132: must be a multiple of 8 for BF16 rows"},
      {[](auto& c) { c.num_topk = 0; }, "num_topk = 0"},
      {[](auto& c) { c.num_topk = 9; }, "num_topk = 9: must be between 1 and min(num_experts, 32) = 8"},
      {[](auto& c) { c.num_experts = 64, c.num_topk = 33; }, "num_topk = 33: must be between 1 and"},
      {[](auto& c) { c.max_tokens_per_rank = 0; }, "max_tokens_per_rank = 0"},
      {[](auto& c) { c.max_tokens_per_rank = kHuge; }, "max_tokens_per_rank = 2147483647"},
      {[](auto& c) { c.max_tokens_per_rank = 1 << 28; }, "experts per rank * num_ranks * max_tokens_per_rank"},
      {[](auto& c) { c.max_in_flight = 0; }, "max_in_flight = 0: must be between 1 and 64"},
      {[](auto& c) { c.max_in_flight = 65; }, "max_in_flight = 65"},
      {[](auto& c) { c.dispatch_num_blocks = -1; }, "dispatch_num_blocks = -1"},
      {[](auto& c) { c.combine_num_blocks = kHuge; }, "combine_num_blocks = 2147483647"},
      {[](auto& c) { c.invalid_token_expert_id = 7; }, "invalid_token_expert_id = 7: must lie outside [0, num_experts"},
      {[](auto& c) { c.timeout_s = 0.0; }, "timeout_s = 0"},
      {[](auto& c) { c.timeout_s = std::numeric_limits<double>::quiet_NaN(); }, "timeout_s = "},
      {[](auto& c) { c.timeout_s = std::numeric_limits<double>::infinity(); }, "timeout_s = inf"},
      {[](auto& c) { c.device.index = 1; }, "device.index = 1: must be between 0 and 0"},
      {[](auto& c) { c.device = {DeviceType::CUDA, -1}; }, "device.index = -1"},
      {[](auto& c) {
         c.output_layout = DispatchLayout::RANK_MAJOR;
         c.num_experts = 64, c.num_topk = 32, c.hidden_size = 1 << 20, c.max_tokens_per_rank = 1 << 28;
       },
       "num_ranks * max_tokens_per_rank * num_topk * hidden_size"},
  });
  check_throws(ErrorCode::InvalidArgument, "num_ranks = 0", [] { make_problem(valid(), 0, 0); });
  check_throws(ErrorCode::InvalidArgument, "num_ranks = 1025", [] { make_problem(valid(), 0, 1025); });
  check_throws(ErrorCode::InvalidArgument, "rank = 4: must be between 0 and num_ranks - 1 = 3",
               [] { make_problem(valid(), 4, kNumRanks); });
  check_throws(ErrorCode::InvalidArgument, "rank = -1", [] { make_problem(valid(), -1, kNumRanks); });
}

// A C++ caller can cast any number to an enum.
TEST_CASE("numbers that name nothing") {
  check_refusals({
      out_of_range(&RuntimeConfig::mode, 2, "mode = 2: must be one of LATENCY THROUGHPUT"),
      out_of_range(&RuntimeConfig::mode, -1, "mode = -1"),
      out_of_range(&RuntimeConfig::output_layout, 3, "output_layout = 3: must be one of EXPERT_MAJOR RANK_MAJOR"),
      out_of_range(&RuntimeConfig::combine_mode, 99, "combine_mode = 99: must be one of RANK_LOCAL_REDUCE DIRECT_SEND"),
      out_of_range(&RuntimeConfig::on_peer_loss, 2, "on_peer_loss = 2: must be one of RAISE MASK"),
      {[](auto& c) { c.quant.format = static_cast<DispatchDataType>(3); }, "quant.format = 3: must be one of BF16"},
      {[](auto& c) { c.quant.scale_format = static_cast<ScaleFormat>(7); }, "quant.scale_format = 7"},
      {[](auto& c) { c.quant.scale_layout = static_cast<ScaleLayout>(-5); }, "quant.scale_layout = -5"},
      {[](auto& c) { c.device.type = static_cast<DeviceType>(2); }, "device.type = 2: must be one of CPU CUDA"},
  });
}

TEST_CASE("formats") {
  check_refusals({
      {[](auto& c) { c.mode = MoEMode::THROUGHPUT; }, "mode = THROUGHPUT", ErrorCode::Unsupported},
      {[](auto& c) { c.output_layout = DispatchLayout::TOKEN_MAJOR; }, "TOKEN_MAJOR", ErrorCode::Unsupported},
      {[](auto& c) { c.hidden_size = 136, c.quant.format = DispatchDataType::FP8_E4M3; },
       "hidden_size = 136: must be a multiple of 128 for FP8_E4M3 rows"},
      {[](auto& c) { c.hidden_size = 160, c.quant.format = DispatchDataType::MXFP8; },
       "hidden_size = 160: must be a multiple of 128 for MXFP8 rows"},
  });
  RuntimeConfig config = valid();
  config.quant.format = DispatchDataType::MXFP8;
  const Problem problem = make_problem(config, 0, kNumRanks);
  REQUIRE(problem.config.quant.scale_format == ScaleFormat::UE8M0);
  REQUIRE(problem.config.quant.round_scale_pow2);  // which MXFP8 implies
  REQUIRE_EQ(num_scales(problem.shape), 1);
}

TEST_CASE("experts of each rank") {
  const std::string needed = "needs 4 counts >= 0, one for each rank, that sum to num_experts = 8";
  check_refusals({
      {[](auto& c) { c.num_experts = 10; }, "num_experts = 10: is not divisible by the 4 ranks"},
      {[](auto& c) { c.experts_per_rank = {4, 4}; }, "experts_per_rank = [4, 4]: " + needed},
      {[](auto& c) { c.experts_per_rank = {8, 0, 0, 0, 0}; }, needed},
      {[](auto& c) { c.experts_per_rank = {9, 0, 0, -1}; }, "experts_per_rank = [9, 0, 0, -1]: " + needed},
      {[](auto& c) { c.experts_per_rank = {1, 2, 3, 4}; }, needed},
      {[](auto& c) { c.experts_per_rank = {std::numeric_limits<int>::max(), std::numeric_limits<int>::max(), 10, 0}; },
       needed},
  });
  RuntimeConfig config = valid();
  config.experts_per_rank = {3, 0, 5, 0};
  const Problem problem = make_problem(config, 2, kNumRanks);
  REQUIRE_EQ(problem.first_local_expert, 3);
  REQUIRE_EQ(problem.num_local_experts, 5);
}

// The largest of everything that is allowed: byte counts must not wrap around.
TEST_CASE("largest sizes") {
  RuntimeConfig config;
  config.num_experts = 32 * 1024;
  config.hidden_size = 1 << 20;
  config.num_topk = 32;
  config.max_tokens_per_rank = 1 << 19;
  config.max_in_flight = 64;
  config.output_layout = DispatchLayout::RANK_MAJOR;
  config.combine_mode = CombineMode::DIRECT_SEND;
  const Plan largest = plan(make_problem(config, 0, 1024), this_machine());
  const double rows = 1024.0 * (1 << 19) * 32, bytes = rows * 2 * (1 << 20) * 64;
  REQUIRE(static_cast<double>(largest.memory.shared) >= bytes * 2);
  REQUIRE(static_cast<double>(largest.memory.outputs) >= bytes);
}

TEST_CASE("logical experts") {
  check_refusals({
      {[](auto& c) { c.placement = {0, 1, 2}; }, "placement has 3 entries: must be one logical expert, or -1 for none"},
      {[](auto& c) { c.placement = {0, 1, 2, 3, 4, 5, 6, 8}; }, "placement[7] = 8: must be one logical expert"},
      {[](auto& c) { c.placement = {0, 1, 2, -2, 4, 5, 6, 7}; }, "placement[3] = -2"},
      {[](auto& c) { c.placement = {0, 1, 2, 2, 4, 5, 6, 7}; }, "holds logical expert 7 but not 3"},
      {[](auto& c) { c.placement.assign(8, -1); }, "placement holds no expert"},
      {[](auto& c) { c.placement.assign(8, 0); },
       "num_topk = 2: must be between 1 and the logical experts of placement"},
  });
  RuntimeConfig config = valid();
  config.experts_per_rank = {3, 0, 4, 1};
  config.placement = {0, 0, 1, 2, -1, 1, 2, 2};
  const std::vector<std::vector<i32>> wanted = {{0, 2, 3}, {0, 2, 6}, {1, 5, 3}, {0, 5, 7}};
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const Problem problem = make_problem(config, rank, kNumRanks);
    REQUIRE_EQ(problem.num_logical_experts, 3);
    REQUIRE_MESSAGE(problem.physical_of_logical == wanted[static_cast<std::size_t>(rank)], "rank ", rank,
                    " chooses other copies");
  }
  REQUIRE_EQ(make_problem(valid(), 0, kNumRanks).num_logical_experts, 8);
  REQUIRE(make_problem(valid(), 0, kNumRanks).physical_of_logical.empty());
}

}  // namespace
