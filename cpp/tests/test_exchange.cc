// Steps that all ranks take or none, and the exchange of descriptors between threads and between processes.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "base/collective.hpp"
#include "base/descriptor_exchange.hpp"
#include "expertwire/bootstrap.hpp"
#include "process.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using namespace std::chrono_literals;

// A pipe, of which one end is offered to the peers.
struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    reading = Descriptor(ends[0]);
    writing = Descriptor(ends[1]);
  }
  std::string read() const {
    std::array<char, 64> text;
    const ssize_t num_read = ::read(reading.get(), text.data(), text.size());
    REQUIRE(num_read >= 0);
    return std::string(text.data(), static_cast<std::size_t>(num_read));
  }
  Descriptor reading;
  Descriptor writing;
};

std::string fresh_key() {
  static int counter = 0;
  return "exchange-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
}

TEST_CASE("steps succeed together") {
  const auto bootstraps = make_local_bootstraps(3);
  run_ranks(3, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    int num_steps = 0;
    succeed_together(bootstrap, [&] { ++num_steps; });
    check_throws(ErrorCode::Unsupported, "rank 1: not here; rank 2: no memory", [&] {
      succeed_together(bootstrap, [&] {
        ++num_steps;
        if (rank == 1) throw Error(ErrorCode::Unsupported, "not here");
        if (rank == 2) throw std::runtime_error("no memory");
      });
    });
    check_throws(ErrorCode::InvalidArgument, "rank 0: ", [&] {
      succeed_together(bootstrap, [&] {
        if (rank == 0) throw Error(ErrorCode::InvalidArgument, "");
      });
    });
    REQUIRE_EQ(num_steps, 2);
  });
}

TEST_CASE("an own error outlives the group") {
  const auto bootstraps = make_local_bootstraps(2, 0.2);
  const auto step = [](bool fails) {
    return [fails] {
      if (fails) throw Error(ErrorCode::Unsupported, "not here");
    };
  };
  check_throws(ErrorCode::Unsupported, "rank 1: not here", [&] { succeed_together(*bootstraps[1], step(true)); });
  check_throws(ErrorCode::PeerLost, "rank 0", [&] { succeed_together(*bootstraps[1], step(false)); });
}

// A collective of anybody's own that may return anything.
class Mixed final : public Bootstrap {
 public:
  explicit Mixed(std::vector<std::string> answer) : answer_(std::move(answer)) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(const std::string&) override { return answer_; }

 private:
  std::vector<std::string> answer_;
};

TEST_CASE("answers that mean nothing are refused") {
  const auto no_step = [](std::vector<std::string> answer) {
    return [answer = std::move(answer)] {
      Mixed bootstrap(answer);
      succeed_together(bootstrap, [] {});
    };
  };
  const std::string needed = " strings: must be one for each of its size() = 2 ranks";
  check_throws(ErrorCode::InvalidArgument, "all_gather returned 0" + needed, no_step({}));
  check_throws(ErrorCode::InvalidArgument, "all_gather returned 3" + needed, no_step({"", "", ""}));
  check_throws(ErrorCode::Backend, "rank 1: what it sent at set-up cannot be read", no_step({"", "\x7f"}));
  check_throws(ErrorCode::Backend, "rank 1: what it sent at set-up cannot be read", no_step({"", "5 of no code"}));
  check_throws(ErrorCode::Unsupported, "rank 1: not here", no_step({"", encode({ErrorCode::Unsupported, "not here"})}));
  Mixed one({"12345678"}), other({"12345678", "1"});
  check_throws(ErrorCode::InvalidArgument, "all_gather returned 1" + needed, [&] { gather_values(one, 1L); });
  check_throws(ErrorCode::Backend, "returned 1 bytes, expected 8", [&] { gather_values(other, 1L); });
}

TEST_CASE("values are gathered by rank") {
  const auto bootstraps = make_local_bootstraps(3);
  run_ranks(3, [&](int rank) {
    const auto all = gather_values(*bootstraps[static_cast<std::size_t>(rank)], 10L + rank);
    REQUIRE(all == std::vector<long>{10, 11, 12});
  });
}

TEST_CASE("threads receive the objects themselves") {
  const auto bootstraps = make_local_bootstraps(3);
  std::vector<std::shared_ptr<int>> objects;
  for (int rank = 0; rank < 3; ++rank) objects.push_back(std::make_shared<int>(rank));
  run_ranks(3, [&](int rank) {
    const auto idx = static_cast<std::size_t>(rank);
    const std::vector<Received> all = exchange_descriptors(*bootstraps[idx], {Descriptor(), objects[idx], 5});
    for (std::size_t peer = 0; peer < 3; ++peer) {
      REQUIRE(all[peer].local == objects[peer]);
      REQUIRE(!all[peer].descriptor.valid());
      REQUIRE(!all[peer].process.valid());
      REQUIRE_EQ(all[peer].bytes, 5U);
      REQUIRE(!has_exited(all[peer].process));
    }
  });
}

