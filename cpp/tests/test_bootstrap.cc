// Bootstraps: threads of this process, and processes of this host made by fork (this program starts no thread before).
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "core/rendezvous.hpp"
#include "expertwire/bootstrap.hpp"
#include "process.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::string fresh_key() {
  static std::atomic<int> counter{0};
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string contribution(int rank, int round) {
  return std::string(static_cast<std::size_t>(1 + rank * 1000), static_cast<char>('a' + (rank + round) % 26));
}

void check_rounds(Bootstrap& bootstrap, int num_rounds) {
  for (int round = 0; round < num_rounds; ++round) {
    const auto all = bootstrap.all_gather(round % 3 == 2 ? std::string() : contribution(bootstrap.rank(), round));
    REQUIRE_EQ(all.size(), static_cast<std::size_t>(bootstrap.size()));
    for (int rank = 0; rank < bootstrap.size(); ++rank) {
      if (all[static_cast<std::size_t>(rank)] != (round % 3 == 2 ? std::string() : contribution(rank, round))) {
        FAIL("round ", round, ": another contribution of rank ", rank);
      }
    }
    bootstrap.barrier();
  }
}

void check_ranks(const Error& error, const std::vector<int>& ranks) {
  if (error.ranks() != ranks) FAIL("other ranks are named: ", error.what());
  REQUIRE_EQ(error.operation(), std::string("construct"));
  REQUIRE_EQ(error.epoch(), 0U);
}

TEST_CASE("host: rounds of every size") {
  for (const int size : {1, 2, 3, 5, 16}) {
    const std::string key = fresh_key() + std::string(size == 3 ? 200 : 0, 'x');
    check_processes(size, [&](int rank) { check_rounds(*make_host_bootstrap(rank, size, key, 20.0), 7); });
  }
}

TEST_CASE("host: large contributions") {
  const std::string key = fresh_key();
  check_processes(3, [&](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 3, key, 20.0);
    const auto all = bootstrap->all_gather(std::string(8'000'000, static_cast<char>('0' + rank)));
    for (std::size_t i = 0; i < 3; ++i) REQUIRE((all[i] == std::string(8'000'000, static_cast<char>('0' + i))));
  });
}

TEST_CASE("host: the same key again") {
  const std::string key = fresh_key();
  check_processes(3, [&](int rank) {
    for (int i = 0; i < 20; ++i) check_rounds(*make_host_bootstrap(rank, 3, key, 20.0), 1);
  });
}

TEST_CASE("host: missing ranks are named") {
  const std::string key = fresh_key();
  check_processes(2, [&](int rank) {
    // Rank 1's time is up first: it must hear from rank 0 who is missing all the same.
    const auto start = Clock::now();
    const Error error = check_throws(ErrorCode::PeerLost, "ranks 2, 3 did not arrive within",
                                     [&] { make_host_bootstrap(rank, 4, key, 0.5 - 0.2 * rank); });
    check_ranks(error, {2, 3});
    REQUIRE(seconds_since(start) < 1.5);
  });
  check_ranks(check_throws(ErrorCode::PeerLost, "rank 0 did not arrive within 0.2 s at rendezvous key '" + key,
                           [&] { make_host_bootstrap(1, 4, key, 0.2); }),
              {0});
}

TEST_CASE("host: a rank late to a collective") {
  const std::string key = fresh_key();
  check_processes(4, [&](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 4, key, rank == 1 ? 0.3 : 20.0);
    bootstrap->barrier();
    if (rank == 2) {
      std::this_thread::sleep_for(600ms);
      check_throws(ErrorCode::PeerLost, "rank 2 did not take part", [&] { bootstrap->barrier(); });
      return;
    }
    for (int i = 0; i < 2; ++i) {  // a group that failed stays failed
      check_ranks(check_throws(ErrorCode::PeerLost, "rank 2 did not take part", [&] { bootstrap->barrier(); }), {2});
    }
  });
}

