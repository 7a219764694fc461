#include "backend/cpu/peer_board.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <map>
#include <thread>
#include <utility>

#include "base/descriptor_exchange.hpp"
#include "base/rank_list.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// A peer that exits cannot wake us: a sleeper looks again this often.
constexpr std::chrono::milliseconds kLivenessInterval{20};
// Between two looks for published rows.
constexpr std::chrono::microseconds kProducerInterval{20};

}  // namespace

PeerBoard::PeerBoard(const Problem& problem, const Plan& plan, std::vector<Peer> peers)
    : layout_(plan.layout),
      rank_(problem.rank),
      num_lanes_(problem.config.max_in_flight),
      spin_iterations_(plan.spin_iterations),
      timeout_s_(problem.config.timeout_s),
      policy_(problem.config.on_peer_loss),
      peers_(std::move(peers)),
      lost_(peers_.size(), false),
      lost_at_(peers_.size(), 0),
      wait_seconds_(peers_.size(), 0.0) {
  for (int lane = 0; lane < num_lanes_; ++lane)
    for (const WordKind kind : {WordKind::DISPATCH, WordKind::ENTRY, WordKind::COMBINE})
      word(kind, rank_, lane).value = kWordEpochs.before_first();
}

Operation PeerBoard::begin(const char* name, int lane, std::uint32_t previous) {
  return Operation{name, lane, previous, kWordEpochs.after(previous), ++num_begun_, Clock::now()};
}

void PeerBoard::resume(Operation& operation) { operation.start = Clock::now(); }

EpochWord& PeerBoard::word(WordKind kind, int rank, int lane) const {
  const std::uint64_t offset = kind == WordKind::DISPATCH ? layout_.dispatch_word
                               : kind == WordKind::ENTRY  ? layout_.entry_word
                                                          : layout_.combine_word;
  return *reinterpret_cast<EpochWord*>(segment(rank) + layout_.lane(lane) + offset);
}

std::atomic_ref<std::uint32_t> PeerBoard::mark(int rank) const {
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(segment(rank)));
}

void PeerBoard::restart_waits() { waits_start_ = Clock::now(); }

Clock::time_point PeerBoard::deadline_of(const Operation& operation) const {
  const auto bound = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  return std::max(operation.start, waits_start_) + bound;
}

void PeerBoard::post(WordKind kind, const Operation& operation) {
  if (!expertwire::cpu::post(word(kind, rank_, operation.lane), operation.previous, operation.epoch))
    end_given_up(operation);
}

void PeerBoard::sleep_for_producer(const Operation& operation) {
  if (Clock::now() < deadline_of(operation)) return std::this_thread::sleep_for(kProducerInterval);
  lost_[static_cast<std::size_t>(rank_)] = true;
  end("this rank (" + std::to_string(rank_) + ") has waited for timeout_s for a block of ready_signal to be published",
      operation);
}

void PeerBoard::confirm(WordKind kind, const Operation& operation) {
  // Under RAISE nobody goes on, so what was read is whole, and all others have completed this operation too.
  if (policy_ == PeerLossPolicy::MASK && was_given_up(word(kind, rank_, operation.lane))) end_given_up(operation);
}

void PeerBoard::end_given_up(const Operation& operation) {
  lost_[static_cast<std::size_t>(rank_)] = true;
  end("this rank (" + std::to_string(rank_) + ") was given up by its peers: it did not arrive within their time-out",
      operation);
}

void PeerBoard::end(const std::string& why, const Operation& operation) {
  ended_ = why;
  ended_in_ = operation.name;
  ended_number_ = operation.number();
  close();
  throw_ended();
}

bool PeerBoard::await(WordKind kind, int peer, const Operation& operation) {
  if (is_lost(peer)) {
    // Its other words too, before this operation ends: if it still runs, that is where it finds out. What it posted of an
    // operation that was sent before it was lost counts, as it does for the ranks that took it before.
    const WordState state = give_up(word(kind, peer, operation.lane), operation.previous, operation.epoch);
    return state == WordState::POSTED && operation.serial <= lost_at_[static_cast<std::size_t>(peer)];
  }
  Loss why = Loss::GIVEN_UP;
  WordState state = look(word(kind, peer, operation.lane), operation.previous, operation.epoch);
  if (state == WordState::PENDING) {
    const auto start = Clock::now();
    state = wait_for(kind, peer, operation, why);
    wait_seconds_[static_cast<std::size_t>(peer)] += std::chrono::duration<double>(Clock::now() - start).count();
  }
  if (state == WordState::POSTED) return true;
  if (state == WordState::AHEAD) end_given_up(operation);
  if (why == Loss::GIVEN_UP) should_give_up(peer, operation, why);  // another rank was quicker: the cause is the same
  record_loss(kind, peer, operation, why);
  return false;
}

