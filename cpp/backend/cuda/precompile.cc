#include "backend/cuda/precompile.hpp"

#include <limits>

#include "backend/cuda/cuda_plan.hpp"
#include "backend/cuda/jit.hpp"

namespace expertwire::cuda {

std::vector<KernelImage> precompile(const Problem& problem, const std::string& architecture, int num_sms) {
  const int number = architecture_number(architecture);
  DeviceFacts facts;
  facts.major = number / 10;
  facts.minor = number % 10;
  facts.num_sms = num_sms;
  // Shared memory decides whether kernels can be launched, not what they are.
  facts.max_shared_bytes = std::numeric_limits<std::size_t>::max();
  const CudaPlan plan = make_cuda_plan(problem, facts);
  return compile_sources(program_sources(problem, plan), plan.architecture);
}

}  // namespace expertwire::cuda