TEST_CASE("processes receive duplicates") {
  const std::string key = fresh_key();
  check_processes(3, [&](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 3, key, 20.0);
    const Pipe own;
    const auto object = std::make_shared<int>(rank);
    const std::vector<Received> all =
        exchange_descriptors(*bootstrap, {own.writing, object, 100 + static_cast<std::uint64_t>(rank)});
    for (int peer = 0; peer < 3; ++peer) {
      const Received& one = all[static_cast<std::size_t>(peer)];
      REQUIRE_EQ(one.bytes, 100 + static_cast<std::uint64_t>(peer));
      REQUIRE(one.local == (peer == rank ? object : nullptr));
      REQUIRE(one.descriptor.valid() == (peer != rank));  // descriptors come from others
      if (peer == (rank + 1) % 3) REQUIRE(::write(one.descriptor.get(), "from", 4) == 4);
      REQUIRE(!has_exited(one.process));
    }
    bootstrap->barrier();
    REQUIRE_EQ(own.read(), std::string("from"));
    bootstrap->barrier();
  });
}

// Leaves this process `room` descriptors to open.
void limit_descriptors(int room) {
  int limit = 0;
  while (::fcntl(limit, F_GETFD) >= 0 || room-- > 0) ++limit;  // the number of the first that it may not open
  rlimit limits{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limits) == 0);
  limits.rlim_cur = static_cast<rlim_t>(limit);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limits) == 0);
}

// UBSan opens a pipe for each class whose objects it sees for the first time: they are all seen before the limit is set.
void rehearse(Bootstrap& bootstrap) {
  exchange_descriptors(bootstrap, {Pipe().writing, std::make_shared<int>(0), 1});
  check_throws(ErrorCode::Backend, "rehearsal",
               [&] { succeed_together(bootstrap, [] { throw Error(ErrorCode::Backend, "rehearsal"); }); });
}

// A rank holds its listener, a connection, and the peer's descriptor and pidfd; it fails at the first that it has no room
// for, wherever its peer is by then.
TEST_CASE("a rank out of descriptors is named at once") {
  for (const int room : {0, 1, 2, 3}) {
    for (const int poor : {0, 1}) {
      const std::string key = fresh_key();
      check_processes(2, [&](int rank) {
        const auto bootstrap = make_host_bootstrap(rank, 2, key, 20.0);
        const Pipe own;
        rehearse(*bootstrap);
        const auto start = std::chrono::steady_clock::now();
        if (rank == poor) limit_descriptors(room);
        const Error error = check_throws(ErrorCode::Backend, "rank " + std::to_string(poor) + ": ", [&] {
          exchange_descriptors(*bootstrap, {own.writing, std::make_shared<int>(0), 1});
        });
        const std::string text = error.what();
        if (text.find("open files") == std::string::npos) FAIL(text);
        REQUIRE(std::chrono::steady_clock::now() - start < 5s);
      });
    }
  }
}

TEST_CASE("there is room for an exchange") {
  const std::string key = fresh_key();
  check_processes(2, [&](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 2, key, 20.0);
    const Pipe own;
    rehearse(*bootstrap);
    limit_descriptors(4);
    const std::vector<Received> all = exchange_descriptors(*bootstrap, {own.writing, std::make_shared<int>(0), 1});
    REQUIRE(all[static_cast<std::size_t>(1 - rank)].descriptor.valid());
    bootstrap->barrier();
  });
}

TEST_CASE("deaths are seen") {
  const std::string key = fresh_key();
  const auto rank_of = [&key](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 2, key, 20.0);
    const Pipe own;
    const std::vector<Received> all = exchange_descriptors(*bootstrap, {own.writing, std::make_shared<int>(0), 1});
    REQUIRE(!has_exited(all[0].process));
    REQUIRE(!has_exited(all[1].process));
    bootstrap->barrier();
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    for (int i = 0; i < 1000 && !has_exited(all[1].process); ++i) std::this_thread::sleep_for(10ms);
    REQUIRE(has_exited(all[1].process));
  };
  const Process survivor([&] { rank_of(0); });
  const Process victim([&] { rank_of(1); });
  REQUIRE(victim.is_killed_by(SIGKILL));
  REQUIRE(survivor.wait());
}

}  // namespace
}  // namespace expertwire::test
