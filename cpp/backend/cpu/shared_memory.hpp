// Memory of the CPU backend: segments that all ranks of a group map, and private blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/descriptor.hpp"

namespace expertwire::cpu {

// A mapping, unmapped on destruction.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Zeroed private memory; pages cost nothing until they are touched.
Mapping map_private(std::size_t bytes);

// One rank's shared segment: a memfd, so that nothing has a name in the file system and nothing is left when a process
// is killed. The descriptor is kept by the owner only, until it has been handed to every peer.
struct Segment {
  Descriptor descriptor;
  Mapping mapping;
  std::byte* at(std::uint64_t offset) const { return mapping.data() + offset; }
};

// Zeroed. Pages are taken from the machine as they are touched: DIRECT_SEND lays out room for every token choosing all its
// experts on one rank, and uses a fraction of it.
std::shared_ptr<Segment> create_segment(std::size_t bytes);
// Maps a segment received from a peer and checks its size.
std::shared_ptr<Segment> open_segment(Descriptor descriptor, std::size_t bytes);

}  // namespace expertwire::cpu
