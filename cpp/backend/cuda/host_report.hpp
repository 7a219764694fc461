// What kernels tell the host without being asked: who was lost, and what a caller did wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "base/own_process.hpp"
#include "shared/kernel_params.cuh"

namespace expertwire::cuda {

// Pinned memory that kernels write and the host reads without asking the driver. Needs a current context.
class HostReport {
 public:
  HostReport();
  ~HostReport();
  HostReport(const HostReport&) = delete;
  HostReport& operator=(const HostReport&) = delete;

  HostWords* device_pointer() const { return device_; }
  bool has_loss() const { return load_acquire(words_->loss.set) != 0; }
  // Throws PeerLost if the communicator has ended.
  void raise_loss(const Problem& problem) const;
  // Ascending: the rank by which the communicator has ended, or those that it goes on without.
  std::vector<int> lost_ranks() const;
  std::uint64_t num_timeouts() const;  // ranks that this one has waited for in vain
  // Throws what a kernel has reported since the last call: InvalidArgument for expert ids, InvalidHandle for a replay
  // whose handle was stale. The communicator is as before.
  void raise_fault(const Problem& problem);

 private:
  // What a kernel has written before the word is seen with it.
  template <typename T>
  static T load_acquire(T& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  }
  // The rank by which the communicator has ended: with a producer that was late, its own.
  int lost_peer() const { return words_->loss.peer < 0 ? words_->loss.rank : words_->loss.peer; }
  LossKind lost(int rank) const { return load_acquire(words_->lost[rank]); }

  OwnProcess process_;
  HostWords* words_ = nullptr;
  HostWords* device_ = nullptr;
};

}  // namespace expertwire::cuda
