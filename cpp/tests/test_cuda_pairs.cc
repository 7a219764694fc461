// Pairs on GPUs at the sizes of models, held against the benchmark's reference, and the time of a captured pair.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "bench/inputs.hpp"
#include "bench/ranks.hpp"
#include "bench/report.hpp"
#include "device_test.hpp"

namespace expertwire::test {
namespace {

using bench::Options;

// On two GPUs or more a GPU for each rank, else two ranks that share one.
Options on_this_machine(const std::string& arguments) {
  std::istringstream words("--backend cuda --timeout 20 " + arguments);
  Options options = bench::parse_options({std::istream_iterator<std::string>(words), {}});
  options.num_ranks = std::clamp(num_devices(), 2, 8);
  if (num_devices() == 1) options.dispatch_num_blocks = options.combine_num_blocks = shared_blocks(options.num_ranks);
  return options;
}

bench::Result measured(const Options& options) {
  bench::Result result;
  result.options = options;
  const std::vector<bench::RankInput> inputs = bench::make_inputs(options);
  result.ranks = bench::measure_by_threads(options, inputs);
  return result;
}

void pairs(const std::string& way) {
  for (const char* shape : {"-e 256 -t 3 -d 7168 -k 8", "-e 64 -t 300 -d 1024 -k 6", "-e 896 -t 64 -d 3584 -k 16"}) {
    measured(on_this_machine(std::string(shape) + " -w 2 -i 5 --no-cuda-graph " + way));
    measured(on_this_machine(std::string(shape) + " -w 2 -i 2 --iters-per-graph 3 " + way));
  }
}

TEST_CASE("expert-major BF16 local reduce") { pairs("--layout expert-major --combine-mode rank-local-reduce"); }
TEST_CASE("expert-major BF16 direct send") { pairs("--layout expert-major --combine-mode direct-send"); }
TEST_CASE("expert-major FP8 local reduce") {
  pairs("--layout expert-major --combine-mode rank-local-reduce --dispatch-dtype fp8-e4m3");
}
TEST_CASE("expert-major FP8 direct send") {
  pairs("--layout expert-major --combine-mode direct-send --dispatch-dtype fp8-e4m3");
}
TEST_CASE("rank-major BF16 local reduce") { pairs("--layout rank-major --combine-mode rank-local-reduce"); }
TEST_CASE("rank-major BF16 direct send") { pairs("--layout rank-major --combine-mode direct-send"); }

// The shape that MSCCL++ EP quotes: 51.08 us expert-major and 40.95 us rank-major, on 8 GPUs.
void captured_pair(const std::string& layout) {
  const bench::Result result =
      measured(on_this_machine("-t 32 -d 7168 -e 8 -k 8 -w 20 -i 100 --iters-per-graph 50 --layout " + layout));
  const bench::Figures pair = bench::summarize(result, "pair");
  std::printf("T 32 H 7168 E 8 K 8, %s, %d ranks on %d GPUs: %.2f us per captured pair (min %.2f, p99 %.2f)\n",
              layout.c_str(), result.options.num_ranks, std::min(num_devices(), result.options.num_ranks),
              pair.median_us, pair.min_us, pair.p99_us);
  std::fflush(stdout);
  REQUIRE(pair.min_us > 1.0);  // else nothing ran
}

TEST_CASE("captured pair expert-major") { captured_pair("expert-major"); }
TEST_CASE("captured pair rank-major") { captured_pair("rank-major"); }

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) { return expertwire::test::run_device_tests(argc, argv); }
