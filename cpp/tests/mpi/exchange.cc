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

// What an attempt to make a group said; it must be refused, where MPI itself would end the program.
std::string refusal(MPI_Comm comm) {
  try {
    make_mpi_bootstrap(comm);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::InvalidArgument) return error.what();
  }
  return "not refused";
}

std::string check_refusal(MPI_Comm comm, const std::string& part) {
  const std::string text = refusal(comm);
  return text.find(part) == std::string::npos ? "wanted a refusal with '" + part + "', got: " + text : "";
}

// Every process is a group of its own on one side, and knows its neighbour's on the other.
std::string check_intercommunicator() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm alone = MPI_COMM_NULL, both = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank, 0, &alone);
  MPI_Intercomm_create(alone, 0, MPI_COMM_WORLD, 1 - rank, 0, &both);
  std::string wrong = check_refusal(both, "comm is an intercommunicator");
  MPI_Comm_free(&both);
  MPI_Comm_free(&alone);
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  std::string wrong = check_refusal(MPI_COMM_WORLD, "must be between MPI_Init and MPI_Finalize");
  MPI_Init(&argc, &argv);
  std::shared_ptr<Bootstrap> outlives;
  try {
    outlives = make_mpi_bootstrap();
    wrong += exchange(outlives);
  } catch (const Error& error) {
    wrong += error.what();
  }
  wrong += check_refusal(MPI_COMM_NULL, "comm is MPI_COMM_NULL");
  wrong += check_intercommunicator();
  MPI_Finalize();
  wrong += check_refusal(MPI_COMM_WORLD, "must be between MPI_Init and MPI_Finalize");
  try {
    outlives->barrier();
    wrong += "a collective after MPI_Finalize was not refused";
  } catch (const Error&) {
  }
  if (!wrong.empty()) std::cerr << wrong << '\n';
  return wrong.empty() ? 0 : 1;
}
