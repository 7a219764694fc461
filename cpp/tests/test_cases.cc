// The stored cases on the CPU backend, ranks as threads: bit for bit what the Python reference says. mpi/cases.cc does the
// same by processes of mpirun.
#include <vector>

#include <doctest/doctest.h>

#include "bench/place.hpp"
#include "bench/reference.hpp"
#include "stored_case.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

// Were a kind of case to go missing from the files, nothing else would notice.
TEST_CASE("every kind is there") {
  const auto some = [](const auto& is_kind) {
    int count = 0;
    for (const StoredCase& stored : stored_cases()) count += is_kind(stored) ? 1 : 0;
    return count > 0;
  };
  for (const DispatchLayout layout : {DispatchLayout::EXPERT_MAJOR, DispatchLayout::RANK_MAJOR}) {
    for (const CombineMode mode : {CombineMode::RANK_LOCAL_REDUCE, CombineMode::DIRECT_SEND}) {
      for (const DispatchDataType format : {DispatchDataType::BF16, DispatchDataType::FP8_E4M3}) {
        CAPTURE(layout);
        CAPTURE(mode);
        CAPTURE(format);
        REQUIRE(some([&](const StoredCase& stored) {
          return stored.config.output_layout == layout && stored.config.combine_mode == mode &&
                 stored.config.quant.format == format;
        }));
      }
      REQUIRE(some([&](const StoredCase& stored) {
        return stored.num_ranks == 8 && stored.config.output_layout == layout && stored.config.combine_mode == mode;
      }));
    }
  }
  REQUIRE(some([](const StoredCase& stored) { return stored.name.starts_with("ids-empty-experts"); }));
  REQUIRE(some([](const StoredCase& stored) { return stored.name.starts_with("ids-zipf"); }));
  REQUIRE(some([](const StoredCase& stored) { return !stored.config.placement.empty(); }));
  REQUIRE(some([](const StoredCase& stored) { return stored.config.quant.format == DispatchDataType::MXFP8; }));
}

TEST_CASE("differences are seen") {
  StoredArray wanted{"bfloat16", {2}, {}};
  wanted.bytes = as_bytes(std::vector<std::uint16_t>{0x3F80, 0x7FC0});
  const auto from = [&](const std::vector<std::uint16_t>& got) { return difference(as_bytes(got), wanted); };
  REQUIRE_EQ(from({0x3F80, 0xFFFF}), "");                   // NaN is NaN
  REQUIRE_EQ(from({0x3F81, 0x7FC0}), "element 0 differs");  // another bit
  REQUIRE_EQ(from({0x3F80, 0x7F80}), "element 1 differs");  // Inf is no NaN
  REQUIRE_EQ(from({0x3F80}), "2 bytes, wanted 4");
}

TEST_CASE("every case by threads") {
  for (const StoredCase& stored : stored_cases()) {
    const auto bootstraps = make_local_bootstraps(stored.num_ranks, 60.0);
    run_ranks(stored.num_ranks, [&](int rank) {
      const auto place = bench::make_place({DeviceType::CPU, 0});
      run_case(bootstraps[static_cast<std::size_t>(rank)], stored, *place);
    });
  }
}

bool reference_knows(const StoredCase& stored) {
  const QuantConfig& quant = stored.config.quant;
  bool known = !quant.round_scale_pow2 && quant.scale_format == ScaleFormat::FLOAT32 && stored.config.placement.empty();
  for (int rank = 0; rank < stored.num_ranks; ++rank) {
    known = known && stored.find(rank, "weights") != nullptr && stored.find(rank, "block_scales") == nullptr &&
            stored.get(rank, "topk_ids").dtype == "int64";
  }
  return known;
}

template <typename T>
std::vector<T> values_of(const StoredArray& array) {
  const auto* first = reinterpret_cast<const T*>(array.bytes.data());
  return {first, first + array.bytes.size() / sizeof(T)};
}

// The benchmark holds the library against a reference of its own: here against the Python one. Its sums are held against
// the library's in test_bench.cc.
TEST_CASE("the reference of the benchmark") {
  int num_checked = 0;
  for (const StoredCase& stored : stored_cases()) {
    if (!reference_knows(stored)) continue;
    std::vector<bench::RankInput> inputs;
    for (int rank = 0; rank < stored.num_ranks; ++rank) {
      inputs.push_back({values_of<std::uint16_t>(stored.get(rank, "x")),
                        values_of<std::int64_t>(stored.get(rank, "topk_ids")),
                        values_of<float>(stored.get(rank, "weights"))});
    }
    const bench::Reference reference(stored.config, inputs);
    for (int rank = 0; rank < stored.num_ranks; ++rank) {
      const bench::Received received = reference.received(rank);
      check_same(stored.name + ": tokens", received.tokens, stored.get(rank, "tokens"));
      if (!received.scales.empty()) check_same(stored.name + ": scales", received.scales, stored.get(rank, "scales"));
      if (stored.config.output_layout == DispatchLayout::RANK_MAJOR) {
        check_same(stored.name + ": ids", as_bytes(received.topk_ids), stored.get(rank, "received_ids"));
        check_same(stored.name + ": weights", as_bytes(received.weights), stored.get(rank, "received_weights"));
      } else {
        check_same(stored.name + ": source_token", as_bytes(received.source_token), stored.get(rank, "source_token"));
        check_same(stored.name + ": rank_ranges", as_bytes(received.rank_ranges), stored.get(rank, "rank_ranges"));
      }
    }
    ++num_checked;
  }
  REQUIRE(num_checked >= 20);
}

}  // namespace
}  // namespace expertwire::test
