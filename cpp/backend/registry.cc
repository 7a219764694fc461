// The only place that knows the backends by name.
#include <sched.h>

#include "backend/backend.hpp"
#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/rows.hpp"
#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/cuda/jit.hpp"
#include "backend/cuda/precompile.hpp"
#include "backend/cuda/stream_order.hpp"
#include "expertwire/error.hpp"

namespace expertwire {

Machine this_machine() {
  Machine machine;
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) machine.num_cores = CPU_COUNT(&cores);
  machine.cpu_isa = cpu::row_ops().name;
  for (const cpu::RowOps* ops : cpu::all_row_ops()) machine.cpu_isas.emplace_back(ops->name);
  return machine;
}

std::unique_ptr<Backend> make_backend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap) {
  if (problem.config.device.type == DeviceType::CUDA) {
    return std::make_unique<cuda::CudaBackend>(problem, plan, bootstrap);
  }
  return cpu::make_cpu_backend(problem, plan, bootstrap);
}

KernelImage compile_cuda_source(const std::string& source, const std::string& architecture) {
  return cuda::compile_source(source, architecture);
}

std::vector<KernelImage> precompile_cuda_kernels(const Problem& problem, const std::string& architecture, int num_sms) {
  return cuda::precompile(problem, architecture, num_sms);
}

void set_nvrtc_search_path(const std::vector<std::string>& folders) { cuda::set_nvrtc_search_path(folders); }

std::string nvtx_state() { return cuda::nvtx_state(); }
bool is_stream_capturing(void* stream) { return cuda::is_stream_capturing(stream); }

std::optional<std::string> cuda_why_unusable() { return cuda::why_unusable(); }

}  // namespace expertwire
