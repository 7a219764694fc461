// The table of a placement: [num_logical_experts] in memory of the GPU, replaced between kernels.
#include <utility>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/driver.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {

// From memory that the host may change again once this returns: the driver takes what it copies first.
void CudaBackend::write_placement(const std::vector<i32>& physical_of_logical, CUstream stream) {
  if (physical_of_logical.empty()) return;
  cuda::check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(placement_), physical_of_logical.data(),
                                         physical_of_logical.size() * sizeof(i32), stream),
              "cuMemcpyHtoDAsync");
}

void CudaBackend::check_update(void* stream) {
  memory_->report->raise_loss(problem_);
  const CurrentContext current(memory_->context);
  if (order_.capture_of(static_cast<CUstream>(stream)).is_active)
    throw Error(ErrorCode::InvalidArgument, "stream is being captured: a placement cannot be updated in a graph");
}

void CudaBackend::update_placement(std::vector<i32> physical_of_logical, void* stream) {
  const CurrentContext current(memory_->context);
  const BesideCaptures beside;
  const Turn turn = follow(static_cast<CUstream>(stream), nullptr);
  // A copy behind an operation that waits for a peer would hold up the copies of other ranks on this GPU, the peer's too.
  cuda::check(driver().cuStreamSynchronize(turn.stream), "cuStreamSynchronize");
  write_placement(physical_of_logical, turn.stream);
  order_.note(turn);
  problem_.physical_of_logical = std::move(physical_of_logical);
}

}  // namespace expertwire::cuda
