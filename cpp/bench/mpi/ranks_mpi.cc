// Linked where the program is built with MPI; ranks_alone.cc elsewhere.
#include "bench/ranks.hpp"
#include "expertwire/mpi_bootstrap.hpp"

namespace expertwire::bench {
namespace {

int of_world(int (*ask)(MPI_Comm, int*)) {
  int value = 0;
  ask(MPI_COMM_WORLD, &value);
  return value;
}

}  // namespace

MpiRanks::MpiRanks(int& argc, char**& argv) { MPI_Init(&argc, &argv); }
MpiRanks::~MpiRanks() { MPI_Finalize(); }
int MpiRanks::rank() const { return of_world(MPI_Comm_rank); }
int MpiRanks::size() const { return of_world(MPI_Comm_size); }

std::vector<RankTimes> MpiRanks::measure(const Options& options, const std::vector<RankInput>& inputs) const {
  return bench::measure(make_mpi_bootstrap(), options, inputs);
}

}  // namespace expertwire::bench
