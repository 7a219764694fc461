#include "backend/cuda/host_report.hpp"

#include "backend/cuda/driver.hpp"
#include "backend/cuda/kept.hpp"
#include "expertwire/error.hpp"
#include "shared/inbox.cuh"

namespace expertwire::cuda {
namespace {

std::string id_text(const CallFault& fault, const Problem& problem) {
  const std::string slot = "topk_ids[" + std::to_string(fault.token) + ", " + std::to_string(fault.k) +
                           "] = " + std::to_string(fault.id) + " in dispatch " +
                           std::to_string(kPacketEpochs.number(fault.epoch)) + " on lane " +
                           std::to_string(fault.lane) + " of rank " + std::to_string(problem.rank);
  if (fault.kind == FaultKind::ID_REPEATED) return slot + ": the token names this expert twice; this slot was dropped";
  return slot + ": must be below " + problem.id_bound() + ", or negative to select nothing; this slot was dropped";
}

// What a wait for `loss.peer` has come to.
std::string loss_text(const LossReport& loss, const Problem& problem) {
  const std::string self = "this rank (" + std::to_string(loss.rank) + ")";
  const std::string bound = " within timeout_s = " + std::to_string(problem.config.timeout_s) + " s";
  if (loss.peer == loss.rank) return self + " was given up by its peers" + bound;
  if (loss.peer >= 0) return "rank " + std::to_string(loss.peer) + " did not arrive" + bound;
  const int row = row_of_producer(loss.peer), rows = problem.num_ranks * problem.config.max_tokens_per_rank;
  std::string where = std::to_string(row % rows);
  if (problem.config.output_layout == DispatchLayout::EXPERT_MAJOR)
    where += " of local expert " + std::to_string(row / rows);
  return self + " has waited in vain for the block of expert_output with row " + where +
         " to be published: its word of ready_signal, " + std::to_string(static_cast<std::int32_t>(loss.seen)) +
         ", did not become ready_value" + bound;
}

std::string handle_text(const CallFault& fault, int rank) {
  return "handle is stale: combine " + std::to_string(kPacketEpochs.number(fault.epoch)) + " on lane " +
         std::to_string(fault.lane) + " of rank " + std::to_string(rank) + ", a replay, answers call " +
         std::to_string(fault.wanted) + " of dispatch, but call " + std::to_string(fault.found) +
         " has used the lane since; its output is NaN";
}

}  // namespace

HostReport::HostReport() : words_(take_host_words()) {
  CUdeviceptr device = 0;
  const CUresult result = driver().cuMemHostGetDevicePointer(&device, words_, 0);
  if (result != CUDA_SUCCESS) put_back(words_);
  check(result, "cuMemHostGetDevicePointer");
  device_ = reinterpret_cast<HostWords*>(device);
}

// A forked child may find the list locked, by a thread that it does not have.
HostReport::~HostReport() {
  if (!process_.is_inherited()) put_back(words_);
}

void HostReport::raise_loss(const Problem& problem) const {
  if (!has_loss()) return;
  const LossReport& loss = words_->loss;
  const std::string operation = loss.operation == 0 ? "dispatch" : "combine";
  const std::uint32_t number = kPacketEpochs.number(loss.epoch);
  const std::string where = "peer lost, the communicator has ended; " + operation + " " + std::to_string(number) + ": ";
  throw Error(where + loss_text(loss, problem), {lost_peer()}, operation, number);
}

std::vector<int> HostReport::lost_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxGpuRanks; ++rank) {
    if (lost(rank) != LossKind::NONE || (has_loss() && lost_peer() == rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::uint64_t HostReport::num_timeouts() const {
  std::uint64_t count = has_loss() && lost_peer() != words_->loss.rank ? 1 : 0;
  for (int rank = 0; rank < kMaxGpuRanks; ++rank) count += lost(rank) == LossKind::TIMED_OUT ? 1 : 0;
  return count;
}

void HostReport::raise_fault(const Problem& problem) {
  if (load_acquire(words_->fault.kind) == FaultKind::NONE) return;
  const CallFault fault = words_->fault;  // whole: a kernel writes the kind last
  std::atomic_ref(words_->fault.kind)
      .store(FaultKind::NONE, std::memory_order_release);  // a kernel may report the next
  if (fault.kind == FaultKind::HANDLE_STALE) throw Error(ErrorCode::InvalidHandle, handle_text(fault, problem.rank));
  throw Error(ErrorCode::InvalidArgument, id_text(fault, problem));
}

}  // namespace expertwire::cuda
