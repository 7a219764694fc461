// Ranks are processes of one host. They meet at an abstract Unix socket: rank 0 listens and serves, every other rank
// keeps one connection to it. A connection that ends tells at once that a rank is gone.
//
// Two jobs with one key cannot be told apart by their ranks, so any sign of a second one (a rank that is taken, another
// size, a second rank 0) fails everybody in sight. Rank 0 keeps the name after the group is complete, deaf, so that a
// second rank 0 still finds it taken.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>

#include "base/rank_list.hpp"
#include "core/bootstrap_deadline.hpp"
#include "core/frame_socket.hpp"
#include "core/rendezvous.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire {
namespace {

using Contributions = std::vector<std::string>;
using namespace std::chrono_literals;

// How long a rank whose time is up waits for rank 0 to say who is missing.
constexpr double kVerdictSeconds = 2.0;
// How long a second rank 0 gives an earlier one to let go of the name.
constexpr double kNameTakenSeconds = 2.0;
// How long rank 0, having failed to form a group, stays to say so to ranks that are on their way.
constexpr double kLateComerSeconds = 2.0;
constexpr auto kRetryInterval = 5ms;

std::string encode(const Error& error) {
  BodyWriter body;
  body.number(static_cast<std::uint64_t>(error.code())).text(error.what()).number(error.ranks().size());
  for (const int rank : error.ranks()) body.number(static_cast<std::uint64_t>(rank));
  return body.body();
}

Error decode_error(const std::string& text) {
  BodyReader body(text);
  const auto code = static_cast<ErrorCode>(body.number());
  const std::string message = body.text();
  std::vector<int> ranks;
  for (std::uint64_t left = body.number(); left > 0; --left) ranks.push_back(static_cast<int>(body.number()));
  return code == ErrorCode::PeerLost ? Error(message, ranks, "construct", 0) : Error(code, message);
}

Error peer_lost(const std::vector<int>& ranks, const std::string& message) {
  return Error(rank_list(ranks) + message, ranks, "construct", 0);
}

Error second_job(const Meeting& meeting, const std::string& what) {
  return Error(
      ErrorCode::InvalidArgument,
      what + meeting.place() + ": two jobs at a time need different keys, and all ranks of a job the same size");
}

// Every rank but 0.
class HostClient final : public Bootstrap {
 public:
  explicit HostClient(Meeting meeting) : meeting_(std::move(meeting)) {
    const Deadline deadline(meeting_.timeout_s);
    connect(deadline);
    join(deadline);
  }

  // For a second rank 0: tells the first, and throws its verdict. Returns if there is no first one, or not any more.
  static void report_second_server(const Meeting& meeting) {
    HostClient client;
    client.meeting_ = meeting;
    client.server_ = try_connect(meeting);
    if (!client.server_) return;
    try {
      client.join(Deadline(meeting.timeout_s));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::PeerLost) throw;
    }
  }

  int rank() const override { return meeting_.rank; }
  int size() const override { return meeting_.size; }

  Contributions all_gather(const std::string& mine) override {
    if (failure_) throw *failure_;
    const Deadline deadline(meeting_.timeout_s);
    ++round_;
    const bool sent = server_->send_frame(FrameKind::DATA, mine, deadline);
    if (!sent && deadline.passed()) fail(peer_lost({0}, " does not read" + meeting_.place()));
    BodyReader body(await(FrameKind::DATA, deadline));
    Contributions all(static_cast<std::size_t>(size()));
    for (std::string& one : all) one = body.text();
    return all;
  }

 private:
  HostClient() = default;

  [[noreturn]] void fail(const Error& error) {
    failure_ = error;
    throw error;
  }

  void connect(const Deadline& deadline) {
    while (!(server_ = try_connect(meeting_))) {
      if (deadline.passed()) {
        fail(peer_lost({0}, " did not arrive within " + seconds_text(meeting_.timeout_s) + meeting_.place()));
      }
      std::this_thread::sleep_for(kRetryInterval);
    }
  }

  void join(const Deadline& deadline) {
    BodyWriter body;
    body.number(static_cast<std::uint64_t>(rank())).number(static_cast<std::uint64_t>(size())).text(meeting_.key);
    // A failed send is seen by await, which also reads what rank 0 had to say before it left.
    server_->send_frame(FrameKind::JOIN, body.body(), deadline);
    await(FrameKind::WELCOME, deadline);
  }

  std::string await(FrameKind kind, const Deadline& deadline) {
    if (const auto frame = receive(deadline)) return checked(*frame, kind);
    server_->send_frame(FrameKind::LATE, BodyWriter().number(round_).body(), Deadline(kVerdictSeconds));
    if (const auto frame = receive(Deadline(kVerdictSeconds))) return checked(*frame, kind);
    fail(peer_lost({0}, process_text(server_->peer_pid()) + " did not take part in set-up within " +
                            seconds_text(meeting_.timeout_s) + meeting_.place()));
  }

