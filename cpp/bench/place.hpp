// Where a rank lives: its device, the stream of its operations, and memory there.
#pragma once

#include <cstddef>
#include <memory>

#include "expertwire/types.hpp"

namespace expertwire::bench {

class Place {
 public:
  virtual ~Place() = default;
  virtual Device device() const = 0;
  virtual void* stream() const = 0;  // as requests take it
  // Memory on the device, for the life of the place.
  virtual void* allocate(std::size_t bytes) = 0;
  // Copies to and from the device, behind all work on the stream; the host's memory may be used again at once.
  virtual void write(void* device, const void* host, std::size_t bytes) = 0;
  virtual void read(void* host, const void* device, std::size_t bytes) = 0;
  // For all work on the stream.
  virtual void wait() = 0;
};

// Ranks that share a GPU wait for each other inside their kernels: once one of them has begun, allocate no more, and let
// no place end before all have finished. Throws Error where there is no such device.
std::unique_ptr<Place> make_place(const Device& device);

}  // namespace expertwire::bench
