// The stored cases on GPUs, bit for bit what the Python reference says: ranks as threads that share a GPU, spread over all
// GPUs, and with a GPU each.
#include <iostream>

#include <doctest/doctest.h>

#include "bench/place.hpp"
#include "device_test.hpp"
#include "expertwire/moe_runtime.hpp"
#include "stored_case.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

void run_on_devices(const StoredCase& stored, int devices) {
  const int sharing = (stored.num_ranks + devices - 1) / devices;
  const int num_blocks = sharing == 1 ? 0 : shared_blocks(sharing);
  const auto bootstraps = make_local_bootstraps(stored.num_ranks, 60.0);
  run_ranks(stored.num_ranks, [&](int rank) {
    const auto place = bench::make_place({DeviceType::CUDA, rank % devices});
    run_case(bootstraps[static_cast<std::size_t>(rank)], stored, *place, num_blocks);
  });
}

bool lacks_devices(int wanted, const char* what) {
  if (num_devices() >= wanted) return false;
  std::cout << "skipped: " << what << ": this machine shows " << num_devices() << " GPU" << std::endl;
  return true;
}

// What the host can see is refused on CUDA too, before anything is launched.
TEST_CASE("wrong calls are refused") {
  const auto place = bench::make_place({DeviceType::CUDA, 0});
  RuntimeConfig config;
  config.num_experts = 4;
  config.hidden_size = 128;
  config.num_topk = 2;
  config.max_tokens_per_rank = 3;
  config.device = {DeviceType::CUDA, 0};
  config.timeout_s = 20.0;
  const std::shared_ptr<Bootstrap> alone = make_local_bootstraps(1, 20.0).front();
  RuntimeConfig wrong = config;
  wrong.device.index = num_devices();
  check_throws(ErrorCode::InvalidArgument, "device = cuda:", [&] { MoERuntime(alone, wrong); });
  wrong = config;
  wrong.combine_num_blocks = 100'000;
  check_throws(ErrorCode::InvalidArgument, "num_blocks of combine = 100000: ", [&] { MoERuntime(alone, wrong); });
  MoERuntime runtime(alone, config);
  LatencyDispatchRequest dispatch;
  dispatch.num_tokens = 4;
  check_throws(ErrorCode::InvalidArgument, "max_tokens_per_rank = 3", [&] { runtime.dispatch(dispatch); });
  check_throws(ErrorCode::Unsupported, "Throughput", [&] { runtime.dispatch(ThroughputDispatchRequest{}); });
  check_throws(ErrorCode::InvalidHandle, "empty", [&] { runtime.combine(LatencyCombineRequest{}); });
  REQUIRE(runtime.is_available());
}

TEST_CASE("cases with a GPU for each rank") {
  if (lacks_devices(2, "a GPU for each rank")) return;
  int num_run = 0;
  for (const StoredCase& stored : stored_cases()) {
    if (stored.num_ranks == 1 || stored.num_ranks > num_devices()) continue;
    run_on_devices(stored, stored.num_ranks);
    ++num_run;
  }
  REQUIRE(num_run > 0);
}

TEST_CASE("cases on one GPU") {
  for (const StoredCase& stored : stored_cases()) run_on_devices(stored, 1);
}

TEST_CASE("cases over all GPUs") {
  if (lacks_devices(2, "ranks over several GPUs")) return;
  for (const StoredCase& stored : stored_cases()) {
    if (stored.num_ranks > num_devices()) run_on_devices(stored, num_devices());
  }
}

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) { return expertwire::test::run_device_tests(argc, argv); }
