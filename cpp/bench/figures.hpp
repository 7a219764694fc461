// What a run measured, and its figures.
#pragma once

#include <string>
#include <vector>

#include "measure.hpp"
#include "options.hpp"

namespace expertwire::bench {

struct Result {
  std::vector<std::string> command;
  Options options;
  std::vector<RankTimes> ranks;
  double bytes_per_rank = 0.0;  // valid selections * H * 2, the mean over the ranks
  std::string failure;          // empty: the figures count
};

// One phase over the iterations, microseconds of the slowest rank of each.
struct Figures {
  double min_us = 0.0;
  double median_us = 0.0;
  double p99_us = 0.0;
  double max_us = 0.0;
  double fastest_rank_us = 0.0;  // median of the fastest rank: one that waits for a late rank is not slow
  double gb_per_s = 0.0;  // payload of one rank over the median, twice for a pair; 0 where the caller alone is timed
  double spread = 0.0;    // of the medians of the rounds
};

// The phases that have figures, in the order of kPhases.
std::vector<std::string> phases_of(const Result& result);
Figures summarize(const Result& result, const std::string& phase);

// What is timed, in one line.
std::string notes(const Options& options);

}  // namespace expertwire::bench
