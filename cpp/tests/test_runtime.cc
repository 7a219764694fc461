// MoERuntime on the CPU backend, ranks as threads: every layout and combine mode against a brute-force sum, handles,
// lanes, refusals and lost peers. Small enough for sanitizers.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/moe_runtime.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct Input {
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  int num_tokens = 0;
};

RuntimeConfig make_config(DispatchLayout layout, CombineMode mode) {
  RuntimeConfig config;
  config.num_experts = 10;
  config.hidden_size = 136;
  config.num_topk = 3;
  config.max_tokens_per_rank = 7;
  config.experts_per_rank = {4, 0, 5, 1};
  config.output_layout = layout;
  config.combine_mode = mode;
  config.timeout_s = 20.0;
  return config;
}

Input make_input(const RuntimeConfig& config, int rank, int step) {
  std::mt19937 random(static_cast<unsigned>(rank * 1000 + step));
  Input input;
  input.num_tokens = static_cast<int>(random() % static_cast<unsigned>(config.max_tokens_per_rank + 1));
  std::vector<std::int64_t> experts(static_cast<std::size_t>(config.num_experts));
  for (std::size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<std::int64_t>(e);
  for (int token = 0; token < input.num_tokens; ++token) {
    for (int h = 0; h < config.hidden_size; ++h)
      input.x.push_back(to_bf16(static_cast<float>(random() % 2001) / 1000.0f - 1.0f));
    std::shuffle(experts.begin(), experts.end(), random);
    for (int k = 0; k < config.num_topk; ++k) {
      input.ids.push_back(random() % 5 == 0 ? -1 : experts[static_cast<std::size_t>(k)]);
      input.weights.push_back(static_cast<float>(random() % 1000) / 500.0f - 0.7f);
    }
  }
  return input;
}

int rank_of(const RuntimeConfig& config, std::int64_t expert) {
  int rank = 0;
  for (std::int64_t end = config.experts_per_rank[0]; expert >= end;
       end += config.experts_per_rank[static_cast<std::size_t>(rank)])
    ++rank;
  return rank;
}

// What expert e makes of an element: cheap, different for each expert, exact in BF16.
std::uint16_t expert_value(std::int64_t expert, std::uint16_t x) {
  return to_bf16(to_float(x) * (expert % 2 == 0 ? 2.0f : -0.5f));
}

// RANK_MAJOR rows come weighted: the caller's rounding of one selection.
std::uint16_t weighted(float weight, std::uint16_t y) { return to_bf16(weight * to_float(y)); }

std::uint16_t expected(const RuntimeConfig& config, const Input& input, int token, int h, const float* weights) {
  const bool rank_major = config.output_layout == DispatchLayout::RANK_MAJOR,
             direct = config.combine_mode == CombineMode::DIRECT_SEND;
  const auto topk = static_cast<std::size_t>(config.num_topk), first = static_cast<std::size_t>(token) * topk;
  const std::uint16_t x = input.x[static_cast<std::size_t>(token * config.hidden_size + h)];
  float total = 0.0f;
  for (int rank = 0; rank < (direct ? 1 : static_cast<int>(config.experts_per_rank.size())); ++rank) {
    float partial = 0.0f;
    bool any = false;
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t expert = input.ids[first + k];
      if (expert < 0 || (!direct && rank_of(config, expert) != rank)) continue;
      const std::uint16_t y = expert_value(expert, x);
      partial += rank_major ? to_float(weighted(weights[first + k], y)) : weights[first + k] * to_float(y);
      any = true;
    }
    if (direct) return to_bf16(partial);
    if (any) total += to_float(to_bf16(partial));
  }
  return to_bf16(total);
}

