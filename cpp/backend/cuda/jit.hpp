// Kernels compiled for one configuration and architecture, and kept on disk. Needs NVRTC, but neither GPU nor driver.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backend/backend.hpp"

namespace expertwire::cuda {

// Compiles a source, which may include the kernel headers by their path, such as "dispatch.cuh" after a definition of
// `namespace expertwire::config` (device/wire.cuh lists its constants); `architecture` is such as "sm_90a". Any number of
// threads and processes may ask for the same at once. Throws InvalidArgument or Unsupported for an architecture,
// Unsupported without NVRTC, Backend with the log of a failed compilation. A cache that cannot be read or written costs
// time alone.
KernelImage compile_source(const std::string& source, const std::string& architecture);

// The same for several, side by side.
std::vector<KernelImage> compile_sources(const std::vector<std::string>& sources, const std::string& architecture);

// 90 for "sm_90" and "sm_90a". Throws InvalidArgument or Unsupported.
int architecture_number(const std::string& architecture);

// What a compiler's log says of each kernel, by name.
std::map<std::string, KernelResources> kernel_resources(const std::string& log);

}  // namespace expertwire::cuda
