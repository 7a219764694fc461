// The layer on ranks that are threads of this process: threads <number of ranks>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "layer.hpp"

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const auto bootstraps = expertwire::make_local_bootstraps(num_ranks);
  std::vector<int> status(bootstraps.size(), 1);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < bootstraps.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto memory = make_memory(static_cast<int>(rank));
      status[rank] = run_layer(bootstraps[rank], *memory);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return status == std::vector<int>(bootstraps.size(), 0) ? 0 : 1;
}
