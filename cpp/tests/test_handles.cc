// Handles and requests, through the public headers alone: what combine takes, and what each operation refuses before it
// sends anything. Every refused call is followed by a right one on all ranks.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/moe_runtime.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

constexpr int kHidden = 16, kTokens = 3, kTopk = 2, kRanks = 2;
constexpr std::uint16_t kOne = 0x3F80, kTwo = 0x4000;  // BF16

// One rank whose experts return what they get: every token comes back twice as large.
class Rank {
 public:
  Rank(const std::shared_ptr<Bootstrap>& bootstrap, int max_in_flight = 1)
      : runtime(bootstrap, config(max_in_flight)) {}

  static RuntimeConfig config(int max_in_flight) {
    RuntimeConfig config;
    config.num_experts = 2 * kRanks;
    config.hidden_size = kHidden;
    config.num_topk = kTopk;
    config.max_tokens_per_rank = kTokens;
    config.max_in_flight = max_in_flight;
    config.timeout_s = 20.0;
    return config;
  }

  LatencyDispatchRequest dispatch_request() const {
    LatencyDispatchRequest request;
    request.x = x.data();
    request.topk_ids = topk_ids.data();
    request.num_tokens = kTokens;
    return request;
  }

  LatencyCombineRequest combine_request(const DispatchHandle& handle) {
    LatencyCombineRequest request;
    request.handle = handle;
    request.expert_output = runtime.lane_buffers(handle.lane()).tokens;
    request.out = out.data();
    request.num_tokens = kTokens;
    return request;
  }

  DispatchHandle dispatch() { return runtime.dispatch(dispatch_request()); }

  void combine_and_check(const DispatchHandle& handle) {
    out.assign(out.size(), 0);
    runtime.combine(combine_request(handle));
    REQUIRE(out == std::vector<std::uint16_t>(out.size(), kTwo));
  }

  std::vector<std::uint16_t> x = std::vector<std::uint16_t>(kTokens * kHidden, kOne), out = x;
  std::vector<std::int64_t> topk_ids{0, 3, 1, 2, 3, 1};
  MoERuntime runtime;
};

void by_threads(const std::function<void(const std::shared_ptr<Bootstrap>&)>& body) {
  const auto bootstraps = make_local_bootstraps(kRanks, 20.0);
  run_ranks(kRanks, [&](int rank) { body(bootstraps[static_cast<std::size_t>(rank)]); });
}

TEST_CASE("a handle knows its dispatch") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap, 2);
    REQUIRE(DispatchHandle{}.empty());
    for (int step = 0; step < 4; ++step) {
      REQUIRE_EQ(rank.runtime.next_lane(), step % 2);
      const DispatchHandle handle = rank.dispatch();
      REQUIRE(!handle.empty());
      REQUIRE_EQ(handle.lane(), step % 2);
      REQUIRE_EQ(handle.num_tokens(), kTokens);
      rank.combine_and_check(handle);
    }
  });
}

TEST_CASE("a handle may be combined twice") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap);
    const DispatchHandle handle = rank.dispatch(), copy = handle;
    for (int i = 0; i < 3; ++i) rank.combine_and_check(i % 2 == 0 ? handle : copy);
  });
}

TEST_CASE("a stale handle is refused") {
  for (const int lanes : {1, 3}) {
    by_threads([lanes](const std::shared_ptr<Bootstrap>& bootstrap) {
      Rank rank(bootstrap, lanes);
      const DispatchHandle old = rank.dispatch();
      for (int newer = 1; newer < lanes; ++newer) rank.dispatch();
      rank.combine_and_check(old);  // as many newer dispatches as there are other lanes: still good
      const DispatchHandle last = rank.dispatch();
      check_throws(ErrorCode::InvalidHandle, "handle is stale: of dispatch 1 in lane 0",
                   [&] { rank.runtime.combine(rank.combine_request(old)); });
      rank.combine_and_check(last);
    });
  }
}

TEST_CASE("a foreign handle is refused") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank one(bootstrap), other(bootstrap);
    const DispatchHandle of_one = one.dispatch(), of_other = other.dispatch();
    check_throws(ErrorCode::InvalidHandle, "handle belongs to another",
                 [&] { one.runtime.combine(one.combine_request(of_other)); });
    one.combine_and_check(of_one);
    other.combine_and_check(of_other);
  });
}

TEST_CASE("an empty handle is refused") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap);
    check_throws(ErrorCode::InvalidHandle, "handle is empty",
                 [&] { rank.runtime.combine(rank.combine_request(DispatchHandle{})); });
    rank.combine_and_check(rank.dispatch());
  });
}

