// Making a MoERuntime, through the public headers alone: what a runtime says of itself, and that what is refused is refused
// on every rank and leaves the group of use. test_config.cc goes through all fields.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/moe_runtime.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

RuntimeConfig make_config() {
  RuntimeConfig config;
  config.num_experts = 8;
  config.hidden_size = 128;
  config.num_topk = 3;
  config.max_tokens_per_rank = 4;
  config.timeout_s = 20.0;
  return config;
}

void by_threads(int num_ranks, const std::function<void(const std::shared_ptr<Bootstrap>&)>& body) {
  const auto bootstraps = make_local_bootstraps(num_ranks, 20.0);
  run_ranks(num_ranks, [&](int rank) { body(bootstraps[static_cast<std::size_t>(rank)]); });
}

TEST_CASE("a runtime describes itself") {
  RuntimeConfig config = make_config();
  config.num_experts = 9;
  config.experts_per_rank = {5, 0, 4};
  config.max_in_flight = 2;
  by_threads(3, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    const MoERuntime runtime(bootstrap, config);
    const auto rank = static_cast<std::size_t>(bootstrap->rank());
    REQUIRE_EQ(runtime.rank(), bootstrap->rank());
    REQUIRE_EQ(runtime.num_ranks(), 3);
    REQUIRE_EQ(runtime.num_local_experts(), config.experts_per_rank[rank]);
    REQUIRE_EQ(runtime.first_local_expert(), std::vector<int>{0, 5, 5}[rank]);
    REQUIRE(runtime.mode() == MoEMode::LATENCY);
    REQUIRE(runtime.is_available());
    REQUIRE_EQ(runtime.next_lane(), 0);
    REQUIRE(runtime.dispatch_output_buffer() == runtime.lane_buffers(0).tokens);
    REQUIRE(runtime.combine_input_buffer() == runtime.lane_buffers(0).combine_input);
    REQUIRE((rank == 1 ||
             runtime.lane_buffers(1).tokens != runtime.lane_buffers(0).tokens));  // rank 1 has no experts and no rows
    check_throws(ErrorCode::InvalidArgument, "lane = 2: must be between 0 and max_in_flight - 1 = 1",
                 [&] { runtime.lane_buffers(2); });
    check_throws(ErrorCode::InvalidArgument, "lane = -1", [&] { runtime.lane_buffers(-1); });
    REQUIRE(runtime.memory_bytes().shared > 0);
    REQUIRE((runtime.memory_bytes().outputs > 0) == (rank != 1));  // of the local experts
    REQUIRE(runtime.lost_ranks().empty());
    REQUIRE_EQ(runtime.stats().dispatch_calls + runtime.stats().combine_calls, std::uint64_t{0});
  });
}

TEST_CASE("only the buffers of the layout are there") {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    const MoERuntime by_expert(bootstrap, make_config());
    const LaneBuffers& experts = by_expert.lane_buffers(0);
    REQUIRE(experts.num_tokens_per_expert != nullptr);
    REQUIRE(experts.rank_ranges != nullptr);
    REQUIRE(experts.source_token != nullptr);
    REQUIRE(experts.num_tokens_per_rank == nullptr);
    REQUIRE(experts.topk_ids == nullptr);
    REQUIRE(experts.weights == nullptr);
    REQUIRE(experts.scales == nullptr);
    RuntimeConfig config = make_config();
    config.output_layout = DispatchLayout::RANK_MAJOR;
    config.quant.format = DispatchDataType::FP8_E4M3;
    const MoERuntime by_rank(bootstrap, config);
    const LaneBuffers& ranks = by_rank.lane_buffers(0);
    REQUIRE(ranks.num_tokens_per_rank != nullptr);
    REQUIRE(ranks.topk_ids != nullptr);
    REQUIRE(ranks.weights != nullptr);
    REQUIRE(ranks.scales != nullptr);
    REQUIRE(ranks.num_tokens_per_expert == nullptr);
    REQUIRE(ranks.rank_ranges == nullptr);
    REQUIRE(ranks.source_token == nullptr);
  });
}

struct Refused {
  ErrorCode code;
  const char* text;
  std::function<void(RuntimeConfig&)> spoil;
};

const std::vector<Refused> kRefused{
    {ErrorCode::InvalidArgument, "hidden_size = 100: must be a multiple of 8",
     [](RuntimeConfig& c) { c.hidden_size = 100; }},
    {ErrorCode::InvalidArgument, "num_experts = 9: is not divisible by the 2 ranks",
     [](RuntimeConfig& c) { c.num_experts = 9; }},
    {ErrorCode::InvalidArgument, "num_topk = 9", [](RuntimeConfig& c) { c.num_topk = 9; }},
    {ErrorCode::InvalidArgument, "experts_per_rank = [4, 3]", [](RuntimeConfig& c) { c.experts_per_rank = {4, 3}; }},
    {ErrorCode::InvalidArgument, "invalid_token_expert_id = 7",
     [](RuntimeConfig& c) { c.invalid_token_expert_id = 7; }},
    {ErrorCode::Unsupported, "THROUGHPUT", [](RuntimeConfig& c) { c.mode = MoEMode::THROUGHPUT; }},
    {ErrorCode::Unsupported, "TOKEN_MAJOR", [](RuntimeConfig& c) { c.output_layout = DispatchLayout::TOKEN_MAJOR; }}};

TEST_CASE("wrong configurations are refused on every rank") {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    for (const Refused& refused : kRefused) {
      RuntimeConfig config = make_config();
      refused.spoil(config);
      check_throws(refused.code, refused.text, [&] { MoERuntime(bootstrap, config); });
    }
    REQUIRE(MoERuntime(bootstrap, make_config()).is_available());  // after wrong ones, a right one
  });
}

TEST_CASE("one wrong rank is told to all") {
  by_threads(3, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    RuntimeConfig config = make_config();
    config.num_experts = 9;
    if (bootstrap->rank() == 1) config.num_topk = 40;
    check_throws(ErrorCode::InvalidArgument, "num_topk", [&] { MoERuntime(bootstrap, config); });
    if (bootstrap->rank() == 1) config.num_topk = 2;
    check_throws(ErrorCode::InvalidArgument, "num_topk", [&] { MoERuntime(bootstrap, config); });
  });
}

TEST_CASE("a bootstrap is needed") {
  check_throws(ErrorCode::InvalidArgument, "bootstrap is null", [] { MoERuntime(nullptr, make_config()); });
}

// A group of anybody's own over a right one: `spoil` changes what a collective returns, by its number, or throws.
class Strange final : public Bootstrap {
 public:
  using Spoil = std::function<void(int, std::vector<std::string>&)>;
  Strange(std::shared_ptr<Bootstrap> inner, Spoil spoil)
      : rank_of(inner->rank()), size_of(inner->size()), inner_(std::move(inner)), spoil_(std::move(spoil)) {}
  int rank() const override { return rank_of; }
  int size() const override { return size_of; }
  std::vector<std::string> all_gather(const std::string& mine) override {
    auto all = inner_->all_gather(mine);
    spoil_(num_calls++, all);
    return all;
  }
  int rank_of, size_of, num_calls = 0;

 private:
  std::shared_ptr<Bootstrap> inner_;
  Spoil spoil_;
};

// Whatever a collective returns, and at whichever step: construction ends with an error whose code exists.
TEST_CASE("wrong answers of a group are refused") {
  const std::vector<std::pair<const char*, std::function<void(std::vector<std::string>&)>>> kinds{
      {"none", [](auto& all) { all.clear(); }},
      {"too few", [](auto& all) { all.pop_back(); }},
      {"too many", [](auto& all) { all.push_back(all.front()); }},
      {"others' words", [](auto& all) { all.assign(all.size(), "\x7fwords"); }},
      {"code of no error", [](auto& all) { all.assign(all.size(), "9"); }}};
  for (const auto& kind : kinds) {
    for (int step = 0, num_steps = 1; step < num_steps; ++step) {
      const auto group = std::make_shared<Strange>(make_local_bootstraps(1)[0], [&, step](int call, auto& all) {
        if (call == step) kind.second(all);
      });
      std::optional<Error> thrown;
      try {
        const MoERuntime runtime(group, make_config());
      } catch (const Error& error) {
        thrown = error;
      }
      num_steps = std::max(num_steps, group->num_calls + (thrown ? 1 : 0));
      INFO(kind.first, " at step ", step);
      REQUIRE_EQ(thrown.has_value(), step < group->num_calls);
      if (!thrown) continue;
      const bool is_told = thrown->code() == ErrorCode::InvalidArgument || thrown->code() == ErrorCode::Backend;
      REQUIRE_MESSAGE(is_told, "another code: ", thrown->what());
    }
  }
}

