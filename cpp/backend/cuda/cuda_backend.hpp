// The CUDA backend: one kernel for each operation, on the caller's stream. Nothing here waits for the GPU but construction,
// stats() and destruction. The hot path is launch().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/context.hpp"
#include "backend/cuda/cuda_plan.hpp"
#include "backend/cuda/host_report.hpp"
#include "backend/cuda/memory.hpp"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {

// A compiled kernel, loaded: resident before its first launch.
class KernelModule {
 public:
  KernelModule(const KernelImage& image, const Variant& variant, std::size_t shared_bytes);
  ~KernelModule();
  KernelModule(KernelModule&& other) noexcept;
  KernelModule& operator=(KernelModule&&) = delete;
  CUfunction function() const { return function_; }
  int num_threads() const { return num_threads_; }

 private:
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  int num_threads_ = 0;
};

struct CommonWords {  // of all lanes, in memory of the GPU
  u32 abort;
  LossState losses;
  // Behind it, with a placement: Problem::physical_of_logical.
};

// Device memory of this rank alone.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  CUdeviceptr address() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

class CudaBackend final : public Backend {
 public:
  // Collective.
  CudaBackend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap);
  ~CudaBackend() override;

  const LaneBuffers& lane_buffers(int lane) const override { return lanes_[static_cast<std::size_t>(lane)].buffers; }
  void dispatch(int lane, const DispatchParams& params) override;
  void combine(int lane, const CombineParams& params) override;
  RuntimeStats stats() const override;
  std::vector<int> lost_ranks() const override;
  bool is_available() const noexcept override { return !report_->has_loss(); }
  void check() override;
  void check_update(void* stream) override;
  void update_placement(std::vector<i32> physical_of_logical, void* stream) override;
  void close() noexcept override {}

 private:
  struct Lane {
    LaneBuffers buffers;
    LaneParams params;
    u32 call = 0;  // number of the dispatch that used it last
  };

  void build(Bootstrap& bootstrap);
  void release() noexcept;
  void prepare(Bootstrap& bootstrap);
  void load_kernels();
  void make_lanes();
  void fill_memory();
  void write_placement(CUstream stream);
  const i32* placement_table() const;
  void launch_nothing();
  void follow(CUstream stream);
  void launch(const KernelModule& kernel, const DispatchKernelParams& params, CUstream stream);
  void launch(const KernelModule& kernel, const CombineKernelParams& params, CUstream stream);
  void launch(const KernelModule& kernel, int num_blocks, std::size_t shared_bytes, void* params, CUstream stream);
  const KernelModule& choose(const std::vector<KernelModule>& kernels, int num_tokens) const;
  void add_device_counts(const Lane& lane, RuntimeStats& stats) const;

  Problem problem_;
  Plan plan_;
  CudaPlan cuda_plan_;
  std::optional<PrimaryContext> context_;
  std::vector<KernelModule> dispatch_, combine_;  // for few tokens and, where that occurs, for many
  std::optional<SymmetricMemory> inboxes_;
  std::vector<DeviceMemory> memory_;  // outputs and state of every lane, then the words of all lanes
  std::optional<HostReport> report_;
  CUstream own_stream_ = nullptr;  // for set-up and stats()
  CUevent last_work_ = nullptr;
  std::optional<CUstream> last_stream_;
  std::vector<Lane> lanes_;
  RuntimeStats stats_;
};

}  // namespace expertwire::cuda
