// A GPU as a place, and what it takes to time work there: captured graphs and events.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "backend/cuda/context.hpp"
#include "backend/cuda/driver_types.hpp"
#include "place.hpp"

namespace expertwire::bench {

class CudaPlace final : public Place {
 public:
  explicit CudaPlace(int device);
  ~CudaPlace() override;
  Device device() const override { return {DeviceType::CUDA, device_}; }
  void* stream() const override { return stream_.get(); }
  void* allocate(std::size_t bytes) override;
  void write(void* device, const void* host, std::size_t bytes) override;
  void read(void* host, const void* device, std::size_t bytes) override;
  void wait() override;
  int num_sms() const;

 private:
  int device_;
  cuda::PrimaryContext context_;
  cuda::Stream stream_;
  std::vector<cuda::CUdeviceptr> memory_;
};

// GPUs that this process sees. Throws Error (Unsupported) where none can be used.
int num_cuda_devices();

// What `work` puts on the stream of a place, captured, and ready to be launched there: the first launch loads nothing.
class Graph {
 public:
  Graph(const CudaPlace& place, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const;

 private:
  cuda::CUstream stream_;
  cuda::CUgraphExec graph_ = nullptr;
};

// A point in the work of a place's stream. The place outlives it, and is of the thread that uses it.
class Event {
 public:
  explicit Event(const CudaPlace& place);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;
  void record() const;
  // Both have been recorded and waited for.
  double microseconds_since(const Event& earlier) const;

 private:
  cuda::CUstream stream_;
  cuda::CUevent event_ = nullptr;
};

}  // namespace expertwire::bench
