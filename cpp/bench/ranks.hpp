// Where the ranks of a run come from.
#pragma once

#include <optional>
#include <vector>

#include "measure.hpp"
#include "options.hpp"
#include "reference.hpp"

namespace expertwire::bench {

// A thread of this process for each rank. Throws Error if a rank failed.
std::vector<RankTimes> measure_by_threads(const Options& options, const std::vector<RankInput>& inputs);

// mpirun's processes, of which this one is a rank. A program that was built without MPI refuses to make one (UsageError).
class MpiRanks {
 public:
  MpiRanks(int& argc, char**& argv);
  ~MpiRanks();
  MpiRanks(const MpiRanks&) = delete;
  MpiRanks& operator=(const MpiRanks&) = delete;
  int rank() const;
  int size() const;
  std::vector<RankTimes> measure(const Options& options, const std::vector<RankInput>& inputs) const;
};

}  // namespace expertwire::bench
