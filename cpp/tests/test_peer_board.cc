// What a rank is told of a peer that is gone: all ranks of a group looked at by one thread, so that the order is certain.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "backend/cpu/peer_board.hpp"
#include "backend/cpu/shared_memory.hpp"
#include "core/config.hpp"
#include "core/plan.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using cpu::Operation;
using cpu::PeerBoard;
using cpu::WordKind;

constexpr int kNumRanks = 3;
constexpr std::uint32_t kBefore = cpu::kWordEpochs.before_first();

class Group {
 public:
  explicit Group(double timeout_s) {
    RuntimeConfig config;
    config.num_experts = kNumRanks;
    config.hidden_size = 8;
    config.num_topk = 1;
    config.max_tokens_per_rank = 1;
    config.timeout_s = timeout_s;
    std::vector<std::shared_ptr<cpu::Segment>> segments(kNumRanks);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const Problem problem = make_problem(config, rank, kNumRanks);
      const Plan plan = expertwire::plan(problem, Machine{});
      std::vector<cpu::Peer> peers;
      for (auto& segment : segments) {
        if (segment == nullptr) segment = cpu::create_segment(plan.layout.bytes);
        peers.push_back({segment, Descriptor()});
      }
      boards_.emplace_back(problem, plan, std::move(peers));
    }
  }

  PeerBoard& board(int rank) { return boards_[static_cast<std::size_t>(rank)]; }

  // The error of `rank` that waits for `peer` in its first dispatch, to which it posts before.
  Error loss(int rank, int peer) {
    const Operation first = board(rank).begin("dispatch", 0, kBefore);
    return check_throws(ErrorCode::PeerLost, "dispatch 1 on lane 0: ", [&] {
      board(rank).post(WordKind::DISPATCH, first);
      board(rank).await(WordKind::DISPATCH, peer, first);
    });
  }

 private:
  std::vector<PeerBoard> boards_;
};

void check_told(const Error& error, const std::vector<int>& ranks, const std::string& text) {
  const std::string told = error.what();
  CAPTURE(told);
  REQUIRE(error.ranks() == ranks);
  REQUIRE(told.ends_with(": " + text));
}

TEST_CASE("operations are counted for people from 1, and epochs cross their wrap with the third one") {
  std::uint32_t epoch = kBefore;
  for (std::uint32_t number = 1; number <= 7; ++number) {
    epoch = cpu::kWordEpochs.after(epoch);
    REQUIRE_EQ(cpu::kWordEpochs.number(epoch), number);
    REQUIRE_EQ(epoch % kNumBuffers, number % kNumBuffers);
  }
  REQUIRE_EQ(epoch, 5U);
}

TEST_CASE("one error names every rank with its reason") {
  Group group(20.0);
  group.board(2).close();
  check_told(group.loss(1, 2), {2}, "rank 2 closed the communicator");
  // Rank 1 has posted its first dispatch, but will come to no second one.
  const Operation second = group.board(0).begin("dispatch", 0, cpu::kWordEpochs.after(kBefore));
  const Error error =
      check_throws(ErrorCode::PeerLost, "", [&] { group.board(0).await(WordKind::DISPATCH, 1, second); });
  check_told(error, {1, 2}, "rank 2 closed the communicator, rank 1 had ended with an error");
}

TEST_CASE("who was given up and raised has not closed") {
  Group group(0.01);
  const Operation first = group.board(2).begin("dispatch", 0, kBefore);
  group.board(2).post(WordKind::DISPATCH, first);
  check_told(group.loss(0, 1), {1}, "rank 1 did not arrive within timeout_s = 0.01 s");
  check_throws(ErrorCode::PeerLost, "this rank (1) was given up",
               [&] { group.board(1).post(WordKind::DISPATCH, group.board(1).begin("dispatch", 0, kBefore)); });
  const Error error =
      check_throws(ErrorCode::PeerLost, "", [&] { group.board(2).await(WordKind::DISPATCH, 1, first); });
  check_told(error, {1}, "rank 1 had ended with an error");
}

TEST_CASE("closing after an error stays an error") {
  Group group(20.0);
  group.board(2).close();
  group.loss(1, 2);
  group.board(1).close();
  const Operation second = group.board(0).begin("dispatch", 0, cpu::kWordEpochs.after(kBefore));
  const Error error =
      check_throws(ErrorCode::PeerLost, "", [&] { group.board(0).await(WordKind::DISPATCH, 1, second); });
  check_told(error, {1, 2}, "rank 2 closed the communicator, rank 1 had ended with an error");
}

}  // namespace
}  // namespace expertwire::test
