// A runtime over MPI, from end to end: mpirun -n 2 mpi_exchange. Without MPI it is compiled against stub/mpi.h, not linked.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/error.hpp"
#include "expertwire/moe_runtime.hpp"
#include "expertwire/mpi_bootstrap.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

constexpr int kHidden = 8;
constexpr int kTokens = 2;

void exchange(const std::shared_ptr<Bootstrap>& group) {
  const int rank = group->rank(), size = group->size();
  const std::vector<std::string> words = group->all_gather(std::string(static_cast<std::size_t>(rank), 'x'));
  for (int peer = 0; peer < size; ++peer) {
    REQUIRE_EQ(words[static_cast<std::size_t>(peer)].size(), static_cast<std::size_t>(peer));
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
  REQUIRE(combined == std::vector<std::uint16_t>(kTokens * kHidden, 0x4000));  // 2.0
}

// An attempt to make a group must be refused, where MPI itself would end the program.
void check_refusal(MPI_Comm comm, const char* part) {
  check_throws(ErrorCode::InvalidArgument, part, [&] { make_mpi_bootstrap(comm); });
}

// Every process is a group of its own on one side, and knows its neighbour's on the other.
void check_intercommunicator() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm alone = MPI_COMM_NULL, both = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank, 0, &alone);
  MPI_Intercomm_create(alone, 0, MPI_COMM_WORLD, 1 - rank, 0, &both);
  check_refusal(both, "comm is an intercommunicator");
  MPI_Comm_free(&both);
  MPI_Comm_free(&alone);
}

TEST_CASE("a group serves between MPI_Init and MPI_Finalize") {
  check_refusal(MPI_COMM_WORLD, "must be between MPI_Init and MPI_Finalize");
  MPI_Init(nullptr, nullptr);
  const std::shared_ptr<Bootstrap> outlives = make_mpi_bootstrap();
  exchange(outlives);
  check_refusal(MPI_COMM_NULL, "comm is MPI_COMM_NULL");
  check_intercommunicator();
  MPI_Finalize();
  check_refusal(MPI_COMM_WORLD, "must be between MPI_Init and MPI_Finalize");
  REQUIRE_THROWS_AS(outlives->barrier(), Error);
}

}  // namespace

int main(int argc, char** argv) {
  const int status = run_test_cases(argc, argv);
  int begun = 0, ended = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  if (status != 0 && begun != 0 && ended == 0) MPI_Abort(MPI_COMM_WORLD, status);  // others may wait for this one
  return status;
}
