// A runtime over MPI, from end to end: mpirun -n 2 mpi_exchange. Without MPI it is compiled against stub/mpi.h, not linked.
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "expertwire/error.hpp"
#include "expertwire/moe_runtime.hpp"
#include "expertwire/mpi_bootstrap.hpp"

namespace {

using namespace expertwire;

constexpr int kHidden = 8;
constexpr int kTokens = 2;

// What is wrong; nothing if all is well.
std::string exchange(const std::shared_ptr<Bootstrap>& group) {
  const int rank = group->rank(), size = group->size();
  const std::vector<std::string> words = group->all_gather(std::string(static_cast<std::size_t>(rank), 'x'));
  for (int peer = 0; peer < size; ++peer) {
    if (words[static_cast<std::size_t>(peer)].size() != static_cast<std::size_t>(peer))
      return "all_gather mixes ranks up";
  }
  RuntimeConfig config;
  config.num_experts = 2 * size;
  config.hidden_size = kHidden;
  config.num_topk = 2;
  config.max_tokens_per_rank = kTokens;
  config.timeout_s = 20.0;
  MoERuntime runtime(group, config);
  const std::vector<std::uint16_t> x(kTokens * kHidden, 0x3F80);  // 1.0
  const std::vector<std::int64_t> ids{0, 2 * size - 1, 1, 2 * size - 2};
  LatencyDispatchRequest dispatch;
  dispatch.x = x.data();
  dispatch.topk_ids = ids.data();
  dispatch.num_tokens = kTokens;
  std::vector<std::uint16_t> combined(kTokens * kHidden);
  LatencyCombineRequest combine;
  combine.handle = runtime.dispatch(dispatch);
  combine.expert_output = runtime.lane_buffers(0).tokens;
  combine.out = combined.data();
  combine.num_tokens = kTokens;
  runtime.combine(combine);
  return combined == std::vector<std::uint16_t>(kTokens * kHidden, 0x4000) ? "" : "the sum is not 2.0";
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::string wrong;
  try {
    wrong = exchange(make_mpi_bootstrap());
  } catch (const Error& error) {
    wrong = error.what();
  }
  MPI_Finalize();
  if (!wrong.empty()) std::cerr << wrong << '\n';
  return wrong.empty() ? 0 : 1;
}
