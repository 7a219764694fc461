// Two ranks, as threads of this process, send their tokens to four experts that return what they are given. With weights
// 0.5 and 0.25 every token comes back as 0.75 of itself, which is checked: exit status 0 if all of them do.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "expertwire/moe_runtime.hpp"

namespace {

using expertwire::MoERuntime;

constexpr int kNumRanks = 2;
constexpr int kNumTokens = 5;

std::uint16_t to_bf16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }
float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

expertwire::RuntimeConfig make_config() {
  expertwire::RuntimeConfig config;
  config.num_experts = 4;
  config.hidden_size = 64;
  config.num_topk = 2;
  config.max_tokens_per_rank = 8;
  config.timeout_s = 20.0;
  return config;
}

// Copies the rows of this rank's experts from the output of dispatch to the input of combine.
void run_identity_experts(const MoERuntime& runtime, int lane) {
  const expertwire::LaneBuffers& buffers = runtime.lane_buffers(lane);
  const expertwire::RuntimeConfig& config = runtime.config();
  const std::size_t row_bytes = static_cast<std::size_t>(config.hidden_size) * 2;
  const std::size_t expert_bytes = static_cast<std::size_t>(kNumRanks * config.max_tokens_per_rank) * row_bytes;
  for (int expert = 0; expert < runtime.num_local_experts(); ++expert) {
    const std::size_t first = static_cast<std::size_t>(expert) * expert_bytes;
    std::memcpy(static_cast<std::byte*>(buffers.combine_input) + first,
                static_cast<const std::byte*>(buffers.tokens) + first,
                static_cast<std::size_t>(buffers.num_tokens_per_expert[expert]) * row_bytes);
  }
}

// The number of elements that came back wrong.
int exchange(MoERuntime& runtime) {
  const auto num_elements = static_cast<std::size_t>(kNumTokens * runtime.config().hidden_size);
  std::vector<std::uint16_t> x(num_elements), out(num_elements);
  for (std::size_t i = 0; i < num_elements; ++i) x[i] = to_bf16(static_cast<float>(i % 15) - 7.0f);
  std::vector<std::int64_t> topk_ids;
  std::vector<float> weights;
  for (int token = 0; token < kNumTokens; ++token) {
    topk_ids.insert(topk_ids.end(), {token % 4, (token + 1 + runtime.rank()) % 4});
    weights.insert(weights.end(), {0.5f, 0.25f});
  }

  expertwire::LatencyDispatchRequest send;
  send.x = x.data();
  send.topk_ids = topk_ids.data();
  send.weights = weights.data();
  send.num_tokens = kNumTokens;
  const expertwire::DispatchHandle handle = runtime.dispatch(send);
  run_identity_experts(runtime, handle.lane());
  expertwire::LatencyCombineRequest collect;
  collect.expert_output = runtime.combine_input_buffer();
  collect.handle = handle;
  collect.out = out.data();
  collect.num_tokens = kNumTokens;
  runtime.combine(collect);

  int num_wrong = 0;
  for (std::size_t i = 0; i < num_elements; ++i) num_wrong += to_float(out[i]) != 0.75f * to_float(x[i]);
  return num_wrong;
}

}  // namespace

int main() {
  const auto bootstraps = expertwire::make_local_bootstraps(kNumRanks);
  std::vector<int> num_wrong(kNumRanks, -1);  // -1: an error
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        MoERuntime runtime(bootstraps[rank], make_config());
        num_wrong[rank] = exchange(runtime);
      } catch (const expertwire::Error& error) {
        std::cerr << error.what() << '\n';
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; rank < kNumRanks; ++rank)
    std::cout << "rank " << rank << ": " << num_wrong[rank] << " wrong elements\n";
  return num_wrong == std::vector<int>(kNumRanks, 0) ? 0 : 1;
}