bool PeerBoard::has_arrived(WordKind kind, const Operation& operation) const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || is_lost(peer)) continue;
    if (look(word(kind, peer, operation.lane), operation.previous, operation.epoch) == WordState::PENDING) return false;
  }
  return true;
}

WordState PeerBoard::wait_for(WordKind kind, int peer, const Operation& operation, Loss& why) {
  EpochWord& awaited = word(kind, peer, operation.lane);
  for (int i = 0; i < spin_iterations_; ++i) {
    const WordState state = look(awaited, operation.previous, operation.epoch);
    if (state != WordState::PENDING) return state;
    cpu_relax();
  }
  for (;;) {
    const std::uint32_t seen = load_word(awaited);
    const WordState state = look(awaited, operation.previous, operation.epoch);
    if (state != WordState::PENDING) return state;
    if (should_give_up(peer, operation, why)) {
      // Whatever the peer posted before it ended still counts: the word decides.
      return give_up(awaited, operation.previous, operation.epoch);
    }
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline_of(operation) - Clock::now());
    sleep_on(awaited, seen, std::clamp<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(1), kLivenessInterval));
  }
}

bool PeerBoard::should_give_up(int peer, const Operation& operation, Loss& why) const {
  const auto idx = static_cast<std::size_t>(peer);
  if (const std::uint32_t its_mark = mark(peer).load(std::memory_order_acquire); its_mark != OPEN) {
    why = its_mark == ENDED_BY_ERROR ? Loss::ENDED : Loss::CLOSED;
    return true;
  }
  if (has_exited(peers_[idx].process)) {
    why = Loss::EXITED;
    return true;
  }
  if (Clock::now() < deadline_of(operation)) return false;
  why = Loss::TIMEOUT;
  return true;
}

void PeerBoard::record_loss(WordKind kind, int peer, const Operation& operation, Loss why) {
  lost_[static_cast<std::size_t>(peer)] = true;
  lost_at_[static_cast<std::size_t>(peer)] = num_begun_;
  if (why == Loss::TIMEOUT) ++num_timeouts_;
  if (policy_ == PeerLossPolicy::MASK) {
    restart_waits();  // the time that went by was the lost rank's, not the others'
    return;
  }
  std::map<Loss, std::vector<int>> lost_by{{why, {peer}}};
  // Others that are gone at this moment too: one error names them all.
  for (int other = 0; other < static_cast<int>(peers_.size()); ++other) {
    Loss reason = Loss::GIVEN_UP;
    if (other == rank_ || lost_[static_cast<std::size_t>(other)]) continue;
    EpochWord& pending = word(kind, other, operation.lane);
    WordState state = look(pending, operation.previous, operation.epoch);
    if (state == WordState::PENDING && should_give_up(other, operation, reason))
      state = give_up(pending, operation.previous, operation.epoch);
    if (state != WordState::LOST) continue;
    lost_[static_cast<std::size_t>(other)] = true;
    if (reason == Loss::GIVEN_UP) should_give_up(other, operation, reason);
    lost_by[reason].push_back(other);
  }
  std::string text;
  for (auto& [reason, ranks] : lost_by) {
    std::sort(ranks.begin(), ranks.end());
    text += (text.empty() ? "" : ", ") + rank_list(ranks) + loss_text(reason);
  }
  end(std::string(operation.name) + ' ' + std::to_string(operation.number()) + " on lane " +
          std::to_string(operation.lane) + ": " + text,
      operation);
}

std::string PeerBoard::loss_text(Loss why) const {
  switch (why) {
    case Loss::TIMEOUT: {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", timeout_s_);
      return std::string(" did not arrive within timeout_s = ") + seconds + " s";
    }
    case Loss::EXITED: return " exited (the process has ended)";
    case Loss::CLOSED: return " closed the communicator";
    case Loss::ENDED: return " had ended with an error";
    case Loss::GIVEN_UP: return " was given up by another rank";
  }
  return "";
}

void PeerBoard::require_available() const {
  if (!ended_.empty()) throw_ended();
}

void PeerBoard::throw_ended() const {
  throw Error("peer lost, the communicator has ended; " + ended_, lost_ranks(), ended_in_, ended_number_);
}

std::vector<int> PeerBoard::lost_ranks() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < lost_.size(); ++rank) {
    if (lost_[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void PeerBoard::close() noexcept {
  mark(rank_).store(ended_.empty() ? CLOSED_BY_CALLER : ENDED_BY_ERROR, std::memory_order_seq_cst);
  for (int lane = 0; lane < num_lanes_; ++lane) {
    for (const WordKind kind : {WordKind::DISPATCH, WordKind::ENTRY, WordKind::COMBINE})
      wake_sleepers(word(kind, rank_, lane));
  }
}

}  // namespace expertwire::cpu
