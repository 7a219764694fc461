// The CUDA backend: one kernel for each operation, on the caller's stream. Nothing here waits for the GPU but construction,
// update_placement(), stats() and destruction. The hot path is launch().
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/context.hpp"
#include "backend/cuda/cuda_plan.hpp"
#include "backend/cuda/kernel_memory.hpp"
#include "backend/cuda/stream_order.hpp"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {

// A compiled kernel, loaded: resident before its first launch.
class LoadedKernel {
 public:
  LoadedKernel(int device, const KernelImage& image, const Variant& variant, std::size_t shared_bytes);
  CUfunction function() const { return function_; }
  int num_threads() const { return num_threads_; }

 private:
  CUfunction function_ = nullptr;
  int num_threads_ = 0;
};

class CudaBackend final : public Backend {
 public:
  // Collective.
  CudaBackend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap);
  ~CudaBackend() override;

  const LaneBuffers& lane_buffers(int lane) const override { return lanes_[static_cast<std::size_t>(lane)].buffers; }
  void dispatch(int lane, const DispatchParams& params) override;
  void combine(int lane, const CombineParams& params) override;
  void send(int lane, const DispatchParams& params) override;
  void send(int lane, const CombineParams& params) override;
  void receive(Step step, int lane, void* stream) override;
  void check_stream(void* stream) override;
  bool has_arrived(Step step, int lane) override;
  RuntimeStats stats() const override;
  std::vector<int> lost_ranks() const override;
  bool is_available() const noexcept override { return !memory_->report->has_loss(); }
  void check() override;
  void check_update(void* stream) override;
  void update_placement(std::vector<i32> physical_of_logical, void* stream) override;
  void close() noexcept override;

 private:
  struct Lane {
    LaneBuffers buffers;
    LaneParams params;
    u32 call = 0;  // number of the dispatch that used it last
    // What was sent and is, or will be, received; recorded behind the receive.
    DispatchKernelParams dispatch;
    CombineKernelParams combine;
    int dispatch_max_blocks = 0, combine_max_blocks = 0;
    CUevent received[2] = {};
    bool is_received[2] = {};
  };
  // For few tokens and, where that occurs, for many, by phase.
  using Kernels = std::array<std::vector<LoadedKernel>, 3>;

  void build(Bootstrap& bootstrap);
  void release() noexcept;
  void prepare(Bootstrap& bootstrap);
  void load_kernels();
  void make_lanes();
  void fill_memory();
  void write_placement(const std::vector<i32>& physical_of_logical, CUstream stream);
  void launch_nothing();
  CUdeviceptr allocate(std::size_t bytes);
  DispatchKernelParams prepare(int lane, const DispatchParams& params);
  CombineKernelParams prepare(int lane, const CombineParams& params);
  void note_dispatched(Lane& lane);
  Turn follow(CUstream stream, void* wait_event);
  void launch(const LoadedKernel& kernel, const DispatchKernelParams& params, const Turn& turn, int max_blocks);
  void launch(const LoadedKernel& kernel, const CombineKernelParams& params, const Turn& turn, int max_blocks);
  void raise_epochs(CUdeviceptr epochs, int num_run, int num_all, CUstream stream);
  void launch(const LoadedKernel& kernel, int num_blocks, std::size_t shared_bytes, void* params, CUstream stream);
  void launch(Phase phase, const CombineKernelParams& params, const Turn& turn, int max_blocks);
  const LoadedKernel& choose(const Kernels& kernels, Phase phase, int num_tokens) const;
  void add_device_counts(const Lane& lane, RuntimeStats& stats) const;

  Problem problem_;
  Plan plan_;
  CudaPlan cuda_plan_;
  std::shared_ptr<KernelMemory> memory_;
  Kernels dispatch_, combine_, combine_by_blocks_;
  i32* placement_ = nullptr;       // [num_logical_experts], with a placement
  CUstream own_stream_ = nullptr;  // for set-up and stats()
  StreamOrder order_;
  std::vector<Lane> lanes_;
  RuntimeStats stats_;
};

}  // namespace expertwire::cuda
