// The layer on ranks that MPI started: mpirun -n 4 mpi
#include <expertwire/mpi_bootstrap.hpp>

#include "layer.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 1;
  {
    const auto bootstrap = expertwire::make_mpi_bootstrap();  // goes before MPI does
    status = run_layer(bootstrap);
  }
  MPI_Finalize();
  return status;
}
