#include "figures.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace expertwire::bench {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Microseconds of the rank that `better` prefers, of each iteration.
std::vector<double> of_rank(const Result& result, const std::string& phase,
                            const std::function<bool(std::int64_t, std::int64_t)>& better) {
  std::vector<double> values;
  for (std::size_t i = 0; i < result.ranks.front().at(phase).size(); ++i) {
    std::int64_t best = result.ranks.front().at(phase)[i];
    for (const RankTimes& rank : result.ranks) best = better(rank.at(phase)[i], best) ? rank.at(phase)[i] : best;
    values.push_back(static_cast<double>(best) / 1e3);
  }
  return values;
}

// Medians of the rounds: the values cut into parts that differ by one at most, the longer ones first.
std::vector<double> medians(const std::vector<double>& values, int rounds) {
  const std::size_t count = std::min(static_cast<std::size_t>(rounds), values.size());
  std::vector<double> result;
  auto first = values.begin();
  for (std::size_t part = 0; part < count; ++part) {
    const auto last = first + static_cast<std::ptrdiff_t>(values.size() / count + (part < values.size() % count));
    result.push_back(median({first, last}));
    first = last;
  }
  return result;
}

}  // namespace

std::vector<std::string> phases_of(const Result& result) {
  std::vector<std::string> phases;
  for (const char* phase : kPhases) {
    if (!result.ranks.empty() && result.ranks.front().contains(phase)) phases.emplace_back(phase);
  }
  return phases;
}

Figures summarize(const Result& result, const std::string& phase) {
  const std::vector<double> slowest = of_rank(result, phase, std::greater<>());
  const std::vector<double> of_rounds = medians(slowest, result.options.rounds);
  std::vector<double> sorted = slowest;
  std::sort(sorted.begin(), sorted.end());
  Figures figures;
  figures.min_us = sorted.front();
  figures.median_us = median(sorted);
  figures.p99_us = sorted[static_cast<std::size_t>(std::ceil(0.99 * static_cast<double>(sorted.size()))) - 1];
  figures.max_us = sorted.back();
  figures.fastest_rank_us = median(of_rank(result, phase, std::less<>()));
  if (figures.median_us > 0.0) {
    const int transfers = phase.ends_with("-host") ? 0 : phase.starts_with("pair") ? 2 : 1;
    figures.gb_per_s = result.bytes_per_rank * transfers / figures.median_us / 1e3;
    const auto [least, most] = std::minmax_element(of_rounds.begin(), of_rounds.end());
    figures.spread = (*most - *least) / figures.median_us;
  }
  return figures;
}

std::string notes(const Options& options) {
  std::string text = "C++ calls, ranks are ";
  text += options.mpi ? "processes" : "threads";
  if (options.backend == DeviceType::CUDA) text += ", a GPU each";
  return text + "; expert outputs lie in the runtime's own buffer";
}

}  // namespace expertwire::bench
