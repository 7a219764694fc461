// How many ranks there may be, and how error texts name them: "rank 2", "ranks 2, 3".
#pragma once

#include <string>
#include <vector>

namespace expertwire {

constexpr int kMaxRanks = 1024;

inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace expertwire
