// Making a MoERuntime, through the public headers alone: what a runtime says of itself, and that what is refused is refused
// on every rank and leaves the group of use. test_config.cc goes through all fields.
#include <functional>
#include <string>
#include <vector>

#include "check.hpp"
#include "expertwire/moe_runtime.hpp"

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

void a_runtime_describes_itself() {
  RuntimeConfig config = make_config();
  config.num_experts = 9;
  config.experts_per_rank = {5, 0, 4};
  config.max_in_flight = 2;
  by_threads(3, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    const MoERuntime runtime(bootstrap, config);
    const auto rank = static_cast<std::size_t>(bootstrap->rank());
    check_equal(runtime.rank(), bootstrap->rank());
    check_equal(runtime.num_ranks(), 3);
    check_equal(runtime.num_local_experts(), config.experts_per_rank[rank]);
    check_equal(runtime.first_local_expert(), std::vector<int>{0, 5, 5}[rank]);
    check(runtime.mode() == MoEMode::LATENCY, "mode");
    check(runtime.is_available(), "not available");
    check_equal(runtime.next_lane(), 0);
    check(runtime.dispatch_output_buffer() == runtime.lane_buffers(0).tokens, "output of the next dispatch");
    check(runtime.combine_input_buffer() == runtime.lane_buffers(0).combine_input, "input of the next combine");
    check(rank == 1 || runtime.lane_buffers(1).tokens != runtime.lane_buffers(0).tokens, "lanes share their rows");
    check_throws(ErrorCode::InvalidArgument, "lane = 2: must be between 0 and max_in_flight - 1 = 1",
                 [&] { runtime.lane_buffers(2); });
    check_throws(ErrorCode::InvalidArgument, "lane = -1", [&] { runtime.lane_buffers(-1); });
    check(runtime.memory_bytes().shared > 0, "no shared memory");
    check((runtime.memory_bytes().outputs > 0) == (rank != 1), "output buffers are of the local experts");
    check(runtime.lost_ranks().empty(), "a rank is lost already");
    check_equal(runtime.stats().dispatch_calls + runtime.stats().combine_calls, std::uint64_t{0});
  });
}

void only_the_buffers_of_the_layout_are_there() {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    const MoERuntime by_expert(bootstrap, make_config());
    const LaneBuffers& experts = by_expert.lane_buffers(0);
    check(experts.num_tokens_per_expert != nullptr && experts.rank_ranges != nullptr && experts.source_token != nullptr,
          "EXPERT_MAJOR lacks a buffer");
    check(experts.num_tokens_per_rank == nullptr && experts.topk_ids == nullptr && experts.weights == nullptr &&
              experts.scales == nullptr,
          "EXPERT_MAJOR with BF16 has a buffer of another layout or payload");
    RuntimeConfig config = make_config();
    config.output_layout = DispatchLayout::RANK_MAJOR;
    config.quant.format = DispatchDataType::FP8_E4M3;
    const MoERuntime by_rank(bootstrap, config);
    const LaneBuffers& ranks = by_rank.lane_buffers(0);
    check(ranks.num_tokens_per_rank != nullptr && ranks.topk_ids != nullptr && ranks.weights != nullptr &&
              ranks.scales != nullptr,
          "RANK_MAJOR with FP8 lacks a buffer");
    check(ranks.num_tokens_per_expert == nullptr && ranks.rank_ranges == nullptr && ranks.source_token == nullptr,
          "RANK_MAJOR has a buffer of another layout");
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

void wrong_configurations_are_refused_on_every_rank() {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    for (const Refused& refused : kRefused) {
      RuntimeConfig config = make_config();
      refused.spoil(config);
      check_throws(refused.code, refused.text, [&] { MoERuntime(bootstrap, config); });
    }
    check(MoERuntime(bootstrap, make_config()).is_available(), "a right configuration is refused after wrong ones");
  });
}

void one_wrong_rank_is_told_to_all() {
  by_threads(3, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    RuntimeConfig config = make_config();
    config.num_experts = 9;
    if (bootstrap->rank() == 1) config.num_topk = 40;
    check_throws(ErrorCode::InvalidArgument, "num_topk", [&] { MoERuntime(bootstrap, config); });
    if (bootstrap->rank() == 1) config.num_topk = 2;
    check_throws(ErrorCode::InvalidArgument, "num_topk", [&] { MoERuntime(bootstrap, config); });
  });
}

void a_bootstrap_is_needed() {
  check_throws(ErrorCode::InvalidArgument, "bootstrap is null", [] { MoERuntime(nullptr, make_config()); });
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

void placements_are_replaced() {
  by_threads(2, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    RuntimeConfig config = make_config();
    config.placement = {0, 1, 2, 3, 4, 5, 0, -1};
    MoERuntime runtime(bootstrap, config);
    const bool first = runtime.rank() == 0;
    check(rows_of_expert_0(runtime) == (first ? std::vector<int>{1, 0, 0, 0} : std::vector<int>{0, 0, 1, 0}), "before");
    check_throws(ErrorCode::InvalidArgument, "placement",
                 [&] { runtime.update_placement(first ? std::vector<int>{0} : config.placement); });
    check_throws(ErrorCode::InvalidArgument, "holds 1 logical experts: must hold 6",
                 [&] { runtime.update_placement(std::vector<int>(8, 0), nullptr, false); });
    check(rows_of_expert_0(runtime) == (first ? std::vector<int>{1, 0, 0, 0} : std::vector<int>{0, 0, 1, 0}), "after");
    const std::vector<int> moved{5, 4, 3, 0, 2, 1, -1, -1};
    runtime.update_placement(moved);
    check(runtime.config().placement == moved, "the configuration has the old placement");
    check(rows_of_expert_0(runtime) == (first ? std::vector<int>{0, 0, 0, 2} : std::vector<int>(4, 0)), "moved");
  });
  by_threads(1, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    MoERuntime runtime(bootstrap, make_config());
    check_throws(ErrorCode::InvalidArgument, "only a communicator constructed with a placement has one",
                 [&] { runtime.update_placement({0, 1, 2, 3, 4, 5, 6, 7}); });
  });
}

// Nothing of it reaches the peers.
void throughput_requests_are_refused() {
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
    check_equal(runtime.stats().dispatch_calls, std::uint64_t{1});
  });
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"a_runtime_describes_itself", a_runtime_describes_itself},
                    {"only_the_buffers_of_the_layout_are_there", only_the_buffers_of_the_layout_are_there},
                    {"wrong_configurations_are_refused_on_every_rank", wrong_configurations_are_refused_on_every_rank},
                    {"one_wrong_rank_is_told_to_all", one_wrong_rank_is_told_to_all},
                    {"a_bootstrap_is_needed", a_bootstrap_is_needed},
                    {"placements_are_replaced", placements_are_replaced},
                    {"throughput_requests_are_refused", throughput_requests_are_refused}});
}
