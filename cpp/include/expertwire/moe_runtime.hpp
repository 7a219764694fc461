// expert-parallel dispatch and combine. See types.hpp for the symbols.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"
#include "expertwire/types.hpp"

namespace expertwire {

// Names one dispatch of one runtime. A small value: copy it freely. It goes stale when its lane is dispatched again, that
// is after F newer dispatches; combine refuses it then, as it refuses an empty one and one of another runtime.
class DispatchHandle {
 public:
  DispatchHandle() = default;
  bool empty() const noexcept { return runtime_id_ == 0; }
  int lane() const noexcept { return lane_; }              // which LaneBuffers hold the output
  int num_tokens() const noexcept { return num_tokens_; }  // T of this rank

 private:
  friend class MoERuntime;
  std::uint64_t runtime_id_ = 0;
  std::uint64_t sequence_ = 0;
  int lane_ = 0;
  int num_tokens_ = 0;
};

// Inputs of one dispatch. The runtime reads them before dispatch returns (CPU) or in stream order (CUDA) and keeps none.
struct LatencyDispatchRequest {
  const void* x = nullptr;             // [T, H] BF16; E4M3 if block_scales is set. May be null if num_tokens is 0.
  const void* block_scales = nullptr;  // rows are quantised already: [T, S] float32, or UE8M0 [T, ceil(S/4)] int32
  const void* topk_ids = nullptr;      // [T, K] global ids, negative: this slot selects nothing
  IndexType topk_ids_type = IndexType::INT64;
  const float* weights = nullptr;  // [T, K]; null: 1 everywhere
  int num_tokens = 0;              // T <= M, may differ between ranks and calls
  void* output_buffer = nullptr;   // caller's tokens array instead of LaneBuffers::tokens
  void* stream = nullptr;          // CUDA stream; an error on the CPU
};

struct LatencyCombineRequest {
  const void* expert_output = nullptr;  // BF16, rows in the order of the dispatch output
  DispatchHandle handle;
  const float* weights = nullptr;  // [T, K]; replaces the weights given at dispatch (EXPERT_MAJOR only)
  void* out = nullptr;             // [T, H] BF16
  int num_tokens = 0;              // T of the dispatch
  void* stream = nullptr;
};

// Reserved: requests of the throughput mode. Every use is refused with ErrorCode::Unsupported.
struct ThroughputDispatchRequest {
  LatencyDispatchRequest request;
};
struct ThroughputCombineRequest {
  LatencyCombineRequest request;
};

// One rank's end of a group. All members that say "collective" are called by every rank in the same order. One thread at
// a time. After close(), or once a peer is lost under PeerLossPolicy::RAISE, operations throw.
class MoERuntime {
 public:
  // Collective. Throws on every rank if any rank cannot be built: InvalidArgument (also when ranks disagree on a field,
  // naming it), Unsupported, Backend, PeerLost.
  MoERuntime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config);
  ~MoERuntime();  // close()
  MoERuntime(const MoERuntime&) = delete;
  MoERuntime& operator=(const MoERuntime&) = delete;

  // Collective. Sends this rank's tokens and receives those for its experts into the next lane's buffers. An error the
  // host can see is thrown before anything is sent and consumes no epoch.
  DispatchHandle dispatch(const LatencyDispatchRequest& request);
  // Collective. Returns expert outputs to their tokens' ranks and sums them into request.out.
  void combine(const LatencyCombineRequest& request);
  DispatchHandle dispatch(const ThroughputDispatchRequest& request);
  void combine(const ThroughputCombineRequest& request);

  int rank() const noexcept;
  int num_ranks() const noexcept;
  int num_local_experts() const noexcept;
  int first_local_expert() const noexcept;
  MoEMode mode() const noexcept;
  const RuntimeConfig& config() const noexcept;  // with every default resolved
  bool is_available() const noexcept;            // neither closed nor ended by a lost peer
  int next_lane() const noexcept;                // lane of the next dispatch

  const LaneBuffers& lane_buffers(int lane) const;
  void* dispatch_output_buffer() const;  // tokens of the next dispatch's lane
  void* combine_input_buffer() const;    // of the last dispatch's lane (of lane 0 before the first)

  RuntimeStats stats() const;
  MemoryBytes memory_bytes() const noexcept;
  std::vector<int> lost_ranks() const;
  void check();           // throws what was reported since the last call
  void close() noexcept;  // not collective: peers that still wait are told; twice is fine

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertwire
