// The layer on ranks that are threads of this process: threads <number of ranks>
#include <thread>
#include <vector>

#include "layer.hpp"

int main(int argc, char** argv) {
  const int num_ranks = parse_num_ranks(argc, argv);
  if (num_ranks == 0) return 2;
  const auto bootstraps = expertwire::make_local_bootstraps(num_ranks);
  std::vector<int> status(bootstraps.size(), 1);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < bootstraps.size(); ++rank) {
    threads.emplace_back([&, rank] { status[rank] = run_layer(bootstraps[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return status == std::vector<int>(bootstraps.size(), 0) ? 0 : 1;
}