TEST_CASE("host: rank 0 late to a collective") {
  const std::string key = fresh_key();
  check_processes(2, [&](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 2, key, 0.4);
    if (rank == 0) std::this_thread::sleep_for(800ms);  // beyond rank 1's time-out, within what it waits for a verdict
    check_rounds(*bootstrap, 3);
  });
}

// Rank `victim` of 4 is killed before (round 0) or between collectives.
void check_death(int victim, int round) {
  const std::string key = fresh_key();
  std::vector<Process> processes;
  for (int rank = 0; rank < 4; ++rank) {
    processes.emplace_back([&key, rank, victim, round] {
      const auto start = Clock::now();
      const Error error = check_throws(ErrorCode::PeerLost, "rank " + std::to_string(victim) + " (process ", [&] {
        if (round == 0 && rank == 3) std::this_thread::sleep_for(1s);  // keeps the group incomplete
        const auto bootstrap = make_host_bootstrap(rank, 4, key, 5.0);
        bootstrap->barrier();
        if (rank == victim) ::raise(SIGKILL);
        bootstrap->barrier();
      });
      check_ranks(error, {victim});
      REQUIRE(seconds_since(start) < 3.0);
    });
  }
  if (round == 0) {
    std::this_thread::sleep_for(300ms);
    processes[static_cast<std::size_t>(victim)].kill(SIGKILL);
    processes[3].kill(SIGKILL);  // never arrives
  }
  for (int rank = 0; rank < 4; ++rank) {
    const bool dies = rank == victim || (round == 0 && rank == 3);
    const Process& process = processes[static_cast<std::size_t>(rank)];
    REQUIRE((dies ? process.is_killed_by(SIGKILL) : process.wait()));
  }
}

TEST_CASE("host: a death is noticed") {
  for (const int victim : {0, 1}) {
    for (const int round : {0, 1}) check_death(victim, round);
  }
}

TEST_CASE("host: a rank that is taken") {
  for (const int twin : {0, 1}) {  // also a second rank 0, which finds the name taken
    const std::string key = fresh_key();
    check_processes(3, [&](int i) {
      const int rank = i < 2 ? i : twin;
      check_throws(ErrorCode::InvalidArgument, "rank = " + std::to_string(twin) + " (process ",
                   [&] { make_host_bootstrap(rank, 3, key, 10.0); });
    });
  }
}

TEST_CASE("host: sizes that differ") {
  const std::string key = fresh_key();
  check_processes(3, [&](int rank) {
    check_throws(ErrorCode::InvalidArgument, "size = 4 (process ",
                 [&] { make_host_bootstrap(rank, rank == 2 ? 4 : 3, key, 10.0); });
  });
}

TEST_CASE("host: a second job after the first is complete") {
  const std::string key = fresh_key();
  check_processes(3, [&](int i) {
    if (i == 2) {
      std::this_thread::sleep_for(300ms);
      check_throws(ErrorCode::InvalidArgument, "another group has its rank 0",
                   [&] { make_host_bootstrap(0, 2, key, 0.5); });
      return;
    }
    const auto bootstrap = make_host_bootstrap(i, 2, key, 10.0);
    std::this_thread::sleep_for(1500ms);
    check_rounds(*bootstrap, 2);
  });
}

TEST_CASE("host: strangers are ignored") {
  const Meeting meeting{1, 2, fresh_key(), 10.0};
  check_processes(3, [&](int i) {
    if (i < 2) {
      if (i == 1) std::this_thread::sleep_for(500ms);  // the strangers come first
      check_rounds(*make_host_bootstrap(i, 2, meeting.key, 10.0), 2);
      return;
    }
    for (int k = 0; k < 3; ++k) {
      std::optional<FrameSocket> socket;
      while (!(socket = try_connect(meeting))) std::this_thread::sleep_for(5ms);
      const std::string noise(k == 0 ? 0 : 100, 'G');
      REQUIRE(::send(socket->descriptor(), noise.data(), noise.size(), MSG_NOSIGNAL) >= 0);
    }
  });
}

