#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "report.hpp"

namespace expertwire::bench {
namespace {

std::string padded(const std::string& text, int width) {
  const std::string spaces(static_cast<std::size_t>(std::max(0, std::abs(width) - static_cast<int>(text.size()))), ' ');
  return width < 0 ? text + spaces : spaces + text;
}

std::string rounded(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

std::string table(const Result& result) {
  const Options& o = result.options;
  std::string text = "T " + std::to_string(o.num_tokens) + "  E " + std::to_string(o.num_experts) + "  K " +
                     std::to_string(o.num_topk) + "  H " + std::to_string(o.hidden_size) + "  R " +
                     std::to_string(o.num_ranks) + "  " + option_text(o.layout) + "  " + option_text(o.combine_mode) +
                     "  " + option_text(o.dispatch_dtype) + "  routing " + (o.inputs.empty() ? o.routing : o.inputs) +
                     "\n";
  if (!result.failure.empty()) return text + "expertwire-cpp: FAILED: " + result.failure + "\n";
  text += padded("LIB", -16) + padded("phase", -16);
  for (const char* heading : {"min", "median", "p99", "max", "fastest", "GB/s", "spread"}) text += padded(heading, 10);
  text += "\n";
  for (const std::string& phase : phases_of(result)) {
    const Figures figures = summarize(result, phase);
    text += padded("expertwire-cpp", -16) + padded(phase, -16);
    for (const double us : {figures.min_us, figures.median_us, figures.p99_us, figures.max_us, figures.fastest_rank_us})
      text += padded(rounded(us, "%.1f"), 10);
    text += padded(rounded(figures.gb_per_s, "%.2f"), 10) + padded(rounded(100 * figures.spread, "%.0f%%"), 10) + "\n";
  }
  return text + "us of the slowest rank of each iteration; " + notes(o) + "\n";
}

}  // namespace expertwire::bench
