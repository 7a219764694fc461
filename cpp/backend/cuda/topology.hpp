// Who can reach whose memory: each rank's device as the others see it, and what follows for sharing memory.
#pragma once

#include <string>
#include <vector>

#include "backend/cuda/driver_types.hpp"

namespace expertwire::cuda {

struct RankDevice {
  char host[64] = {};  // boot and network namespace: descriptors can be passed between ranks where it is equal
  char name[64] = {};
  CUuuid uuid = {};
  bool has_descriptors = false;  // exports memory as file descriptors
  bool has_fabric = false;       // exports memory as fabric handles, where permitted
};

RankDevice describe_device(int device);

// "NVIDIA H200 (GPU-5d1f...)", as nvidia-smi -L names it.
std::string to_string(const RankDevice& device);

// Descriptors between the ranks of one host, fabric handles between several hosts. Throws Unsupported if a device cannot.
CUmemAllocationHandleType choose_handle_type(const std::vector<RankDevice>& ranks);

// Throws Unsupported, naming both devices, if the driver says that `device`, this rank's, cannot reach a peer's memory.
// Of devices that this process does not see, it cannot be asked: mapping their memory tells.
void require_peer_access(const std::vector<RankDevice>& ranks, int rank, int device);

// Whether this process sees a device.
bool is_visible(const CUuuid& uuid);

}  // namespace expertwire::cuda