// Needs the right to become another user.
TEST_CASE("host: other users are refused") {
  if (::geteuid() != 0) return;
  const Meeting meeting{0, 2, fresh_key(), 0.5};
  const Process holder([&] {
    const auto bound = try_bind(meeting);
    REQUIRE(bound.has_value());
    // The name carries the user's number, so that only a user who means harm can take it. The credentials of a listener
    // are those of the moment in which it starts to listen.
    REQUIRE_EQ(::setuid(65534), 0);
    REQUIRE_EQ(::listen(bound->get(), 8), 0);
    std::this_thread::sleep_for(1s);
  });
  std::this_thread::sleep_for(300ms);
  for (const int rank : {0, 1}) {
    check_throws(ErrorCode::Backend, "user 65534", [&] { make_host_bootstrap(rank, 2, meeting.key, 0.5); });
  }
  REQUIRE(holder.wait());
}

TEST_CASE("host: signals do not disturb") {
  const std::string key = fresh_key();
  const auto run = [&key](int rank) {
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGUSR1, &action, nullptr);  // without SA_RESTART
    const auto bootstrap = make_host_bootstrap(rank, 2, key, 10.0);
    if (rank == 1) std::this_thread::sleep_for(600ms);
    check_rounds(*bootstrap, 2);
  };
  const Process zero([&] { run(0); });
  const Process one([&] {
    std::this_thread::sleep_for(400ms);
    run(1);
  });
  std::this_thread::sleep_for(100ms);
  for (int i = 0; i < 50; ++i) {
    zero.kill(SIGUSR1);
    std::this_thread::sleep_for(10ms);
  }
  REQUIRE(zero.wait());
  REQUIRE(one.wait());
}

TEST_CASE("local: rounds of every size") {
  for (const int size : {1, 2, 3, 7, 16}) {
    const auto bootstraps = make_local_bootstraps(size, 20.0);
    run_ranks(size, [&](int rank) { check_rounds(*bootstraps[static_cast<std::size_t>(rank)], 20); });
  }
}

TEST_CASE("local: a missing rank is named") {
  const auto bootstraps = make_local_bootstraps(3, 0.2);
  run_ranks(2, [&](int rank) {
    for (int i = 0; i < 2; ++i) {
      check_ranks(check_throws(ErrorCode::PeerLost, "rank 2 did not take part in set-up within 0.2 s",
                               [&] { bootstraps[static_cast<std::size_t>(rank)]->barrier(); }),
                  {2});
    }
  });
}

TEST_CASE("local: a rank that gives up") {
  auto bootstraps = make_local_bootstraps(3, 20.0);
  const auto start = Clock::now();
  run_ranks(3, [&](int rank) {
    const auto bootstrap = std::move(bootstraps[static_cast<std::size_t>(rank)]);
    bootstrap->barrier();
    if (rank == 1) return;
    check_ranks(check_throws(ErrorCode::PeerLost, "rank 1 gave up", [&] { bootstrap->barrier(); }), {1});
  });
  REQUIRE(seconds_since(start) < 5.0);
}

TEST_CASE("wrong arguments are refused") {
  check_throws(ErrorCode::InvalidArgument, "size = 0", [] { make_local_bootstraps(0); });
  for (const int size : {1025, std::numeric_limits<int>::max()}) {
    const std::string text = "size = " + std::to_string(size) + ": must be between 1 and 1024";
    check_throws(ErrorCode::InvalidArgument, text, [&] { make_local_bootstraps(size); });
    check_throws(ErrorCode::InvalidArgument, text, [&] { make_host_bootstrap(0, size, "k"); });
    check_throws(ErrorCode::InvalidArgument, text, [&] { make_host_bootstrap(1, size, "k"); });
  }
  check_throws(ErrorCode::InvalidArgument, "timeout_s = 0", [] { make_local_bootstraps(2, 0.0); });
  check_throws(ErrorCode::InvalidArgument, "timeout_s = nan", [] { make_host_bootstrap(0, 2, "k", std::stod("nan")); });
  check_throws(ErrorCode::InvalidArgument, "rank = 2: must be between 0 and size - 1 = 1",
               [] { make_host_bootstrap(2, 2, "k"); });
}

}  // namespace
}  // namespace expertwire::test