  // The next frame; nothing once the deadline has passed.
  std::optional<Frame> receive(const Deadline& deadline) {
    for (;;) {
      server_->read_available();
      if (auto frame = server_->take_frame()) return frame;
      if (server_->closed()) {
        fail(peer_lost(
            {0}, process_text(server_->peer_pid()) + " exited or closed its group during set-up" + meeting_.place()));
      }
      if (deadline.passed()) return std::nullopt;
      wait_readable({server_->descriptor()}, deadline.remaining_ms());
    }
  }

  std::string checked(const Frame& frame, FrameKind kind) {
    if (frame.kind == FrameKind::FAILURE) fail(decode_error(frame.body));
    if (frame.kind != kind) fail(Error(ErrorCode::Backend, "rank 0 sent a message out of turn" + meeting_.place()));
    return frame.body;
  }

  Meeting meeting_;
  std::optional<FrameSocket> server_;
  std::uint64_t round_ = 0;
  std::optional<Error> failure_;  // once set, the group is of no more use
};

// Rank 0.
class HostServer final : public Bootstrap {
 public:
  explicit HostServer(Meeting meeting) : meeting_(std::move(meeting)) {
    if (size() == 1) return;
    const Deadline deadline(meeting_.timeout_s);
    listen();
    try {
      while (!missing().empty()) gather_ranks(deadline);
      close_door();
    } catch (const Error& error) {
      if (!late_ && !deadline.passed()) tell_late_comers(error);
      throw;
    }
    for (Peer& peer : peers_) peer.socket.send_frame(FrameKind::WELCOME, {}, deadline);
  }

  int rank() const override { return 0; }
  int size() const override { return meeting_.size; }

  Contributions all_gather(const std::string& mine) override {
    if (failure_) throw *failure_;
    const Deadline deadline(meeting_.timeout_s);
    ++round_;
    late_ = false;
    for (Peer& peer : peers_) collect(peer);
    while (!missing().empty()) {
      wait(deadline);
      for (Peer& peer : peers_) collect(peer);
    }
    Contributions all(static_cast<std::size_t>(size()));
    all[0] = mine;
    for (Peer& peer : peers_)
      all[static_cast<std::size_t>(peer.rank)] = *std::exchange(peer.contribution, std::nullopt);
    BodyWriter body;
    for (const std::string& one : all) body.text(one);
    // Whoever cannot be reached is found gone in the next round: the others must not miss the result of this one.
    for (Peer& peer : peers_) peer.socket.send_frame(FrameKind::DATA, body.body(), deadline);
    return all;
  }

 private:
  struct Peer {
    FrameSocket socket;
    int rank = -1;                            // -1: has not said yet who it is
    std::optional<std::string> contribution;  // of the round under way
  };

  void listen() {
    const Deadline patience(std::min(kNameTakenSeconds, meeting_.timeout_s));
    std::optional<Descriptor> bound;
    while (!(bound = try_bind(meeting_))) {
      HostClient::report_second_server(meeting_);
      if (patience.passed()) throw second_job(meeting_, "rank = 0: another group has its rank 0");
      std::this_thread::sleep_for(kRetryInterval);
    }
    listener_ = std::move(*bound);
    if (::listen(listener_.get(), std::max(size(), 64)) != 0) throw_errno("listen" + meeting_.place());
  }

  void accept_all() {
    for (;;) {
      Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.valid()) {
        FrameSocket peer(std::move(socket));
        if (peer.peer_uid() == ::geteuid()) peers_.push_back({std::move(peer), -1, std::nullopt});
      } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINVAL) {  // EINVAL: shut down, and none is left
        return;
      } else if (errno != EINTR && errno != ECONNABORTED) {
        throw_errno("accept" + meeting_.place());
      }
    }
  }

  void gather_ranks(const Deadline& deadline) {
    wait(deadline);
    accept_all();
    for (Peer& peer : peers_) welcome(peer);
    std::erase_if(peers_, [](const Peer& peer) { return peer.rank < 0 && peer.socket.closed(); });
  }

  // The ranks of a job start at about the same time. Those that come a moment after a failure would find nobody and wait
  // for their whole time-out.
  void tell_late_comers(const Error& error) {
    const Deadline deadline(kLateComerSeconds);
    while (!deadline.passed() && peers_.size() + 1 < static_cast<std::size_t>(size())) {
      wait_readable({listener_.get()}, deadline.remaining_ms());
      const std::size_t num_told = peers_.size();
      accept_all();
      for (std::size_t i = num_told; i < peers_.size(); ++i) tell(peers_[i], error);
    }
  }

  // Reads what a peer says before the group is complete.
  void welcome(Peer& peer) {
    peer.socket.read_available();
    while (const auto frame = peer.socket.take_frame()) {
      if (frame->kind == FrameKind::JOIN && peer.rank < 0) {
        admit(peer, BodyReader(frame->body));
      } else if (frame->kind == FrameKind::LATE && peer.rank >= 0) {
        late_ = true;
      }
    }
    fail_if_gone(peer);
  }

  void admit(Peer& peer, BodyReader body) {
    const auto rank = static_cast<int>(body.number());
    const auto size = static_cast<int>(body.number());
    const std::string who = process_text(peer.socket.peer_pid());
    if (body.text() != meeting_.key)
      fail(second_job(meeting_, "a rank" + who + " with another key of the same hash came"));
    if (size != meeting_.size) {
      fail(second_job(meeting_, "size = " + std::to_string(size) + who + ": rank 0" + process_text(::getpid()) +
                                    " has size = " + std::to_string(meeting_.size)));
    }
    if (rank < 0 || rank >= size) fail(second_job(meeting_, "rank = " + std::to_string(rank) + who));
    const auto taken =
        std::find_if(peers_.begin(), peers_.end(), [&](const Peer& other) { return other.rank == rank; });
    if (rank == 0 || taken != peers_.end()) {
      const pid_t holder = rank == 0 ? ::getpid() : taken->socket.peer_pid();
      fail(second_job(meeting_,
                      "rank = " + std::to_string(rank) + who + ": taken already by process " + std::to_string(holder)));
    }
    peer.rank = rank;
  }

  void close_door() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    accept_all();
    const auto extra = std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.rank < 0; });
    if (extra == peers_.end()) return;
    fail(second_job(meeting_, "more processes than size = " + std::to_string(size()) + " came, among them" +
                                  process_text(extra->socket.peer_pid())));
  }

  void collect(Peer& peer) {
    peer.socket.read_available();
    while (!peer.contribution) {
      auto frame = peer.socket.take_frame();
      if (!frame) break;
      if (frame->kind == FrameKind::DATA) peer.contribution = std::move(frame->body);
    }
    // After its contribution a rank has nothing to say but that it waits no longer. A LATE of an earlier round crossed
    // with that round's result.
    while (const auto frame = peer.socket.take_frame()) {
      if (frame->kind == FrameKind::LATE && BodyReader(frame->body).number() == round_) late_ = true;
    }
    fail_if_gone(peer);
  }

  void fail_if_gone(const Peer& peer) {
    if (peer.rank < 0 || !peer.socket.closed()) return;
    fail(peer_lost({peer.rank}, process_text(peer.socket.peer_pid()) + " exited or closed its group during set-up" +
                                    meeting_.place()));
  }

  // Ranks that have not joined yet (before round 1), or not contributed to this round.
  std::vector<int> missing() const {
    std::vector<bool> here(static_cast<std::size_t>(size()));
    here[0] = true;
    for (const Peer& peer : peers_) {
      if (peer.rank >= 0 && (round_ == 0 || peer.contribution)) here[static_cast<std::size_t>(peer.rank)] = true;
    }
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (!here[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

  Error missing_error() const {
    const std::string what = round_ == 0 ? " did not arrive within " : " did not take part in set-up within ";
    return peer_lost(missing(), what + seconds_text(meeting_.timeout_s) + meeting_.place());
  }

  void wait(const Deadline& deadline) {
    if (late_ || deadline.passed()) fail(missing_error());
    std::vector<int> descriptors;
    if (round_ == 0) descriptors.push_back(listener_.get());
    for (const Peer& peer : peers_) descriptors.push_back(peer.socket.descriptor());
    wait_readable(descriptors, deadline.remaining_ms());
  }

  [[noreturn]] void fail(const Error& error) {
    failure_ = error;
    for (Peer& peer : peers_) tell(peer, error);
    throw error;
  }

  static void tell(Peer& peer, const Error& error) {
    peer.socket.send_frame(FrameKind::FAILURE, encode(error), Deadline(kVerdictSeconds));
  }

  const Meeting meeting_;
  Descriptor listener_;  // bound for as long as this object lives
  std::vector<Peer> peers_;
  std::uint64_t round_ = 0;       // 0: the group is not complete
  bool late_ = false;             // a rank waits for this round no longer
  std::optional<Error> failure_;  // once set, the group is of no more use
};

}  // namespace

std::shared_ptr<Bootstrap> make_host_bootstrap(int rank, int size, const std::string& key, double timeout_s) {
  check_bootstrap_arguments(size, timeout_s);
  if (rank < 0 || rank >= size) {
    throw Error(ErrorCode::InvalidArgument,
                "rank = " + std::to_string(rank) + ": must be between 0 and size - 1 = " + std::to_string(size - 1));
  }
  Meeting meeting{rank, size, key, timeout_s};
  if (rank == 0) return std::make_shared<HostServer>(std::move(meeting));
  return std::make_shared<HostClient>(std::move(meeting));
}

}  // namespace expertwire
