// Device memory by the driver's virtual memory management: an allocation, and a place in the address space to see it at.
#pragma once

#include <cstddef>

#include "backend/cuda/driver_types.hpp"
#include "base/descriptor.hpp"
#include "base/own_process.hpp"

namespace expertwire::cuda {

// Holds one allocation by its handle. The memory lives for as long as any process has a handle, a mapping or an exported
// descriptor of it.
class Allocation {
 public:
  Allocation() = default;
  // On a device by its ordinal, at least `bytes`, to be exported as `type`.
  Allocation(int device, std::size_t bytes, CUmemAllocationHandleType type);
  // Of a peer, as cuMemImportFromShareableHandle takes it; `bytes` is the owner's size.
  Allocation(void* shared_handle, CUmemAllocationHandleType type, std::size_t bytes);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  Allocation(Allocation&& other) noexcept;
  Allocation& operator=(Allocation&& other) noexcept;

  CUmemGenericAllocationHandle handle() const { return handle_; }
  std::size_t bytes() const { return bytes_; }  // a multiple of the device's granularity
  Descriptor export_descriptor() const;
  CUmemFabricHandle export_fabric() const;

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;
};

// An allocation, readable and writable by one device at an address; unmapped on destruction. Keeps the memory, not the
// handle.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Allocation& allocation, int device);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  CUdeviceptr address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Mapping& other) noexcept;

  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
  bool is_mapped_ = false;
  OwnProcess process_;
};

}  // namespace expertwire::cuda
