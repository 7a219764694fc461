#include "place.hpp"

#include <cstring>
#include <vector>

#include "cuda_place.hpp"

namespace expertwire::bench {
namespace {

// The CPU has no streams: every call is complete when it returns.
class HostPlace final : public Place {
 public:
  Device device() const override { return {DeviceType::CPU, 0}; }
  void* stream() const override { return nullptr; }
  void* allocate(std::size_t bytes) override { return memory_.emplace_back(new std::byte[bytes + 1]()).get(); }
  void write(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void read(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  void wait() override {}

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }

  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace

std::unique_ptr<Place> make_place(const Device& device) {
  if (device.type == DeviceType::CUDA) return std::make_unique<CudaPlace>(device.index);
  return std::make_unique<HostPlace>();
}

}  // namespace expertwire::bench