TEST_CASE("ranks must agree on who they are") {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    const auto group = std::make_shared<Strange>(bootstrap, [](int, auto&) {});
    group->rank_of = 0;
    check_throws(ErrorCode::InvalidArgument, "in place of rank 1 what that rank did not pass",
                 [&] { MoERuntime(group, make_config()); });
    group->rank_of = bootstrap->rank();
    group->size_of = bootstrap->rank() == 0 ? 2 : 4;
    check_throws(ErrorCode::InvalidArgument,
                 bootstrap->rank() == 0 ? "the number of ranks is 2 on rank 0; 4 on rank 1"
                                        : "returned 2 strings: must be one for each of its size() = 4 ranks",
                 [&] { MoERuntime(group, make_config()); });
    REQUIRE(MoERuntime(bootstrap, make_config()).is_available());  // after wrong ones, a right one
  });
}

// What the group throws goes through, unless this rank has a mistake of its own to tell.
TEST_CASE("what a group throws goes through") {
  const auto throwing = [](int at) {
    return std::make_shared<Strange>(make_local_bootstraps(1)[0], [at](int call, auto&) {
      if (call == at) throw std::range_error("no network");
    });
  };
  for (int step = 0; step < 3; ++step) {
    std::string thrown;
    try {
      const MoERuntime runtime(throwing(step), make_config());
    } catch (const std::range_error& error) {
      thrown = error.what();
    }
    REQUIRE_EQ(thrown, std::string("no network"));
  }
  RuntimeConfig wrong = make_config();
  wrong.hidden_size = 100;
  check_throws(ErrorCode::InvalidArgument, "hidden_size = 100", [&] { MoERuntime(throwing(0), wrong); });
  const auto alone = make_local_bootstraps(2, 0.1)[0];  // nobody else comes
  check_throws(ErrorCode::InvalidArgument, "hidden_size = 100", [&] { MoERuntime(alone, wrong); });
}

template <typename Struct, typename... Members>
std::vector<std::size_t> layout_of(Members Struct::*... members) {
  const Struct object{};
  const auto offset = [&](const auto& member) {
    return static_cast<std::size_t>(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&object));
  };
  return {sizeof(Struct), offset(object.*members)...};
}

// What programs that are built against 0.1 have compiled in: the size of each struct, then where its members lie. Once 0.1
// is released, only another minor version may change these numbers (docs/cpp.md).
TEST_CASE("structs lie as promised") {
  using D = LatencyDispatchRequest;
  using C = LatencyCombineRequest;
  using L = LaneBuffers;
  using S = RuntimeStats;
  using R = RuntimeConfig;
  const std::vector<std::pair<std::vector<std::size_t>, std::vector<std::size_t>>> promises{
      {layout_of(&R::num_experts, &R::hidden_size, &R::num_topk, &R::max_tokens_per_rank, &R::experts_per_rank,
                 &R::placement, &R::mode, &R::output_layout, &R::combine_mode, &R::quant, &R::invalid_token_expert_id,
                 &R::dispatch_num_blocks, &R::combine_num_blocks, &R::max_in_flight, &R::validate, &R::two_phase,
                 &R::device, &R::timeout_s, &R::on_peer_loss),
       {136, 0, 4, 8, 12, 16, 40, 64, 68, 72, 76, 92, 96, 100, 104, 108, 109, 112, 120, 128}},
      {layout_of(&QuantConfig::format, &QuantConfig::round_scale_pow2, &QuantConfig::scale_format,
                 &QuantConfig::scale_layout),
       {16, 0, 4, 8, 12}},
      {layout_of(&Device::type, &Device::index), {8, 0, 4}},
      {layout_of(&D::x, &D::block_scales, &D::topk_ids, &D::topk_ids_type, &D::weights, &D::num_tokens,
                 &D::output_buffer, &D::stream, &D::wait_event, &D::max_num_blocks),
       {80, 0, 8, 16, 24, 32, 40, 48, 56, 64, 72}},
      {layout_of(&C::expert_output, &C::handle, &C::weights, &C::out, &C::num_tokens, &C::stream, &C::wait_event,
                 &C::max_num_blocks, &C::ready),
       {96, 0, 8, 32, 40, 48, 56, 64, 72, 80}},
      {layout_of(&ReadySignal::words, &ReadySignal::block_size_m, &ReadySignal::value), {16, 0, 8, 12}},
      {layout_of(&L::tokens, &L::scales, &L::num_tokens_per_expert, &L::num_tokens_per_rank, &L::rank_ranges,
                 &L::source_token, &L::topk_ids, &L::weights, &L::combine_input, &L::source_wait_ns),
       {80, 0, 8, 16, 24, 32, 40, 48, 56, 64, 72}},
      {layout_of(&MemoryBytes::shared, &MemoryBytes::outputs, &MemoryBytes::private_), {24, 0, 8, 16}},
      {layout_of(&S::dispatch_calls, &S::combine_calls, &S::bytes_sent, &S::bytes_received, &S::timeouts,
                 &S::expert_tokens, &S::source_wait_seconds),
       {88, 0, 8, 16, 24, 32, 40, 64}},
      {{sizeof(DispatchHandle), sizeof(MoERuntime), sizeof(Bootstrap), sizeof(Error)}, {24, 8, 8, 88}}};
  std::ostringstream differences;
  for (std::size_t i = 0; i < promises.size(); ++i) {
    if (promises[i].first == promises[i].second) continue;
    differences << "\nnumber " << i << " is now {";
    for (const std::size_t number : promises[i].first) differences << number << ", ";
    differences << "}";
  }
  REQUIRE_EQ(differences.str(), std::string());
}

