// Filling the cache ahead of time, on machines without a GPU too.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.hpp"

namespace expertwire::cuda {

// Compiles all kernels that a communicator of this problem loads on a GPU of this architecture, such as "sm_90" (a suffix
// makes no difference). The same for every rank. Throws what compile_kernels and make_cuda_plan throw.
std::vector<KernelImage> precompile(const Problem& problem, const std::string& architecture);

}  // namespace expertwire::cuda
