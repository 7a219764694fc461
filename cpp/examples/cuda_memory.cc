#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "memory.hpp"

namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

// A stream of its own for each rank: with several ranks on one GPU, what one of them waits for may be another's work.
class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(int device) : device_(device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~CudaMemory() override {
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    for (void* block : blocks_) cudaFree(block);
    cudaStreamDestroy(stream_);
  }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  expertwire::Device device() const override { return {expertwire::DeviceType::CUDA, device_}; }
  void* stream() const override { return stream_; }
  void* allocate(std::size_t num_bytes) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    void* block = nullptr;
    check(cudaMalloc(&block, num_bytes), "cudaMalloc");
    blocks_.push_back(block);
    return block;
  }
  void copy(void* to, const void* from, std::size_t num_bytes) override {
    // A copy behind a kernel that waits for another rank would hold up the copies of that rank.
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

}  // namespace

std::unique_ptr<Memory> make_cuda_memory(int rank) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return nullptr;
  return std::make_unique<CudaMemory>(rank % num_devices);
}
