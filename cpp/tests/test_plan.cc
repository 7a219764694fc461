// The plan is a pure function of the problem and the machine: memory by the formula of docs/layout.md, polls by the number
// of cores, and one line that says it.
#include <cstdint>
#include <string>

#include <doctest/doctest.h>

#include "core/config.hpp"
#include "core/plan.hpp"

namespace {

using namespace expertwire;

std::uint64_t align(std::uint64_t bytes, std::uint64_t alignment = 128) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// E 12, H 640, K 3, M 7 on three ranks of 5, 0 and 7 experts, two lanes; seen from rank 2.
Problem make_problem_of(DispatchLayout layout, CombineMode mode, int num_ranks = 3) {
  RuntimeConfig config;
  config.num_experts = 12;
  config.hidden_size = 640;
  config.num_topk = 3;
  config.max_tokens_per_rank = 7;
  config.max_in_flight = 2;
  config.output_layout = layout;
  config.combine_mode = mode;
  if (num_ranks == 3) config.experts_per_rank = {5, 0, 7};
  return make_problem(config, num_ranks - 1, num_ranks);
}

Machine machine_of(int num_cores) {
  Machine machine;
  machine.num_cores = num_cores;
  machine.cpu_isa = "plain";
  machine.cpu_isas = {"plain"};
  return machine;
}

TEST_CASE("memory follows the formula") {
  constexpr std::uint64_t kRanks = 3, kTokens = 7, kTopk = 3, kHidden = 640, kLocal = 7, kLanes = 2;
  for (const CombineMode mode : {CombineMode::RANK_LOCAL_REDUCE, CombineMode::DIRECT_SEND}) {
    for (const DispatchLayout layout : {DispatchLayout::EXPERT_MAJOR, DispatchLayout::RANK_MAJOR}) {
      const bool direct = mode == CombineMode::DIRECT_SEND, expert_major = layout == DispatchLayout::EXPERT_MAJOR;
      const MemoryBytes memory = plan(make_problem_of(layout, mode), machine_of(4)).memory;

      const std::uint64_t slots = direct ? kTopk : 1, row = align(2 * kHidden, 64), facts = align(4 * kTokens * kTopk);
      const std::uint64_t dispatch = align(4 * kRanks) + align(4 * kRanks * kTokens) + 2 * facts + align(kTokens * row);
      const std::uint64_t combine = 128 + facts + align(kRanks * kTokens * slots * row);
      REQUIRE_EQ(memory.shared, 4096 + kLanes * (3 * 128 + 2 * dispatch + 2 * combine));

      const std::uint64_t rows = (expert_major ? kLocal : 1) * kRanks * kTokens;
      const std::uint64_t combine_rows = rows * (!expert_major && direct ? kTopk : 1);
      const std::uint64_t counts = expert_major ? align(4 * kLocal) + align(8 * kLocal * kRanks) + align(4 * rows)
                                                : align(4 * kRanks) + 2 * align(4 * rows * kTopk);
      REQUIRE_EQ(memory.outputs, kLanes * (align(2 * rows * kHidden) + counts + align(2 * kHidden * combine_rows)));

      const std::uint64_t sent = kTokens * kTopk, received = kRanks * kTokens, selected = received * kTopk;
      REQUIRE_EQ(memory.private_, kLanes * (align(4 * kTokens) + 2 * align(4 * sent) + align(4 * kRanks) +
                                            2 * align(4 * received) + 3 * align(4 * selected)));
    }
  }
}

// Of one lane on GPUs, by the formula of docs/layout.md. E 12, K 3, M 7 as above.
TEST_CASE("memory on GPUs follows its formula") {
  constexpr std::uint64_t kRanks = 3, kTokens = 7, kTopk = 3, kPadded = 4, kLocal = 7, kLanes = 2, kRow = 2 * 640;
  for (const CombineMode mode : {CombineMode::RANK_LOCAL_REDUCE, CombineMode::DIRECT_SEND}) {
    for (const bool mask : {false, true}) {
      RuntimeConfig config = make_problem_of(DispatchLayout::EXPERT_MAJOR, mode).config;
      config.device.type = DeviceType::CUDA;
      config.on_peer_loss = mask ? PeerLossPolicy::MASK : PeerLossPolicy::RAISE;
      const MemoryBytes memory = plan(make_problem(config, 2, 3), machine_of(4)).memory;

      const bool direct = mode == CombineMode::DIRECT_SEND;
      const std::uint64_t slots = !direct ? kRanks : mask ? kRanks * kTopk : kTopk;
      const std::uint64_t packets = 3 * align(16 * kRanks) + align(16 * kRanks * (kLocal + 1));
      const std::uint64_t facts =
          align(12 * kRanks * kTokens * (kTopk + 1)) + 2 * align(12 * kRanks * kTokens * kPadded);
      const std::uint64_t rows = align(2 * kRanks * kTokens * kRow) + align(2 * kTokens * slots * kRow);
      const std::uint64_t notices = mask ? align(16 * kRanks) + align(4) : 0;
      REQUIRE_EQ(memory.shared, kLanes * (packets + facts + rows) + notices);

      const std::uint64_t own = 3 * align(4 * kTokens * kPadded), received = kRanks * kTokens;
      const std::uint64_t epochs =
          2 * align(4 * 1024) + (mask ? align(8 * 1024) + align(16 * 1024) + align(4 * 1024) : 0);
      const std::uint64_t counters =
          2 * align(8) + align(4 * kRanks) + align(8 * kLocal) + align(80) + align(8 * kRanks);
      REQUIRE_EQ(memory.private_,
                 kLanes * (epochs + counters + own + align(4 * received) + 2 * align(4 * received * kPadded)));
    }
  }
}

TEST_CASE("eight GPUs share at most 64 MB each for a large model") {
  RuntimeConfig config;
  config.num_experts = 256;
  config.hidden_size = 7168;
  config.num_topk = 8;
  config.max_tokens_per_rank = 128;
  config.device.type = DeviceType::CUDA;
  const std::uint64_t shared = plan(make_problem(config, 0, 8), machine_of(4)).memory.shared;
  REQUIRE_EQ(shared, 59'032'064U);
  REQUIRE_LE(shared, 64'000'000U);
}

TEST_CASE("ranks that share cores poll less") {
  const auto polls = [](int num_ranks, int num_cores) {
    return plan(make_problem_of(DispatchLayout::EXPERT_MAJOR, CombineMode::RANK_LOCAL_REDUCE, num_ranks),
                machine_of(num_cores))
        .spin_iterations;
  };
  REQUIRE_EQ(polls(2, 2), polls(2, 64));
  REQUIRE_EQ(polls(4, 2), polls(3, 1));
  REQUIRE(polls(3, 2) > 0);                 // some polls are worth it on any machine
  REQUIRE(polls(2, 2) > 10 * polls(3, 2));  // a rank with a core to itself polls far longer
}

TEST_CASE("the same inputs give the same plan") {
  const Problem problem = make_problem_of(DispatchLayout::RANK_MAJOR, CombineMode::DIRECT_SEND);
  const Plan first = plan(problem, machine_of(2)), second = plan(problem, machine_of(2));
  REQUIRE_EQ(first.to_string(), second.to_string());
  REQUIRE_EQ(first.cpu_isa, "plain");
}

TEST_CASE("a plan prints as one line") {
  const Plan made = plan(make_problem_of(DispatchLayout::RANK_MAJOR, CombineMode::DIRECT_SEND), machine_of(2));
  const std::string text = made.to_string();
  CAPTURE(text);
  REQUIRE(text.find('\n') == std::string::npos);
  for (const std::string& part : {std::to_string(made.layout.bytes) + " B", std::to_string(made.memory.outputs) + " B",
                                  std::to_string(made.memory.private_) + " B", std::string("rows by plain"),
                                  "spin " + std::to_string(made.spin_iterations)})
    REQUIRE_MESSAGE(text.find(part) != std::string::npos, part, " is missing");
}

}  // namespace
