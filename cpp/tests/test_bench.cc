// The benchmark program's parts: options, inputs, figures; and that it measures nothing wrong.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "bench/formats.hpp"
#include "bench/inputs.hpp"
#include "bench/options.hpp"
#include "bench/ranks.hpp"
#include "bench/report.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using bench::Options;

Options parsed(const std::string& arguments) {
  std::istringstream words(arguments);
  return bench::parse_options({std::istream_iterator<std::string>(words), {}});
}

TEST_CASE("options are read") {
  const Options options = parsed(
      "-e 16 --tokens=9 -d 256 -k 3 --ranks 3 --layout RANK_MAJOR --combine-mode direct-send --dispatch-dtype fp8-e4m3 "
      "-w 0 -i 7 --rounds 3 --seed 5 --timeout 2.5");
  REQUIRE_EQ(options.num_experts, 16);
  REQUIRE_EQ(options.num_tokens, 9);
  REQUIRE(options.layout == DispatchLayout::RANK_MAJOR);
  REQUIRE(options.combine_mode == CombineMode::DIRECT_SEND);
  REQUIRE(options.dispatch_dtype == DispatchDataType::FP8_E4M3);
  REQUIRE(options.config().experts_per_rank == std::vector<int>{6, 5, 5});
  REQUIRE(options.parts() == std::vector<int>{3, 2, 2});
  REQUIRE(parsed("--backend cuda").cuda_graph);                   // on CUDA a graph is replayed
  REQUIRE(!parsed("--backend cuda --no-cuda-graph").cuda_graph);  // unless refused
  const Options blocks = parsed("--backend cuda --num-blocks 20,30");
  REQUIRE(blocks.dispatch_num_blocks == 20);
  REQUIRE(blocks.combine_num_blocks == 30);
}

// What a usage error says; nothing if there is none.
std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const bench::UsageError& error) {
    return error.what();
  }
  return {};
}

TEST_CASE("options are refused") {
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
  for (const auto& one : wrong) {
    const std::string text = refusal([&] { parsed(one.first); });
    REQUIRE_MESSAGE(text.find(one.second) != std::string::npos, one.first, ": ", text, " does not say: ", one.second);
    REQUIRE(text.find('\n') == std::string::npos);
  }
}

TEST_CASE("formats round to nearest even") {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = bench::from_e4m3(static_cast<std::uint8_t>(bits));
    REQUIRE_EQ(static_cast<int>(bench::to_e4m3(value)), bits);  // NaN keeps its sign here
  }
  REQUIRE_EQ(static_cast<int>(bench::to_e4m3(1.0625f)), 0x38);  // halfway from 1 to 1.125, 1 is even
  REQUIRE_EQ(static_cast<int>(bench::to_e4m3(1.1875f)), 0x3A);  // halfway from 1.125 to 1.25
  REQUIRE_EQ(static_cast<int>(bench::to_e4m3(0x1p-10f)), 0);    // half of the smallest
  REQUIRE_EQ(static_cast<int>(bench::to_e4m3(1e9f)), 0x7E);
  REQUIRE_EQ(static_cast<int>(bench::to_bf16(1.00390625f)), 0x3F80);
  REQUIRE_EQ(static_cast<int>(bench::to_bf16(1.01171875f)), 0x3F82);
}

TEST_CASE("inputs are the same every time") {
  const Options options = parsed("-e 12 -t 20 -d 16 -k 5 --ranks 2");
  const auto first = bench::make_inputs(options), second = bench::make_inputs(options);
  REQUIRE(first[1].x == second[1].x);
  REQUIRE(first[1].topk_ids == second[1].topk_ids);
  REQUIRE(first[0].x != first[1].x);
  std::vector<int> chosen(12);
  for (std::size_t token = 0; token < 20; ++token) {
    for (std::size_t k = 0; k < 5; ++k) {
      const std::int64_t expert = first[0].topk_ids[token * 5 + k];
      ++chosen.at(static_cast<std::size_t>(expert));
      for (std::size_t other = 0; other < k; ++other) REQUIRE(first[0].topk_ids[token * 5 + other] != expert);
    }
  }
  for (const int count : chosen) REQUIRE(count > 0);  // of 100 draws
}

TEST_CASE("inputs come from files") {
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
  REQUIRE(got.x == wanted.x);
  REQUIRE(got.topk_ids == wanted.topk_ids);
  REQUIRE(got.weights == wanted.weights);
  from_files.num_tokens = 2;
  const std::string text = refusal([&] { bench::make_inputs(from_files); });
  REQUIRE_MESSAGE(text.find("has 48 bytes, this shape needs 32") != std::string::npos, text);
  std::filesystem::remove_all(folder);
}

// Also holds the library's sums against the reference's, which the stored cases do not.
TEST_CASE("every way is right") {
  for (const char* layout : {"expert-major", "rank-major"}) {
    for (const char* mode : {"rank-local-reduce", "direct-send"}) {
      for (const char* payload : {"bf16", "fp8-e4m3", "mxfp8"}) {
        const Options options = parsed(std::string("-e 13 -t 9 -d 384 -k 4 -w 1 -i 4 --ranks 3 --layout ") + layout +
                                       " --combine-mode " + mode + " --dispatch-dtype " + payload);
        const auto times = bench::measure_by_threads(options, bench::make_inputs(options));
        REQUIRE_EQ(times.size(), std::size_t{3});
        for (const bench::RankTimes& rank : times) {
          REQUIRE_EQ(rank.at("pair").size(), std::size_t{4});
          for (std::size_t i = 0; i < 4; ++i) {
            const std::int64_t dispatch = rank.at("dispatch")[i], combine = rank.at("combine")[i];
            REQUIRE(dispatch > 0);
            REQUIRE(dispatch + combine <= rank.at("pair")[i]);
          }
        }
      }
    }
  }
}

// Rank 1 brings other tokens than rank 0 expects of it: one bit of each differs.
TEST_CASE("wrong results are not timed") {
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

TEST_CASE("figures are of the slowest rank") {
  bench::Result result;
  result.options = parsed("-i 4 --rounds 2");
  result.bytes_per_rank = 12e6;
  result.ranks.resize(2);
  result.ranks[0]["pair"] = {1000, 9000, 3000, 4000};
  result.ranks[1]["pair"] = {2000, 1000, 8000, 1000};
  const bench::Figures figures = bench::summarize(result, "pair");
  REQUIRE_EQ(figures.min_us, 2.0);
  REQUIRE_EQ(figures.median_us, 6.0);
  REQUIRE_EQ(figures.p99_us, 9.0);
  REQUIRE_EQ(figures.max_us, 9.0);
  REQUIRE_EQ(figures.fastest_rank_us, 1.0);
  REQUIRE_EQ(figures.gb_per_s, 4000.0);
  REQUIRE(std::abs(figures.spread - 0.5 / 6.0) < 1e-12);
  REQUIRE(bench::phases_of(result) == std::vector<std::string>{"pair"});  // a phase without samples has no row
}

}  // namespace
}  // namespace expertwire::test
