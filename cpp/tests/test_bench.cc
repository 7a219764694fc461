// The benchmark program's parts: options, inputs, figures; and that it measures nothing wrong.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "bench/formats.hpp"
#include "bench/inputs.hpp"
#include "bench/options.hpp"
#include "bench/ranks.hpp"
#include "bench/report.hpp"
#include "check.hpp"

namespace expertwire::test {
namespace {

using bench::Options;

Options parsed(const std::string& arguments) {
  std::istringstream words(arguments);
  return bench::parse_options({std::istream_iterator<std::string>(words), {}});
}

void options_are_read() {
  const Options options = parsed(
      "-e 16 --tokens=9 -d 256 -k 3 --ranks 3 --layout RANK_MAJOR --combine-mode direct-send --dispatch-dtype fp8-e4m3 "
      "-w 0 -i 7 --rounds 3 --seed 5 --timeout 2.5");
  check_equal(options.num_experts, 16);
  check_equal(options.num_tokens, 9);
  check(options.layout == DispatchLayout::RANK_MAJOR, "layout");
  check(options.combine_mode == CombineMode::DIRECT_SEND, "combine mode");
  check(options.dispatch_dtype == DispatchDataType::FP8_E4M3, "payload");
  check(options.config().experts_per_rank == std::vector<int>{6, 5, 5}, "placement");
  check(options.parts() == std::vector<int>{3, 2, 2}, "rounds");
  check(parsed("--backend cuda").cuda_graph, "on CUDA a graph is replayed");
  check(!parsed("--backend cuda --no-cuda-graph").cuda_graph, "unless refused");
  const Options blocks = parsed("--backend cuda --num-blocks 20,30");
  check(blocks.dispatch_num_blocks == 20 && blocks.combine_num_blocks == 30, "blocks");
}

void options_are_refused() {
  const std::vector<std::pair<const char*, const char*>> wrong{
      {"-e 0", "-e 0: must be a whole number from 1"},
      {"-t 1,2", "-t 1,2: must be a whole number"},
      {"-k", "-k: needs a value"},
      {"--layout token-major", "--layout token-major: must be among expert-major, rank-major"},
      {"--routing zipf:1", "--routing zipf:1: must be uniform"},
      {"--num-blocks 3", "--num-blocks 3: needs --backend cuda"},
      {"--cuda-graph", "need --backend cuda"},
      {"--backend cuda --no-cuda-graph --iters-per-graph 3", "--iters-per-graph 3: needs --backend cuda and a graph"},
      {"--mpi --ranks 3", "--ranks 3: not with --mpi"},
      {"--timeout 0", "--timeout 0: must be a number above 0"},
      {"--timeout nan", "--timeout nan: must be a number above 0"},
      {"--help=1", "--help: takes no value"},
      {"--nosuch", "'--nosuch' is no option"}};
  for (const auto& [arguments, part] : wrong) {
    try {
      parsed(arguments);
    } catch (const bench::UsageError& error) {
      const std::string text = error.what();
      check(text.find(part) != std::string::npos, text + " does not say: " + part);
      check(text.find('\n') == std::string::npos, "more than one line");
      continue;
    }
    check(false, std::string(arguments) + " was taken");
  }
}

void formats_round_to_nearest_even() {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = bench::from_e4m3(static_cast<std::uint8_t>(bits));
    check_equal(static_cast<int>(bench::to_e4m3(value)), bits);  // NaN keeps its sign here
  }
  check_equal(static_cast<int>(bench::to_e4m3(1.0625f)), 0x38);  // halfway from 1 to 1.125, 1 is even
  check_equal(static_cast<int>(bench::to_e4m3(1.1875f)), 0x3A);  // halfway from 1.125 to 1.25
  check_equal(static_cast<int>(bench::to_e4m3(0x1p-10f)), 0);    // half of the smallest
  check_equal(static_cast<int>(bench::to_e4m3(1e9f)), 0x7E);
  check_equal(static_cast<int>(bench::to_bf16(1.00390625f)), 0x3F80);
  check_equal(static_cast<int>(bench::to_bf16(1.01171875f)), 0x3F82);
}

void inputs_are_the_same_every_time() {
  const Options options = parsed("-e 12 -t 20 -d 16 -k 5 --ranks 2");
  const auto first = bench::make_inputs(options), second = bench::make_inputs(options);
  check(first[1].x == second[1].x && first[1].topk_ids == second[1].topk_ids, "drawn anew");
  check(first[0].x != first[1].x, "ranks bring the same");
  std::vector<int> chosen(12);
  for (std::size_t token = 0; token < 20; ++token) {
    for (std::size_t k = 0; k < 5; ++k) {
      const std::int64_t expert = first[0].topk_ids[token * 5 + k];
      ++chosen.at(static_cast<std::size_t>(expert));
      for (std::size_t other = 0; other < k; ++other)
        check(first[0].topk_ids[token * 5 + other] != expert, "an expert twice in a token");
    }
  }
  for (const int count : chosen) check(count > 0, "uniform routing leaves an expert out of 100 draws");
}

void inputs_come_from_files() {
  const Options drawn = parsed("-e 4 -t 3 -d 8 -k 2 --ranks 1");
  const bench::RankInput wanted = bench::make_inputs(drawn).front();
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("expertwire-bench-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const auto write = [&](const char* name, const auto& values) {
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof values[0]));
  };
  write("0.x", wanted.x);
  write("0.topk_ids", wanted.topk_ids);
  write("0.weights", wanted.weights);
  Options from_files = drawn;
  from_files.inputs = folder;
  const bench::RankInput got = bench::make_inputs(from_files).front();
  check(got.x == wanted.x && got.topk_ids == wanted.topk_ids && got.weights == wanted.weights, "not what was written");
  from_files.num_tokens = 2;
  try {
    bench::make_inputs(from_files);
    check(false, "files of another shape were taken");
  } catch (const bench::UsageError& error) {
    check(std::string(error.what()).find("has 48 bytes, this shape needs 32") != std::string::npos, error.what());
  }
  std::filesystem::remove_all(folder);
}

