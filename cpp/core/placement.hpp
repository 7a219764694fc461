// Logical experts, which tokens choose, and the physical ones that hold them. docs/placement.md.
#pragma once

#include <vector>

#include "shared/platform.cuh"

namespace expertwire {

// Checks a placement of `num_experts` physical experts, [E] as in RuntimeConfig, which may not be empty, and returns how
// many logical experts it holds. Throws InvalidArgument.
int check_placement(const std::vector<int>& placement, int num_experts);

// The physical expert that a rank sends each logical one's tokens to, [G], of a checked placement. Each physical expert
// holds one logical expert at most, so that different ids of a token stay different.
std::vector<i32> physical_experts(const std::vector<int>& placement, const std::vector<int>& experts_per_rank,
                                  int rank);

}  // namespace expertwire
