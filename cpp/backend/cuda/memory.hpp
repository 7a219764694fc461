// Memory of which every rank has a part and every rank's device reaches all parts.
//
// A part is an allocation of the driver's virtual memory management. Between ranks of one host it travels as a file
// descriptor, also between ranks of one process and between ranks that share a GPU; between hosts joined by NVLink as a
// fabric handle. cudaIpc handles are not used: this version refuses what would need them (Unsupported, with the reason).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/cuda/allocation.hpp"
#include "backend/cuda/context.hpp"
#include "backend/cuda/topology.hpp"
#include "base/descriptor.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire::cuda {

class SymmetricMemory {
 public:
  // Collective: succeeds on every rank or throws on every rank. `device` is an ordinal, `bytes` the size of a part, equal
  // on all ranks. Each mapping has carried a real write when this returns; what the parts hold then is unspecified.
  SymmetricMemory(Bootstrap& bootstrap, int device, std::size_t bytes);
  // Wait first for the work of this rank that uses the memory. Peers may go on: a part that a peer has mapped lives on
  // until that peer unmaps it, also when its owner's process has ended.
  ~SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // Where this rank's device sees a rank's part. Ranks on one GPU see a part at different addresses: accesses that another
  // rank is to see while kernels run must be of system scope.
  CUdeviceptr address(int rank) const { return parts_[static_cast<std::size_t>(rank)].address(); }
  // Size of this rank's part: what was asked for, rounded up to what the driver maps.
  std::size_t bytes() const { return parts_[static_cast<std::size_t>(rank_)].bytes(); }
  // True once the process of a rank has ended. False where that cannot be known: ranks of this process, of another host,
  // and on kernels without pidfd.
  bool has_exited(int rank) const;

 private:
  struct Member;
  struct SharedPart;
  void share_by_descriptor(Bootstrap& bootstrap, const Allocation& own);
  void share_by_fabric(Bootstrap& bootstrap, const Allocation& own);
  void map_parts(const std::vector<SharedPart>& shared, CUmemAllocationHandleType type);
  std::string part_text(int rank) const;
  void write_marks();
  void require_marks();

  int rank_;
  int device_;
  std::optional<PrimaryContext> context_;  // outlives the mappings
  std::vector<RankDevice> devices_;        // by rank, as the next three
  std::vector<std::uint32_t> nonces_;
  std::vector<Mapping> parts_;
  std::vector<Descriptor> processes_;
};

}  // namespace expertwire::cuda