// Plays the experts: fills the combine input from the dispatch output.
void run_experts(const MoERuntime& runtime, const DispatchHandle& handle) {
  const RuntimeConfig& config = runtime.config();
  const LaneBuffers& lane = runtime.lane_buffers(handle.lane());
  const auto hidden = static_cast<std::size_t>(config.hidden_size), topk = static_cast<std::size_t>(config.num_topk);
  const auto most = static_cast<std::size_t>(config.max_tokens_per_rank),
             rows = most * static_cast<std::size_t>(runtime.num_ranks());
  const auto* tokens = static_cast<const std::uint16_t*>(lane.tokens);
  auto* out = static_cast<std::uint16_t*>(lane.combine_input);
  if (config.output_layout == DispatchLayout::EXPERT_MAJOR) {
    for (std::size_t e = 0; e < static_cast<std::size_t>(runtime.num_local_experts()); ++e) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(lane.num_tokens_per_expert[e]) * hidden; ++i) {
        out[e * rows * hidden + i] =
            expert_value(runtime.first_local_expert() + static_cast<int>(e), tokens[e * rows * hidden + i]);
      }
    }
    return;
  }
  for (std::size_t row = 0; row < rows; ++row) {
    if (static_cast<int>(row % most) >= lane.num_tokens_per_rank[row / most]) continue;
    for (std::size_t h = 0; h < hidden; ++h) {
      float sum = 0.0f;
      for (std::size_t k = 0; k < topk; ++k) {
        if (lane.topk_ids[row * topk + k] < 0) continue;
        const std::uint16_t y = weighted(lane.weights[row * topk + k],
                                         expert_value(lane.topk_ids[row * topk + k], tokens[row * hidden + h]));
        if (config.combine_mode == CombineMode::DIRECT_SEND) out[(row * topk + k) * hidden + h] = y;
        sum += to_float(y);
      }
      if (config.combine_mode == CombineMode::RANK_LOCAL_REDUCE) out[row * hidden + h] = to_bf16(sum);
    }
  }
}

LatencyDispatchRequest dispatch_request(const Input& input) {
  LatencyDispatchRequest request;
  request.x = input.x.data();
  request.topk_ids = input.ids.data();
  request.weights = input.weights.data();
  request.num_tokens = input.num_tokens;
  return request;
}

void combine_and_check(MoERuntime& runtime, const DispatchHandle& handle, const Input& input,
                       const float* new_weights = nullptr) {
  const RuntimeConfig& config = runtime.config();
  std::vector<std::uint16_t> out(static_cast<std::size_t>(input.num_tokens * config.hidden_size + 8), 0xABCD);
  LatencyCombineRequest request;
  request.expert_output = runtime.lane_buffers(handle.lane()).combine_input;
  request.handle = handle;
  request.weights = new_weights;
  request.out = out.data();
  request.num_tokens = input.num_tokens;
  runtime.combine(request);
  for (int token = 0; token < input.num_tokens; ++token) {
    for (int h = 0; h < config.hidden_size; ++h) {
      REQUIRE_EQ(out[static_cast<std::size_t>(token * config.hidden_size + h)],
                 expected(config, input, token, h, new_weights != nullptr ? new_weights : input.weights.data()));
    }
  }
  REQUIRE(std::all_of(out.end() - 8, out.end(),
                      [](std::uint16_t value) { return value == 0xABCD; }));  // combine wrote beyond its output
}

void run_group(const RuntimeConfig& config, const std::function<void(MoERuntime&)>& body) {
  const auto bootstraps = make_local_bootstraps(static_cast<int>(config.experts_per_rank.size()), 20.0);
  run_ranks(static_cast<int>(config.experts_per_rank.size()), [&](int rank) {
    MoERuntime runtime(bootstraps[static_cast<std::size_t>(rank)], config);
    body(runtime);
  });
}

void pairs(DispatchLayout layout, CombineMode mode) {
  run_group(make_config(layout, mode), [](MoERuntime& runtime) {
    for (int step = 0; step < 20; ++step) {
      const Input input = make_input(runtime.config(), runtime.rank(), step);
      const DispatchHandle handle = runtime.dispatch(dispatch_request(input));
      run_experts(runtime, handle);
      combine_and_check(runtime, handle, input);
    }
    REQUIRE_EQ(runtime.stats().dispatch_calls, std::uint64_t{20});
  });
}

TEST_CASE("expert-major local reduce") { pairs(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE); }
TEST_CASE("expert-major direct send") { pairs(DispatchLayout::EXPERT_MAJOR, CombineMode::DIRECT_SEND); }
TEST_CASE("rank-major local reduce") { pairs(DispatchLayout::RANK_MAJOR, CombineMode::RANK_LOCAL_REDUCE); }
TEST_CASE("rank-major direct send") { pairs(DispatchLayout::RANK_MAJOR, CombineMode::DIRECT_SEND); }

