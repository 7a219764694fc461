#include <cstring>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace {

class HostMemory final : public Memory {
 public:
  expertwire::Device device() const override { return {expertwire::DeviceType::CPU, 0}; }
  void* stream() const override { return nullptr; }
  void* allocate(std::size_t num_bytes) override {
    blocks_.push_back(std::make_unique<std::byte[]>(num_bytes));
    return blocks_.back().get();
  }
  void copy(void* to, const void* from, std::size_t num_bytes) override {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

}  // namespace

std::unique_ptr<Memory> make_host_memory() { return std::make_unique<HostMemory>(); }

std::unique_ptr<Memory> make_memory(int rank) {
  std::unique_ptr<Memory> on_gpu = make_cuda_memory(rank);
  return on_gpu ? std::move(on_gpu) : make_host_memory();
}
