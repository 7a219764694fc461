#include "core/placement.hpp"

#include <algorithm>
#include <cstddef>
#include <string>

#include "expertwire/error.hpp"

namespace expertwire {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::InvalidArgument, text); }

std::vector<int> rank_of_physical(const std::vector<int>& experts_per_rank) {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < experts_per_rank.size(); ++rank)
    ranks.insert(ranks.end(), static_cast<std::size_t>(experts_per_rank[rank]), static_cast<int>(rank));
  return ranks;
}

}  // namespace

int check_placement(const std::vector<int>& placement, int num_experts) {
  const std::string needed =
      "must be one logical expert, or -1 for none, for each of the num_experts = " + std::to_string(num_experts) +
      " physical ones";
  if (placement.size() != static_cast<std::size_t>(num_experts))
    refuse("placement has " + std::to_string(placement.size()) + " entries: " + needed);
  std::vector<char> is_placed(placement.size(), 0);
  int num_logical = 0;
  for (std::size_t physical = 0; physical < placement.size(); ++physical) {
    const int logical = placement[physical];
    if (logical < -1 || logical >= num_experts)
      refuse("placement[" + std::to_string(physical) + "] = " + std::to_string(logical) + ": " + needed);
    if (logical < 0) continue;
    is_placed[static_cast<std::size_t>(logical)] = 1;
    num_logical = std::max(num_logical, logical + 1);
  }
  if (num_logical == 0) refuse("placement holds no expert: " + needed);
  for (int logical = 0; logical < num_logical; ++logical) {
    if (is_placed[static_cast<std::size_t>(logical)] != 0) continue;
    refuse("placement holds logical expert " + std::to_string(num_logical - 1) + " but not " + std::to_string(logical) +
           ": every logical expert needs a physical one");
  }
  return num_logical;
}

std::vector<i32> physical_experts(const std::vector<int>& placement, const std::vector<int>& experts_per_rank,
                                  int rank) {
  const std::vector<int> rank_of = rank_of_physical(experts_per_rank);
  std::vector<std::vector<i32>> replicas;  // of each logical expert, ascending
  for (std::size_t physical = 0; physical < placement.size(); ++physical) {
    if (placement[physical] < 0) continue;
    const auto logical = static_cast<std::size_t>(placement[physical]);
    replicas.resize(std::max(replicas.size(), logical + 1));
    replicas[logical].push_back(static_cast<i32>(physical));
  }
  std::vector<i32> chosen;
  for (const std::vector<i32>& of_expert : replicas) {
    std::vector<i32> at_rank(experts_per_rank.size(), -1);  // the first that each rank holds
    for (auto replica = of_expert.rbegin(); replica != of_expert.rend(); ++replica)
      at_rank[static_cast<std::size_t>(rank_of[static_cast<std::size_t>(*replica)])] = *replica;
    const auto own = at_rank.begin() + rank;
    // The ranks that hold none take the replicas in turn.
    const auto turn = static_cast<std::size_t>(std::count(at_rank.begin(), own, -1));
    chosen.push_back(*own >= 0 ? *own : of_expert[turn % of_expert.size()]);
  }
  return chosen;
}

}  // namespace expertwire
