// This rank's view of the group: every rank's segment and words, who still runs, who was given up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/epoch_word.hpp"
#include "backend/cpu/segment_exchange.hpp"

namespace expertwire::cpu {

// What a rank posts: its dispatch rows; that it entered a combine, with its weights; its combine rows.
enum class WordKind { DISPATCH, ENTRY, COMBINE };

// One dispatch or combine under way.
struct Operation {
  const char* name = "";
  int lane = 0;
  std::uint32_t previous = 0;  // epoch of the one before of this kind on this lane
  std::uint32_t epoch = 0;
  std::uint32_t number() const { return kWordEpochs.number(epoch); }
  std::uint64_t serial = 0;  // among all operations of this rank, in the order in which they were sent
  std::chrono::steady_clock::time_point start;
};

class PeerBoard {
 public:
  // Before it uses a board, a rank waits until all have made theirs.
  PeerBoard(const Problem& problem, const Plan& plan, std::vector<Peer> peers);

  Operation begin(const char* name, int lane, std::uint32_t previous);
  // Its waits have the full time from now on: what went by since it was sent was the caller's.
  static void resume(Operation& operation);

  // Makes what this rank wrote visible to all. Throws PeerLost if this rank was given up.
  void post(WordKind kind, const Operation& operation);

  // Waits for `peer` to post. False: it is lost and the policy is MASK. Under RAISE a loss throws PeerLost and ends the
  // communicator. The wait is bounded by timeout_s and ends early when the peer exits or closes.
  bool await(WordKind kind, int peer, const Operation& operation);
  // Whether no await for this operation would wait.
  bool has_arrived(WordKind kind, const Operation& operation) const;

  // Gives all waits from now on the full time again: the ranks that are awaited next have just been heard of.
  void restart_waits();

  // A short sleep of a rank that waits for expert rows of its own. Throws PeerLost, naming this rank, when they are late: the
  // others wait for it, and what it has begun cannot be taken back.
  void sleep_for_producer(const Operation& operation);

  // After this rank's last read of peers' buffers in an operation. Throws PeerLost if it was given up meanwhile.
  void confirm(WordKind kind, const Operation& operation);

  bool is_lost(int rank) const { return lost_[static_cast<std::size_t>(rank)]; }
  std::byte* segment(int rank) const { return peers_[static_cast<std::size_t>(rank)].segment->at(0); }
  void require_available() const;  // throws PeerLost once the communicator has ended
  bool is_available() const noexcept { return ended_.empty(); }
  std::vector<int> lost_ranks() const;
  double wait_seconds(int peer) const { return wait_seconds_[static_cast<std::size_t>(peer)]; }
  std::uint64_t num_timeouts() const { return num_timeouts_; }
  void close() noexcept;  // peers that wait for this rank, now or later, are told

 private:
  enum class Loss { TIMEOUT, EXITED, CLOSED, ENDED, GIVEN_UP };
  enum Mark : std::uint32_t { OPEN, CLOSED_BY_CALLER, ENDED_BY_ERROR };  // at the start of a segment

  EpochWord& word(WordKind kind, int rank, int lane) const;
  std::atomic_ref<std::uint32_t> mark(int rank) const;
  std::chrono::steady_clock::time_point deadline_of(const Operation& operation) const;
  WordState wait_for(WordKind kind, int peer, const Operation& operation, Loss& why);
  bool should_give_up(int peer, const Operation& operation, Loss& why) const;
  [[noreturn]] void end(const std::string& why, const Operation& operation);
  [[noreturn]] void throw_ended() const;
  [[noreturn]] void end_given_up(const Operation& operation);
  void record_loss(WordKind kind, int peer, const Operation& operation, Loss why);
  std::string loss_text(Loss why) const;

  SegmentLayout layout_;
  int rank_;
  int num_lanes_;
  int spin_iterations_;
  double timeout_s_;
  PeerLossPolicy policy_;
  std::vector<Peer> peers_;
  std::vector<bool> lost_;
  std::vector<std::uint64_t> lost_at_;  // the operation sent last when a rank was lost
  std::uint64_t num_begun_ = 0;
  std::vector<double> wait_seconds_;
  std::chrono::steady_clock::time_point waits_start_;
  std::uint64_t num_timeouts_ = 0;
  std::string ended_;  // why the communicator is over; empty while it is not
  std::string ended_in_;
  std::uint32_t ended_number_ = 0;
};

}  // namespace expertwire::cpu