TEST_CASE("weights given at combine") {
  for (const CombineMode mode : {CombineMode::RANK_LOCAL_REDUCE, CombineMode::DIRECT_SEND}) {
    run_group(make_config(DispatchLayout::EXPERT_MAJOR, mode), [](MoERuntime& runtime) {
      for (int step = 0; step < 10; ++step) {
        const Input input = make_input(runtime.config(), runtime.rank(), step);
        const DispatchHandle handle = runtime.dispatch(dispatch_request(input));
        run_experts(runtime, handle);
        const std::vector<float> others(input.weights.rbegin(), input.weights.rend());
        combine_and_check(runtime, handle, input, (step + runtime.rank()) % 2 == 0 ? others.data() : nullptr);
        combine_and_check(runtime, handle, input);
      }
    });
  }
}

TEST_CASE("two lanes") {
  RuntimeConfig config = make_config(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE);
  config.max_in_flight = 2;
  run_group(config, [](MoERuntime& runtime) {
    DispatchHandle old;
    for (int step = 0; step < 10; ++step) {
      const Input a = make_input(runtime.config(), runtime.rank(), 2 * step),
                  b = make_input(runtime.config(), runtime.rank(), 2 * step + 1);
      const DispatchHandle first = runtime.dispatch(dispatch_request(a)),
                           second = runtime.dispatch(dispatch_request(b));
      run_experts(runtime, first);
      run_experts(runtime, second);
      combine_and_check(runtime, first, a);
      combine_and_check(runtime, second, b);
      if (!old.empty()) {
        LatencyCombineRequest request;
        request.handle = old;
        check_throws(ErrorCode::InvalidHandle, "stale", [&] { runtime.combine(request); });
      }
      old = first;
    }
  });
}

TEST_CASE("quantised rows") {
  RuntimeConfig config = make_config(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE);
  config.hidden_size = 256;
  config.quant.format = DispatchDataType::FP8_E4M3;
  config.quant.scale_layout = ScaleLayout::COLUMN;
  run_group(config, [](MoERuntime& runtime) {
    Input input = make_input(runtime.config(), runtime.rank(), 3);
    std::fill(input.x.begin(), input.x.end(), to_bf16(2.0f));  // amax 2: scale 2 / 448, every element 448
    const DispatchHandle handle = runtime.dispatch(dispatch_request(input));
    const LaneBuffers& lane = runtime.lane_buffers(handle.lane());
    const std::size_t rows = 4 * 7;
    for (std::size_t e = 0; e < static_cast<std::size_t>(runtime.num_local_experts()); ++e) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(lane.num_tokens_per_expert[e]); ++i) {
        const auto* row = static_cast<const std::uint8_t*>(lane.tokens) + (e * rows + i) * 256;
        REQUIRE(std::all_of(row, row + 256,
                            [](std::uint8_t q) { return q == 0x7E; }));  // every element is the largest E4M3
        for (std::size_t s = 0; s < 2; ++s)
          REQUIRE_EQ(static_cast<const float*>(lane.scales)[(e * 2 + s) * rows + i], 2.0f / 448.0f);
      }
    }
  });
}

TEST_CASE("refusals consume no epoch") {
  run_group(make_config(DispatchLayout::RANK_MAJOR, CombineMode::RANK_LOCAL_REDUCE), [](MoERuntime& runtime) {
    for (int step = 0; step < 6; ++step) {
      Input input = make_input(runtime.config(), runtime.rank(), step);
      if (step % 4 == runtime.rank()) {
        LatencyDispatchRequest bad = dispatch_request(input);
        bad.num_tokens = 8;
        check_throws(ErrorCode::InvalidArgument, "max_tokens_per_rank = 7", [&] { runtime.dispatch(bad); });
        if (input.num_tokens > 0) {
          const std::int64_t good = input.ids[2];
          input.ids[2] = 10;
          check_throws(ErrorCode::InvalidArgument, "topk_ids[0, 2] = 10",
                       [&] { runtime.dispatch(dispatch_request(input)); });
          input.ids[2] = good;
        }
        check_throws(ErrorCode::Unsupported, "Throughput", [&] { runtime.dispatch(ThroughputDispatchRequest{}); });
        check_throws(ErrorCode::InvalidHandle, "empty", [&] { runtime.combine(LatencyCombineRequest{}); });
      }
      const DispatchHandle handle = runtime.dispatch(dispatch_request(input));
      run_experts(runtime, handle);
      combine_and_check(runtime, handle, input);
    }
  });
}