// Also holds the library's sums against the reference's, which the stored cases do not.
void every_way_is_right() {
  for (const char* layout : {"expert-major", "rank-major"}) {
    for (const char* mode : {"rank-local-reduce", "direct-send"}) {
      for (const char* payload : {"bf16", "fp8-e4m3"}) {
        const Options options = parsed(std::string("-e 13 -t 9 -d 384 -k 4 -w 1 -i 4 --ranks 3 --layout ") + layout +
                                       " --combine-mode " + mode + " --dispatch-dtype " + payload);
        const auto times = bench::measure_by_threads(options, bench::make_inputs(options));
        check_equal(times.size(), std::size_t{3});
        for (const bench::RankTimes& rank : times) {
          check_equal(rank.at("pair").size(), std::size_t{4});
          for (std::size_t i = 0; i < 4; ++i) {
            const std::int64_t dispatch = rank.at("dispatch")[i], combine = rank.at("combine")[i];
            check(dispatch > 0 && dispatch + combine <= rank.at("pair")[i], "times do not add up");
          }
        }
      }
    }
  }
}

// Rank 1 brings other tokens than rank 0 expects of it: one bit of each differs.
void wrong_results_are_not_timed() {
  Options options = parsed("-e 6 -t 4 -d 64 -k 2 -w 0 -i 1 --timeout 10");
  const auto right = bench::make_inputs(options);
  auto wrong = right;
  for (std::size_t token = 0; token < 4; ++token) wrong[1].x[token * 64 + 5] ^= 1;
  const auto bootstraps = make_local_bootstraps(2, 30.0);
  run_ranks(2, [&](int rank) {
    check_throws(ErrorCode::Backend, "rank 0: wrong result: tokens differs at element", [&] {
      bench::measure(bootstraps[static_cast<std::size_t>(rank)], options, rank == 0 ? right : wrong);
    });
  });
}

void figures_are_of_the_slowest_rank() {
  bench::Result result;
  result.options = parsed("-i 4 --rounds 2");
  result.bytes_per_rank = 12e6;
  result.ranks.resize(2);
  result.ranks[0]["pair"] = {1000, 9000, 3000, 4000};
  result.ranks[1]["pair"] = {2000, 1000, 8000, 1000};
  const bench::Figures figures = bench::summarize(result, "pair");
  check_equal(figures.min_us, 2.0);
  check_equal(figures.median_us, 6.0);
  check_equal(figures.p99_us, 9.0);
  check_equal(figures.max_us, 9.0);
  check_equal(figures.fastest_rank_us, 1.0);
  check_equal(figures.gb_per_s, 4000.0);
  check(std::abs(figures.spread - 0.5 / 6.0) < 1e-12, "spread");
  check(bench::phases_of(result) == std::vector<std::string>{"pair"}, "a phase without samples has no row");
}

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) {
  using namespace expertwire::test;
  return run_tests(argc, argv,
                   {{"options_are_read", options_are_read},
                    {"options_are_refused", options_are_refused},
                    {"formats_round_to_nearest_even", formats_round_to_nearest_even},
                    {"inputs_are_the_same_every_time", inputs_are_the_same_every_time},
                    {"inputs_come_from_files", inputs_come_from_files},
                    {"every_way_is_right", every_way_is_right},
                    {"wrong_results_are_not_timed", wrong_results_are_not_timed},
                    {"figures_are_of_the_slowest_rank", figures_are_of_the_slowest_rank}});
}
