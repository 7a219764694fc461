#include "layer.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "expertwire/moe_runtime.hpp"
#include "memory.hpp"

namespace {

constexpr int kExpertsPerRank = 2, kHidden = 128, kTopk = 3, kMaxTokens = 32, kSteps = 5;
constexpr std::size_t kRowBytes = std::size_t{kHidden} * 2;

std::uint16_t to_bf16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }
float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

expertwire::RuntimeConfig make_config(int num_ranks, const Memory& memory) {
  expertwire::RuntimeConfig config;
  config.num_experts = kExpertsPerRank * num_ranks;
  config.hidden_size = kHidden;
  config.num_topk = std::min(kTopk, config.num_experts);
  config.max_tokens_per_rank = kMaxTokens;
  config.device = memory.device();
  config.timeout_s = 60.0;
  return config;
}

class Layer {
 public:
  Layer(std::shared_ptr<expertwire::Bootstrap> bootstrap, Memory& memory)
      : memory_(memory),
        runtime_(bootstrap, make_config(bootstrap->size(), memory)),
        num_topk_(static_cast<std::size_t>(runtime_.config().num_topk)),
        x_(memory.allocate(kMaxTokens * kRowBytes)),
        y_(memory.allocate(kMaxTokens * kRowBytes)),
        topk_ids_(memory.allocate(kMaxTokens * num_topk_ * sizeof(std::int64_t))),
        weights_(memory.allocate(kMaxTokens * num_topk_ * sizeof(float))) {
    // On a GPU an allocation may wait for kernels, and a kernel waits for its peers: all allocations come before any.
    bootstrap->barrier();
  }

  // The number of elements that came back wrong.
  int run(int step) {
    const int num_tokens = (5 * step + 3 * runtime_.rank()) % (kMaxTokens + 1);  // also none
    const auto entries = static_cast<std::size_t>(num_tokens) * num_topk_;
    std::vector<std::uint16_t> x(static_cast<std::size_t>(num_tokens) * kHidden), y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = to_bf16(static_cast<float>(i % 7) - 3.0f);
    std::vector<std::int64_t> topk_ids(entries);
    for (std::size_t i = 0; i < entries; ++i)
      topk_ids[i] = static_cast<std::int64_t>(i + static_cast<std::size_t>(step)) % runtime_.config().num_experts;
    const std::vector<float> weights(entries, 0.5f);
    memory_.copy(x_, x.data(), x.size() * 2);
    memory_.copy(topk_ids_, topk_ids.data(), entries * sizeof(std::int64_t));
    memory_.copy(weights_, weights.data(), entries * sizeof(float));

    const expertwire::DispatchHandle handle = dispatch(num_tokens);
    run_experts(runtime_.lane_buffers(handle.lane()));
    combine(handle);
    memory_.copy(y.data(), y_, y.size() * 2);
    return count_wrong(x, topk_ids, y);
  }

 private:
  expertwire::DispatchHandle dispatch(int num_tokens) {
    expertwire::LatencyDispatchRequest request;
    request.x = x_;
    request.topk_ids = topk_ids_;
    request.weights = static_cast<const float*>(weights_);
    request.num_tokens = num_tokens;
    request.stream = memory_.stream();
    return runtime_.dispatch(request);
  }

  void combine(const expertwire::DispatchHandle& handle) {
    expertwire::LatencyCombineRequest request;
    request.expert_output = runtime_.lane_buffers(handle.lane()).combine_input;
    request.handle = handle;
    request.out = y_;
    request.num_tokens = handle.num_tokens();
    request.stream = memory_.stream();
    runtime_.combine(request);
  }

  void run_experts(const expertwire::LaneBuffers& lane) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(runtime_.num_local_experts()));
    memory_.copy(counts.data(), lane.num_tokens_per_expert, counts.size() * sizeof counts[0]);
    const std::size_t expert_bytes = static_cast<std::size_t>(runtime_.num_ranks()) * kMaxTokens * kRowBytes;
    for (std::size_t local = 0; local < counts.size(); ++local) {
      std::vector<std::uint16_t> rows(static_cast<std::size_t>(counts[local]) * kHidden);
      memory_.copy(rows.data(), static_cast<std::byte*>(lane.tokens) + local * expert_bytes, rows.size() * 2);
      const float factor = static_cast<float>(static_cast<std::size_t>(runtime_.first_local_expert()) + local + 1);
      for (std::uint16_t& element : rows) element = to_bf16(factor * to_float(element));
      memory_.copy(static_cast<std::byte*>(lane.combine_input) + local * expert_bytes, rows.data(), rows.size() * 2);
    }
  }

  int count_wrong(const std::vector<std::uint16_t>& x, const std::vector<std::int64_t>& topk_ids,
                  const std::vector<std::uint16_t>& y) const {
    int num_wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      float factors = 0.0f;
      for (std::size_t k = 0; k < num_topk_; ++k)
        factors += static_cast<float>(topk_ids[i / kHidden * num_topk_ + k] + 1);
      num_wrong += to_float(y[i]) != 0.5f * factors * to_float(x[i]);  // small numbers: exact in BF16
    }
    return num_wrong;
  }

  Memory& memory_;
  expertwire::MoERuntime runtime_;
  std::size_t num_topk_;
  void *x_, *y_, *topk_ids_, *weights_;
};

}  // namespace

int parse_num_ranks(int argc, char** argv) {
  constexpr int kMost = 64;
  const std::string_view given = argc > 1 ? argv[1] : "4";
  int num_ranks = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), num_ranks);
  const bool is_number = error == std::errc() && end == given.data() + given.size();
  if (argc <= 2 && is_number && num_ranks >= 1 && num_ranks <= kMost) return num_ranks;
  std::cerr << argv[0] << ' ' << given << ": must be one number of ranks from 1 to " << kMost << '\n';
  return 0;
}

int run_layer(std::shared_ptr<expertwire::Bootstrap> bootstrap) {
  std::ostringstream line;  // printed at once: ranks share the terminal
  line << "rank " << bootstrap->rank() << " of " << bootstrap->size();
  int num_wrong = 0;
  try {
    const std::unique_ptr<Memory> memory = make_memory(bootstrap->rank());
    Layer layer(bootstrap, *memory);
    for (int step = 0; step < kSteps; ++step) num_wrong += layer.run(step);
    const bool on_gpu = memory->device().type == expertwire::DeviceType::CUDA;
    line << (on_gpu ? " on GPU " + std::to_string(memory->device().index) : " on the CPU") << ": " << num_wrong
         << " elements wrong\n";
  } catch (const std::exception& error) {
    line << ": " << error.what() << '\n';
    num_wrong = -1;
  }
  std::cout << line.str() << std::flush;
  return num_wrong == 0 ? 0 : 1;
}