// Changes one thing of a right request: it is refused on this rank, and the right one still works.
void dispatch_refuses(const char* part, const std::function<void(LatencyDispatchRequest&)>& spoil) {
  by_threads([&](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap);
    LatencyDispatchRequest request = rank.dispatch_request();
    spoil(request);
    if (bootstrap->rank() == 1) check_throws(ErrorCode::InvalidArgument, part, [&] { rank.runtime.dispatch(request); });
    rank.combine_and_check(rank.dispatch());
    REQUIRE_EQ(rank.runtime.stats().dispatch_calls, std::uint64_t{1});
  });
}

TEST_CASE("wrong dispatch requests are refused") {
  static const std::vector<float> scales(kTokens, 1.0f);
  static const std::vector<std::int64_t> beyond{0, 3, 4, 2, 3, 1}, twice{0, 3, 1, 2, 3, 3};
  dispatch_refuses("num_tokens = 4: must be between 0 and max_tokens_per_rank = 3",
                   [](LatencyDispatchRequest& r) { r.num_tokens = kTokens + 1; });
  dispatch_refuses("num_tokens = -1", [](LatencyDispatchRequest& r) { r.num_tokens = -1; });
  dispatch_refuses("x is null", [](LatencyDispatchRequest& r) { r.x = nullptr; });
  dispatch_refuses("topk_ids is null", [](LatencyDispatchRequest& r) { r.topk_ids = nullptr; });
  dispatch_refuses("x is misaligned", [](LatencyDispatchRequest& r) { r.x = static_cast<const std::byte*>(r.x) + 1; });
  dispatch_refuses("block_scales: only", [](LatencyDispatchRequest& r) { r.block_scales = scales.data(); });
  dispatch_refuses("stream: the CPU backend has no streams", [](LatencyDispatchRequest& r) { r.stream = &r; });
  dispatch_refuses("topk_ids[1, 0] = 4", [](LatencyDispatchRequest& r) { r.topk_ids = beyond.data(); });
  dispatch_refuses("topk_ids[2", [](LatencyDispatchRequest& r) { r.topk_ids = twice.data(); });
  dispatch_refuses("x overlaps", [](LatencyDispatchRequest& r) { r.output_buffer = const_cast<void*>(r.x); });
  dispatch_refuses("topk_ids_type = 2: must be one of INT32 INT64",
                   [](LatencyDispatchRequest& r) { r.topk_ids_type = static_cast<IndexType>(2); });
  dispatch_refuses("wait_event: the CPU backend has no events", [](LatencyDispatchRequest& r) { r.wait_event = &r; });
  dispatch_refuses("max_num_blocks = -1: must be >= 0", [](LatencyDispatchRequest& r) { r.max_num_blocks = -1; });
}

// Rows of a dispatch may go anywhere but over what it tells of them.
TEST_CASE("outputs of a dispatch stay apart") {
  for (const auto layout : {DispatchLayout::EXPERT_MAJOR, DispatchLayout::RANK_MAJOR}) {
    by_threads([layout](const std::shared_ptr<Bootstrap>& bootstrap) {
      RuntimeConfig config = Rank::config(1);
      config.output_layout = layout;
      config.hidden_size = 128;
      config.quant.format = DispatchDataType::FP8_E4M3;
      MoERuntime runtime(bootstrap, config);
      const LaneBuffers& lane = runtime.lane_buffers(0);
      for (void* facts :
           {lane.scales, static_cast<void*>(lane.num_tokens_per_expert), static_cast<void*>(lane.num_tokens_per_rank),
            static_cast<void*>(lane.rank_ranges), static_cast<void*>(lane.source_token),
            static_cast<void*>(lane.topk_ids), static_cast<void*>(lane.weights)}) {
        if (facts == nullptr) continue;
        LatencyDispatchRequest request;
        request.output_buffer = facts;
        check_throws(ErrorCode::InvalidArgument, "output_buffer overlaps the scales and counts of this lane",
                     [&] { runtime.dispatch(request); });
      }
    });
  }
}

void combine_refuses(const char* part, const std::function<void(LatencyCombineRequest&)>& spoil) {
  by_threads([&](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap);
    const DispatchHandle handle = rank.dispatch();
    LatencyCombineRequest request = rank.combine_request(handle);
    spoil(request);
    if (bootstrap->rank() == 0) check_throws(ErrorCode::InvalidArgument, part, [&] { rank.runtime.combine(request); });
    rank.combine_and_check(handle);
    REQUIRE_EQ(rank.runtime.stats().combine_calls, std::uint64_t{1});
  });
}

