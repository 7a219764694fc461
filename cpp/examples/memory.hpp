// Where one rank's arrays lie: in host memory, or in that of a GPU. The layer is the same for both.
#pragma once

#include <cstddef>
#include <memory>

#include "expertwire/types.hpp"

class Memory {
 public:
  virtual ~Memory() = default;
  virtual expertwire::Device device() const = 0;
  // For requests; null on the host.
  virtual void* stream() const = 0;
  // Lives as long as this object.
  virtual void* allocate(std::size_t num_bytes) = 0;
  // In either direction, after all that is on the stream; complete on return.
  virtual void copy(void* to, const void* from, std::size_t num_bytes) = 0;
};

std::unique_ptr<Memory> make_host_memory();
// On the GPU of this rank: they are taken in turn. Null if there is none, or the examples were built without CUDA.
std::unique_ptr<Memory> make_cuda_memory(int rank);
// On a GPU if there is one.
std::unique_ptr<Memory> make_memory(int rank);
