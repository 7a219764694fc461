#include "backend/cuda/precompile.hpp"

#include <limits>
#include <set>

#include "backend/cuda/cuda_plan.hpp"
#include "backend/cuda/jit.hpp"

namespace expertwire::cuda {

std::vector<KernelImage> precompile(const Problem& problem, const std::string& architecture) {
  const int number = architecture_number(architecture);
  DeviceFacts facts;
  facts.major = number / 10;
  facts.minor = number % 10;
  // What is not known before there is a device decides how kernels are launched, not what they are.
  facts.num_sms = 1024;
  facts.max_shared_bytes = std::numeric_limits<std::size_t>::max();
  const CudaPlan plan = make_cuda_plan(problem, facts);
  std::set<std::string> sources;  // variants may be alike
  for (const Variant& variant : {plan.small_work, plan.large_dispatch, plan.large_combine}) {
    sources.insert(config_source(problem, variant));
  }
  std::vector<KernelImage> images;
  for (const std::string& source : sources) images.push_back(compile_kernels(source, plan.architecture));
  return images;
}

}  // namespace expertwire::cuda
