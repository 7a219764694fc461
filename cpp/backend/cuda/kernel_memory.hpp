// The memory that a communicator's kernels touch. A graph that holds one of them keeps it as well, so that a replay finds it
// however late: one that is still running when the communicator goes, or is launched afterwards.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backend/cuda/allocation.hpp"
#include "backend/cuda/context.hpp"
#include "backend/cuda/host_report.hpp"
#include "backend/cuda/memory.hpp"

namespace expertwire::cuda {

struct KernelMemory {
  explicit KernelMemory(int device) : context(device) {}

  PrimaryContext context;  // outlives the rest
  std::optional<SymmetricMemory> inboxes;
  std::vector<Mapping> own;  // of this rank alone: outputs and state of every lane, then the words of all lanes
  std::optional<HostReport> report;
  std::shared_ptr<KernelMemory> kept_before;  // of those that are kept for good
};

// Has a graph, also one that is being captured, keep the memory until it and all that is made from it have gone and have ended.
void keep_for_graph(CUgraph graph, const std::shared_ptr<KernelMemory>& memory);

// Never releases it: work that cannot be waited for may touch it.
void keep_for_good(std::shared_ptr<KernelMemory> memory) noexcept;

// Releases what graphs have let go of. They cannot do it themselves: where they say so, the driver allows no calls to it.
void release_what_graphs_dropped() noexcept;

}  // namespace expertwire::cuda