// Rows that a token of each rank for logical expert 0 gives the local experts of this rank.
std::vector<int> rows_of_expert_0(MoERuntime& runtime) {
  const std::vector<std::uint16_t> x(128, 0x3F80);
  const std::vector<std::int64_t> ids{0, -1, -1};
  LatencyDispatchRequest request;
  request.x = x.data();
  request.topk_ids = ids.data();
  request.num_tokens = 1;
  const int* counts = runtime.lane_buffers(runtime.dispatch(request).lane()).num_tokens_per_expert;
  return {counts, counts + runtime.num_local_experts()};
}

TEST_CASE("placements are replaced") {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    RuntimeConfig config = make_config();
    config.placement = {0, 1, 2, 3, 4, 5, 0, -1};
    MoERuntime runtime(bootstrap, config);
    const bool first = runtime.rank() == 0;
    REQUIRE(rows_of_expert_0(runtime) ==
            (first ? std::vector<int>{1, 0, 0, 0} : std::vector<int>{0, 0, 1, 0}));  // before
    check_throws(ErrorCode::InvalidArgument, "placement",
                 [&] { runtime.update_placement(first ? std::vector<int>{0} : config.placement); });
    check_throws(ErrorCode::InvalidArgument, "holds 1 logical experts: must hold 6",
                 [&] { runtime.update_placement(std::vector<int>(8, 0), nullptr, false); });
    REQUIRE(rows_of_expert_0(runtime) ==
            (first ? std::vector<int>{1, 0, 0, 0} : std::vector<int>{0, 0, 1, 0}));  // after
    const std::vector<int> moved{5, 4, 3, 0, 2, 1, -1, -1};
    runtime.update_placement(moved);
    REQUIRE(runtime.config().placement == moved);
    REQUIRE(rows_of_expert_0(runtime) == (first ? std::vector<int>{0, 0, 0, 2} : std::vector<int>(4, 0)));
  });
  by_threads(1, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    MoERuntime runtime(bootstrap, make_config());
    check_throws(ErrorCode::InvalidArgument, "only a communicator constructed with a placement has one",
                 [&] { runtime.update_placement({0, 1, 2, 3, 4, 5, 6, 7}); });
  });
}

// Nothing of it reaches the peers.
TEST_CASE("throughput requests are refused") {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    MoERuntime runtime(bootstrap, make_config());
    if (bootstrap->rank() == 0) {
      check_throws(ErrorCode::Unsupported, "ThroughputDispatchRequest",
                   [&] { runtime.dispatch(ThroughputDispatchRequest{}); });
      check_throws(ErrorCode::Unsupported, "ThroughputCombineRequest",
                   [&] { runtime.combine(ThroughputCombineRequest{}); });
    }
    LatencyCombineRequest combine;
    combine.handle = runtime.dispatch(LatencyDispatchRequest{});  // no tokens on any rank
    combine.expert_output = runtime.combine_input_buffer();
    runtime.combine(combine);
    REQUIRE_EQ(runtime.stats().dispatch_calls, std::uint64_t{1});
  });
}

}  // namespace
