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
#include "backend/cuda/memory.hpp"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {

// A compiled variant, loaded: both kernels are resident before the first launch of either.
class KernelModule {
 public:
  KernelModule(const Problem& problem, const CudaPlan& plan, const Variant& variant);
  ~KernelModule();
  KernelModule(KernelModule&& other) noexcept;
  KernelModule& operator=(KernelModule&&) = delete;
  CUfunction dispatch() const { return dispatch_; }
  CUfunction combine() const { return combine_; }
  int num_threads() const { return num_threads_; }

 private:
  CUmodule module_ = nullptr;
  CUfunction dispatch_ = nullptr, combine_ = nullptr;
  int num_threads_ = 0;
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

// A word block that kernels write and the host reads without asking the driver.
class HostReport {
 public:
  HostReport();
  ~HostReport();
  HostReport(const HostReport&) = delete;
  HostReport& operator=(const HostReport&) = delete;
  bool is_set() const { return static_cast<volatile const LossReport*>(report_)->set != 0; }
  const LossReport& get() const { return *report_; }
  LossReport* device_pointer() const { return device_; }

 private:
  LossReport* report_ = nullptr;
  LossReport* device_ = nullptr;
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
  bool is_available() const noexcept override { return !report_->is_set(); }
  void check() override;
  void close() noexcept override {}

 private:
  struct Lane {
    LaneBuffers buffers;
    LaneParams params;
    bool dispatched_with_weights = false;
  };

  void build(Bootstrap& bootstrap);
  void release() noexcept;
  void prepare(Bootstrap& bootstrap);
  void make_lanes();
  void fill_memory();
  void launch_nothing();
  void follow(CUstream stream);
  template <typename Params>
  void launch(CUfunction function, int num_threads, int num_blocks, std::size_t shared_bytes, const Params& params,
              CUstream stream);
  bool is_small(int num_tokens) const;

  Problem problem_;
  Plan plan_;
  CudaPlan cuda_plan_;
  std::optional<PrimaryContext> context_;
  std::vector<KernelModule> modules_;  // small work, large dispatch, large combine
  std::optional<SymmetricMemory> inboxes_;
  std::vector<DeviceMemory> memory_;  // outputs and state of every lane, then the abort word
  std::optional<HostReport> report_;
  CUstream own_stream_ = nullptr;  // for set-up and stats()
  CUevent last_work_ = nullptr;
  std::optional<CUstream> last_stream_;
  std::vector<Lane> lanes_;
  RuntimeStats stats_;
};

}  // namespace expertwire::cuda
