#include "core/plan.hpp"

#include "shared/inbox.cuh"

namespace expertwire {
namespace {

// A wake-up through the kernel costs about as much as this many polls; with a core for each rank, polling first is free.
constexpr int kSpinWithOwnCore = 4000;
constexpr int kSpinWhenCrowded = 50;

}  // namespace

Plan plan(const Problem& problem, const Machine& machine) {
  Plan plan;
  plan.layout = make_segment_layout(problem.shape);
  plan.outputs = make_output_layout(problem.shape, problem.num_local_experts,
                                    problem.config.output_layout == DispatchLayout::RANK_MAJOR);
  plan.routes = make_route_layout(problem.shape);
  plan.memory.shared = plan.layout.bytes;
  plan.memory.outputs = plan.outputs.bytes * static_cast<std::uint64_t>(problem.config.max_in_flight);
  plan.memory.private_ = plan.routes.bytes * static_cast<std::uint64_t>(problem.config.max_in_flight);
  if (problem.config.device.type == DeviceType::CUDA) {
    const auto lanes = static_cast<std::uint64_t>(problem.config.max_in_flight);
    plan.memory.shared = inbox_bytes(problem.shape);
    plan.memory.private_ = make_lane_state_layout(problem.shape).bytes * lanes;
  }
  plan.spin_iterations = problem.num_ranks <= machine.num_cores ? kSpinWithOwnCore : kSpinWhenCrowded;
  plan.cpu_isa = machine.cpu_isa;
  return plan;
}

std::string Plan::to_string() const {
  return "plan: segment " + std::to_string(layout.bytes) + " B, outputs " + std::to_string(memory.outputs) +
         " B, private " + std::to_string(memory.private_) + " B, dispatch row " + std::to_string(layout.row.row_bytes) +
         " B, combine row " + std::to_string(layout.combine_row_bytes) + " B x " +
         std::to_string(layout.combine_row_slots) + ", rows by " + cpu_isa + ", spin " +
         std::to_string(spin_iterations);
}

}  // namespace expertwire
