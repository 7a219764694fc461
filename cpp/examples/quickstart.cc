// Four ranks, as threads of this process, send five tokens each to the experts that these choose, and get back what the
// experts make of them. Expert e multiplies by e + 1, so the answer is known and is checked.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <expertwire/moe_runtime.hpp>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 4, kExperts = 8, kHidden = 64, kTopk = 2, kMaxTokens = 16, kTokens = 5;

std::uint16_t to_bf16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }
float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// The experts of this rank: from the rows that dispatch received to the rows that combine takes.
void run_experts(const expertwire::MoERuntime& runtime, const expertwire::LaneBuffers& lane) {
  constexpr std::size_t kExpertElements = std::size_t{kRanks} * kMaxTokens * kHidden;
  for (int local = 0; local < runtime.num_local_experts(); ++local) {
    const std::size_t first = static_cast<std::size_t>(local) * kExpertElements;
    const auto* in = static_cast<const std::uint16_t*>(lane.tokens) + first;
    auto* out = static_cast<std::uint16_t*>(lane.combine_input) + first;
    const float factor = static_cast<float>(runtime.first_local_expert() + local + 1);
    const auto num_elements = static_cast<std::size_t>(lane.num_tokens_per_expert[local]) * kHidden;
    for (std::size_t i = 0; i < num_elements; ++i) out[i] = to_bf16(factor * to_float(in[i]));
  }
}

// One rank's part. The number of elements that came back wrong.
int run_rank(const std::shared_ptr<expertwire::Bootstrap>& bootstrap) {
  expertwire::RuntimeConfig config;
  config.num_experts = kExperts;
  config.hidden_size = kHidden;
  config.num_topk = kTopk;
  config.max_tokens_per_rank = kMaxTokens;
  expertwire::MoERuntime runtime(bootstrap, config);  // every rank makes its own

  std::vector<std::uint16_t> x(kTokens * kHidden), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = to_bf16(static_cast<float>(i % 15) - 7.0f);
  std::vector<std::int64_t> topk_ids;
  for (int token = 0; token < kTokens; ++token)
    topk_ids.insert(topk_ids.end(), {token, (token + runtime.rank() + 1) % kExperts});
  const std::vector<float> weights(topk_ids.size(), 0.5f);

  expertwire::LatencyDispatchRequest dispatch;
  dispatch.x = x.data();
  dispatch.topk_ids = topk_ids.data();
  dispatch.weights = weights.data();
  dispatch.num_tokens = kTokens;
  const expertwire::DispatchHandle handle = runtime.dispatch(dispatch);

  const expertwire::LaneBuffers& lane = runtime.lane_buffers(handle.lane());
  run_experts(runtime, lane);

  expertwire::LatencyCombineRequest combine;
  combine.expert_output = lane.combine_input;
  combine.handle = handle;
  combine.out = y.data();
  combine.num_tokens = kTokens;
  runtime.combine(combine);

  int num_wrong = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t token = i / kHidden;
    const auto factors = static_cast<float>(topk_ids[2 * token] + 1 + topk_ids[2 * token + 1] + 1);
    num_wrong += to_float(y[i]) != 0.5f * factors * to_float(x[i]);
  }
  return num_wrong;
}

}  // namespace

int main() {
  const auto bootstraps = expertwire::make_local_bootstraps(kRanks);
  std::vector<int> num_wrong(kRanks, -1);  // -1: an error
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        num_wrong[rank] = run_rank(bootstraps[rank]);
      } catch (const expertwire::Error& error) {
        std::cerr << error.what() << '\n';
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; rank < kRanks; ++rank)
    std::cout << "rank " << rank << ": " << num_wrong[rank] << " elements wrong\n";
  return num_wrong == std::vector<int>(kRanks, 0) ? 0 : 1;
}
