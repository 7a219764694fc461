// Construction is all or nothing: when memory runs out on one rank, every rank throws, soon.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/moe_runtime.hpp"
#include "process.hpp"
#include "support.hpp"

namespace {

// Allocations of this thread, of at least so many bytes, until one fails; negative: none will.
thread_local int allocations_left = -1;
thread_local std::size_t counted_bytes = 0;

void* allocate(std::size_t num_bytes) {
  if (allocations_left >= 0 && num_bytes >= counted_bytes && allocations_left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(num_bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t num_bytes) { return allocate(num_bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace expertwire;
using namespace expertwire::test;

constexpr int kNumRanks = 3;
constexpr int kShortOfMemory = 1;

// The group's own memory is not what fails here: what it does for a collective is its part of the promise.
class Sheltered final : public Bootstrap {
 public:
  explicit Sheltered(Bootstrap& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    const int left = std::exchange(allocations_left, -1);
    auto all = inner_.all_gather(mine);
    allocations_left = left;
    return all;
  }

 private:
  Bootstrap& inner_;
};

struct Trial {
  std::size_t least_bytes;  // of the allocations that fail
  int num_experts;
  bool keep_group;  // a rank keeps its end of the group when construction has failed
};

RuntimeConfig make_config(int num_experts) {
  RuntimeConfig config;
  config.num_experts = num_experts;
  config.hidden_size = 64;
  config.num_topk = 2;
  config.max_tokens_per_rank = 4;
  config.max_in_flight = 2;
  return config;
}

// What construction threw; nothing if it succeeded.
std::optional<std::string> construct(Bootstrap& bootstrap, int failing_allocation, const Trial& trial) {
  const auto sheltered = std::make_shared<Sheltered>(bootstrap);
  std::optional<std::string> thrown;
  counted_bytes = trial.least_bytes;
  allocations_left = failing_allocation;
  try {
    const MoERuntime runtime(sheltered, make_config(trial.num_experts));
    allocations_left = -1;
  } catch (const std::exception& error) {
    allocations_left = -1;
    thrown = error.what();
  }
  return thrown;
}

// Lets the first, the second, ... allocation fail on one rank, until there are no more. Returns what rank 0 threw each
// time. A failure that the ranks do not agree on is seen by the others when the failed rank drops its end of the group,
// or, if it keeps it, by their time-out.
std::vector<std::string> fail_each(const Trial& trial) {
  std::vector<std::string> texts;
  for (;;) {
    auto bootstraps = make_local_bootstraps(kNumRanks, 60.0);
    std::vector<std::optional<std::string>> thrown(kNumRanks);
    const int failing = static_cast<int>(texts.size());
    run_ranks(kNumRanks, [&](int rank) {
      const auto idx = static_cast<std::size_t>(rank);
      thrown[idx] = construct(*bootstraps[idx], rank == kShortOfMemory ? failing : -1, trial);
      if (!trial.keep_group) bootstraps[idx].reset();
    });
    for (const auto& one : thrown) {
      REQUIRE_MESSAGE(one.has_value() == thrown[kShortOfMemory].has_value(), "allocation ", failing,
                      " failed on rank 1: a rank was built and another was not");
    }
    if (!thrown[0]) return texts;
    texts.push_back(*thrown[0]);
  }
}

// Going beyond the limit on files would end the process by a signal.
TEST_CASE("a limit on files is told to all") {
  const std::string key = "construction-" + std::to_string(::getpid());
  check_processes(kNumRanks, [&key](int rank) {
    const rlimit limit{1 << 16, RLIM_INFINITY};
    if (rank == kShortOfMemory) REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    RuntimeConfig config = make_config(6);
    config.max_tokens_per_rank = 1 << 12;
    const auto group = make_host_bootstrap(rank, kNumRanks, key, 20.0);
    check_throws(ErrorCode::Backend, "at most 65536 bytes (ulimit -f)", [&] { MoERuntime(group, config); });
    config.max_tokens_per_rank = 1;
    config.max_in_flight = 1;
    REQUIRE(MoERuntime(group, config).is_available());  // it keeps to the limit
  });
}

TEST_CASE("any allocation may fail") {
  const std::vector<std::string> texts = fail_each({0, 6, false});
  REQUIRE_GT(texts.size(), 100);
  REQUIRE_EQ(texts[0], std::string("rank 1 could not be constructed: std::bad_alloc"));
}

TEST_CASE("large allocations are agreed upon") {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> texts = fail_each({1 << 20, 3 << 18, true});
  REQUIRE_GE(texts.size(), 3);
  for (const std::string& text : texts) REQUIRE_EQ(text, std::string("rank 1: std::bad_alloc"));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  REQUIRE(elapsed.count() < 30.0);  // no rank waited for the one that had failed
}

}  // namespace
