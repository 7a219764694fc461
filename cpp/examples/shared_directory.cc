// The layer on ranks that are processes and meet in a directory: shared_directory <number of ranks>
#include "shared_directory_bootstrap.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layer.hpp"

namespace {

std::filesystem::path make_directory() {
  std::string name = (std::filesystem::temp_directory_path() / "expertwire-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no directory can be made at " + name);
  return name;
}

// The number of processes that failed.
int run_processes(int num_ranks, const std::filesystem::path& directory) {
  int num_failed = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(run_layer(std::make_shared<SharedDirectoryBootstrap>(rank, num_ranks, directory)));
    num_failed += child < 0;
  }
  for (int status = 0; wait(&status) > 0;) num_failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  return num_failed;
}

// A rank that does not come ends the wait of the others, and is named.
bool names_who_is_missing(const std::filesystem::path& directory) {
  SharedDirectoryBootstrap alone(0, 2, directory, 0.2);
  try {
    alone.barrier();
  } catch (const expertwire::Error& error) {
    std::cout << "as it should be: " << error.what() << '\n';
    return error.code() == expertwire::ErrorCode::PeerLost && error.ranks() == std::vector<int>{1};
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_ranks = parse_num_ranks(argc, argv);
  if (num_ranks == 0) return 2;
  const std::filesystem::path exchange = make_directory(), lonely = make_directory();
  const bool good = run_processes(num_ranks, exchange) == 0 && names_who_is_missing(lonely);
  std::filesystem::remove_all(exchange);
  std::filesystem::remove_all(lonely);
  return good ? 0 : 1;
}
