// The only place that knows the backends by name.
#include <sched.h>

#include "backend/backend.hpp"
#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/rows.hpp"
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
    throw Error(ErrorCode::Unsupported, "device = cuda: this version has no CUDA backend; use cpu");
  }
  return cpu::make_cpu_backend(problem, plan, bootstrap);
}

}  // namespace expertwire
