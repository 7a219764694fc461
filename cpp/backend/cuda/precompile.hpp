// Filling the cache ahead of time, on machines without a GPU too.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.hpp"

namespace expertwire::cuda {

// Compiles all kernels that a communicator of this problem loads on a GPU of this architecture, such as "sm_90" (a suffix
// makes no difference). `num_sms` are those that the rank has to itself there; 0: whatever any GPU may need. The same for
// every rank. Throws what compile_sources and make_cuda_plan throw.
std::vector<KernelImage> precompile(const Problem& problem, const std::string& architecture, int num_sms);

}  // namespace expertwire::cuda
