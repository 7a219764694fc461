#include "ranks.hpp"

#include <exception>
#include <thread>

#include "expertwire/bootstrap.hpp"

namespace expertwire::bench {

std::vector<RankTimes> measure_by_threads(const Options& options, const std::vector<RankInput>& inputs) {
  // Set-up waits for a rank that is stuck in an operation until that one has given up.
  auto bootstraps = make_local_bootstraps(options.num_ranks, options.timeout_s + 60.0);
  std::vector<std::exception_ptr> failures(bootstraps.size());
  std::vector<std::vector<RankTimes>> results(bootstraps.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < bootstraps.size(); ++rank) {
    threads.emplace_back([&, rank, bootstrap = std::move(bootstraps[rank])] {
      try {
        results[rank] = measure(bootstrap, options, inputs);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return results.front();
}

}  // namespace expertwire::bench