TEST_CASE("configurations must agree") {
  const auto bootstraps = make_local_bootstraps(2, 20.0);
  run_ranks(2, [&](int rank) {
    RuntimeConfig config = make_config(DispatchLayout::RANK_MAJOR, CombineMode::RANK_LOCAL_REDUCE);
    config.experts_per_rank.clear();
    config.hidden_size = rank == 0 ? 128 : 256;
    check_throws(ErrorCode::InvalidArgument, "hidden_size is 128 on rank 0; 256 on rank 1",
                 [&] { MoERuntime runtime(bootstraps[static_cast<std::size_t>(rank)], config); });
    config.hidden_size = 128;
    config.mode = rank == 0 ? MoEMode::LATENCY : MoEMode::THROUGHPUT;
    check_throws(rank == 0 ? ErrorCode::InvalidArgument : ErrorCode::Unsupported, "THROUGHPUT",
                 [&] { MoERuntime runtime(bootstraps[static_cast<std::size_t>(rank)], config); });
  });
}

void a_rank_that_closes_is_noticed(PeerLossPolicy policy) {
  RuntimeConfig config = make_config(DispatchLayout::EXPERT_MAJOR, CombineMode::DIRECT_SEND);
  config.on_peer_loss = policy;
  run_group(config, [&](MoERuntime& runtime) {
    const Input input = make_input(runtime.config(), runtime.rank(), 1);
    if (runtime.rank() == 2) {
      runtime.dispatch(dispatch_request(input));
      runtime.close();
      check_throws(ErrorCode::InvalidArgument, "closed", [&] { runtime.dispatch(dispatch_request(input)); });
      return;
    }
    const DispatchHandle handle = runtime.dispatch(dispatch_request(input));
    run_experts(runtime, handle);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(input.num_tokens * config.hidden_size + 1), 0);
    LatencyCombineRequest request;
    request.expert_output = runtime.combine_input_buffer();
    request.handle = handle;
    request.out = out.data();
    request.num_tokens = input.num_tokens;
    if (policy == PeerLossPolicy::RAISE) {
      const Error error = check_throws(ErrorCode::PeerLost, "rank 2 closed", [&] { runtime.combine(request); });
      REQUIRE(error.ranks() == std::vector<int>{2});
      check_throws(ErrorCode::PeerLost, "has ended", [&] { runtime.dispatch(dispatch_request(input)); });
      REQUIRE(!runtime.is_available());
      return;
    }
    runtime.combine(request);
    REQUIRE(runtime.lost_ranks() == std::vector<int>{2});
    runtime.dispatch(dispatch_request(input));
  });
}

TEST_CASE("a closed rank raises") { a_rank_that_closes_is_noticed(PeerLossPolicy::RAISE); }
TEST_CASE("a closed rank is masked") { a_rank_that_closes_is_noticed(PeerLossPolicy::MASK); }

TEST_CASE("a slow rank times out") {
  RuntimeConfig config = make_config(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE);
  config.timeout_s = 0.3;
  std::atomic<int> waiting{3};
  run_group(config, [&](MoERuntime& runtime) {
    const Input input = make_input(runtime.config(), runtime.rank(), 1);
    if (runtime.rank() == 1) {
      while (waiting.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      check_throws(ErrorCode::PeerLost, "given up by its peers", [&] { runtime.dispatch(dispatch_request(input)); });
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    check_throws(ErrorCode::PeerLost, "rank 1", [&] { runtime.dispatch(dispatch_request(input)); });
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    --waiting;
    REQUIRE_LE(waited.count(), config.timeout_s + 1.0);
  });
}

// One rank stays away after dispatch. The others lose it and nobody else, though it used up the time of their first wait.
TEST_CASE("a slow rank is masked alone") {
  RuntimeConfig config = make_config(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE);
  config.experts_per_rank = {4, 2, 3, 1};
  config.timeout_s = 0.4;
  config.on_peer_loss = PeerLossPolicy::MASK;
  std::atomic<int> going{3};
  run_group(config, [&](MoERuntime& runtime) {
    const Input input = make_input(runtime.config(), runtime.rank(), 1);
    LatencyCombineRequest request;
    request.handle = runtime.dispatch(dispatch_request(input));
    run_experts(runtime, request.handle);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(input.num_tokens * config.hidden_size + 1), 0);
    request.expert_output = runtime.combine_input_buffer();
    request.out = out.data();
    request.num_tokens = input.num_tokens;
    if (runtime.rank() == 3) {
      while (going.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      check_throws(ErrorCode::PeerLost, "given up by its peers", [&] { runtime.combine(request); });
      return;
    }
    runtime.combine(request);
    --going;
    REQUIRE(runtime.lost_ranks() == std::vector<int>{3});
  });
}

}  // namespace
