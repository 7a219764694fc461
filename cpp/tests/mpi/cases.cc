// The stored cases by processes: mpirun -n 8 mpi_cases. A case of fewer ranks is of the first processes alone.
#include <iostream>
#include <string>

#include "bench/place.hpp"
#include "expertwire/mpi_bootstrap.hpp"
#include "stored_case.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

// What is wrong on this rank; nothing if all is well.
std::string run(const StoredCase& stored, MPI_Comm some) {
  try {
    const auto place = bench::make_place({DeviceType::CPU, 0});
    run_case(make_mpi_bootstrap(some), stored, *place);
  } catch (const std::exception& error) {
    return stored.name + ": " + error.what();
  }
  return {};
}

// Runs all cases that fit, until one fails anywhere. Returns how many were right.
int run_all(Bootstrap& world) {
  int num_right = 0;
  for (const StoredCase& stored : stored_cases()) {
    if (stored.num_ranks > world.size()) continue;
    const bool takes_part = world.rank() < stored.num_ranks;
    MPI_Comm some = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, takes_part ? 0 : MPI_UNDEFINED, world.rank(), &some);
    const std::string wrong = takes_part ? run(stored, some) : "";
    if (takes_part) MPI_Comm_free(&some);
    bool failed = false;
    for (const std::string& text : world.all_gather(wrong)) {
      failed = failed || !text.empty();
      if (world.rank() == 0 && !text.empty()) std::cerr << text << '\n';
    }
    if (failed) return -1;
    ++num_right;
  }
  return num_right;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int num_right = -1;
  {
    const std::shared_ptr<Bootstrap> world = make_mpi_bootstrap();
    num_right = run_all(*world);
    if (world->rank() == 0) std::cout << num_right << " cases right on up to " << world->size() << " processes\n";
  }
  MPI_Finalize();
  return num_right > 0 ? 0 : 1;
}
