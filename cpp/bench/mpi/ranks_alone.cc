// Linked where the program is built without MPI.
#include "bench/ranks.hpp"

namespace expertwire::bench {

MpiRanks::MpiRanks(int&, char**&) {
  throw UsageError("--mpi: this program was built without MPI (cmake -DEXPERTWIRE_BENCH_MPI=ON)");
}
MpiRanks::~MpiRanks() = default;
int MpiRanks::rank() const { return 0; }
int MpiRanks::size() const { return 1; }
std::vector<RankTimes> MpiRanks::measure(const Options&, const std::vector<RankInput>&) const { return {}; }

}  // namespace expertwire::bench
