// The stored cases by processes: mpirun -n 8 mpi_cases. A case of fewer ranks is of the first processes alone.
#include <memory>

#include <doctest/doctest.h>

#include "bench/place.hpp"
#include "expertwire/mpi_bootstrap.hpp"
#include "stored_case.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

TEST_CASE("every case by processes") {
  int rank = 0, num_processes = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_processes);
  int num_run = 0;
  for (const StoredCase& stored : stored_cases()) {
    if (stored.num_ranks > num_processes) continue;
    ++num_run;
    const bool takes_part = rank < stored.num_ranks;
    MPI_Comm some = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, takes_part ? 0 : MPI_UNDEFINED, rank, &some);
    if (!takes_part) continue;
    CAPTURE(stored.name);
    const auto place = bench::make_place({DeviceType::CPU, 0});
    run_case(make_mpi_bootstrap(some), stored, *place);
    MPI_Comm_free(&some);
  }
  REQUIRE_GT(num_run, 0);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int status = run_test_cases(argc, argv);
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);  // others may wait for this one
  MPI_Finalize();
  return status;
}