TEST_CASE("wrong combine requests are refused") {
  combine_refuses("num_tokens = 2: the dispatch of this handle had 3",
                  [](LatencyCombineRequest& r) { r.num_tokens = kTokens - 1; });
  combine_refuses("num_tokens = 9: must be between 0 and max_tokens_per_rank",
                  [](LatencyCombineRequest& r) { r.num_tokens = 9; });
  combine_refuses("expert_output is null", [](LatencyCombineRequest& r) { r.expert_output = nullptr; });
  combine_refuses("out is null", [](LatencyCombineRequest& r) { r.out = nullptr; });
  combine_refuses("out is misaligned", [](LatencyCombineRequest& r) { r.out = static_cast<std::byte*>(r.out) + 1; });
  combine_refuses("expert_output overlaps out", [](LatencyCombineRequest& r) { r.expert_output = r.out; });
  combine_refuses("stream: the CPU backend has no streams", [](LatencyCombineRequest& r) { r.stream = &r; });
  combine_refuses("wait_event: the CPU backend has no events", [](LatencyCombineRequest& r) { r.wait_event = &r; });
  combine_refuses("max_num_blocks = -5: must be >= 0", [](LatencyCombineRequest& r) { r.max_num_blocks = -5; });
  combine_refuses("block_size_m = 0: must be >= 1",
                  [](LatencyCombineRequest& r) { r.ready.words = static_cast<const std::int32_t*>(r.out); });
  combine_refuses("ready_signal overlaps out", [](LatencyCombineRequest& r) {
    // Two experts of three blocks each: the last word is the first of the output.
    r.ready = {static_cast<const std::int32_t*>(r.out) - 5, kTokens * kRanks / 3, 1};
  });
}

// Two dispatches and their combines under way; every order that would spoil one of them is refused, and they end well.
TEST_CASE("two phases keep their order") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap, 2);
    MoERuntime& runtime = rank.runtime;
    const DispatchHandle first = runtime.dispatch_send(rank.dispatch_request()),
                         second = runtime.dispatch_send(rank.dispatch_request());
    check_throws(ErrorCode::InvalidHandle, "dispatch_send: the dispatch 1 in lane 0 has been sent and not received",
                 [&] { runtime.dispatch_send(rank.dispatch_request()); });
    check_throws(ErrorCode::InvalidHandle, "combine: the dispatch 1 in lane 0",
                 [&] { runtime.combine(rank.combine_request(first)); });
    check_throws(ErrorCode::InvalidHandle, "combine_receive: nothing to receive for dispatch 1",
                 [&] { runtime.combine_receive(first); });
    check_throws(ErrorCode::InvalidHandle, "handle is empty", [&] { runtime.dispatch_receive(DispatchHandle{}); });
    check_throws(ErrorCode::InvalidArgument, "stream", [&] { runtime.dispatch_receive(first, &rank); });
    runtime.dispatch_receive(second);
    REQUIRE(runtime.dispatch_done(second));
    runtime.dispatch_receive(first);
    check_throws(ErrorCode::InvalidHandle, "received before", [&] { runtime.dispatch_receive(first); });
    REQUIRE(!runtime.combine_done(first));
    runtime.combine_send(rank.combine_request(first));
    rank.combine_and_check(second);
    check_throws(ErrorCode::InvalidHandle, "dispatch: the combine of dispatch 1 in lane 0", [&] { rank.dispatch(); });
    rank.out.assign(rank.out.size(), 0);
    runtime.combine_receive(first);
    REQUIRE(runtime.combine_done(first));
    REQUIRE(rank.out == std::vector<std::uint16_t>(rank.out.size(), kTwo));
    const DispatchHandle third = rank.dispatch();
    REQUIRE(!runtime.combine_done(third));  // the combine of an older dispatch does not count
    rank.combine_and_check(third);
    REQUIRE(runtime.combine_done(third));
  });
}

TEST_CASE("a closed runtime refuses") {
  by_threads([](const std::shared_ptr<Bootstrap>& bootstrap) {
    Rank rank(bootstrap);
    const DispatchHandle handle = rank.dispatch();
    rank.combine_and_check(handle);
    bootstrap->barrier();
    rank.runtime.close();
    rank.runtime.close();
    REQUIRE(!rank.runtime.is_available());
    check_throws(ErrorCode::InvalidArgument, "closed", [&] { rank.dispatch(); });
    check_throws(ErrorCode::InvalidArgument, "closed", [&] { rank.runtime.combine(rank.combine_request(handle)); });
    check_throws(ErrorCode::InvalidArgument, "closed", [&] { rank.runtime.check(); });
  });
}

}  // namespace
