// What a process keeps once it has it, for the next communicator: to give it back, the driver waits for all that runs on the
// device, other ranks' kernels included. Each kernel is there once for each device, and as many host words as communicators
// have lived at a time.
#pragma once

#include <string>

#include "backend/cuda/driver_types.hpp"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {

// The module of a compiled kernel on a device, whose primary context is current. Threads may share it.
CUmodule loaded_module(int device, const std::string& cubin);

// Pinned memory that kernels of all devices can write, cleared; to be put back after the last kernel that does.
HostWords* take_host_words();
void put_back(HostWords* words);

}  // namespace expertwire::cuda
