/// @file
/// Expert-parallel dispatch and combine. types.hpp explains the symbols.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"
#include "expertwire/types.hpp"

namespace [[gnu::visibility("default")]] expertwire {

/// Names one dispatch of one runtime. A small value: copy it freely. It goes stale when its lane is dispatched again,
/// that is after F newer dispatches; combine refuses it then, as it refuses an empty one and one of another runtime.
/// Until then it may be combined again.
class DispatchHandle {
 public:
  DispatchHandle() = default;
  /// Names nothing: not made by dispatch.
  bool empty() const noexcept { return runtime_id_ == 0; }
  /// Which LaneBuffers hold the output.
  int lane() const noexcept { return lane_; }
  /// T of this rank in that dispatch.
  int num_tokens() const noexcept { return num_tokens_; }

 private:
  friend class MoERuntime;
  std::uint64_t runtime_id_ = 0;
  std::uint64_t sequence_ = 0;
  int lane_ = 0;
  int num_tokens_ = 0;
};

/// Inputs of one dispatch. The caller owns all of them, in the memory of the device. The runtime reads them before
/// dispatch returns (CPU) or in stream order (CUDA) and keeps none: ids and weights that combine needs are copied. Each
/// pointer is a multiple of its element's size, those of rows on CUDA of 16, and no input may overlap what the call writes.
struct LatencyDispatchRequest {
  /// [T, H] BF16, or E4M3 if block_scales is given. May be null if num_tokens is 0.
  const void* x = nullptr;
  /// FP8_E4M3 and MXFP8 only: x is quantised already, and these are its scales: [T, S] float32, or UE8M0 [T, ceil(S/4)]
  /// int32.
  const void* block_scales = nullptr;
  /// [T, K] of topk_ids_type: global ids below E (with a placement logical ids, below G), none twice in a token;
  /// negative: this slot selects nothing. May be null if num_tokens is 0. The CPU refuses wrong ids; CUDA, which may
  /// not stop to look, drops them.
  const void* topk_ids = nullptr;
  IndexType topk_ids_type = IndexType::INT64;
  /// [T, K]; null: 1 everywhere.
  const float* weights = nullptr;
  /// T, 0 to M; may differ between ranks and calls.
  int num_tokens = 0;
  /// Where received rows go instead of LaneBuffers::tokens; of its shape, the caller's, and apart from the other buffers
  /// of the lane that dispatch writes.
  void* output_buffer = nullptr;
  /// CUDA: the stream (cudaStream_t or CUstream; null is the default stream) that the operation is put on. It must live
  /// until the runtime's next operation on another stream, or close(). Must be null on the CPU.
  void* stream = nullptr;
  /// CUDA: an event (cudaEvent_t or CUevent) that the operation waits for. Must be null on the CPU.
  void* wait_event = nullptr;
  /// CUDA: at most so many blocks, for this operation alone; 0: as configured. No effect on the CPU.
  int max_num_blocks = 0;
};

/// Lets combine begin while its expert rows are still being made: it takes each block of rows as soon as a producer has
/// published it, by storing `value` in the block's word after the rows (release). Blocks are block_size_m consecutive rows
/// of one local expert (EXPERT_MAJOR: words [L, ceil(R*M / block_size_m)]) or of all (RANK_MAJOR: words
/// [ceil(R*M / block_size_m)]; a row is all K slots of it). Words of blocks without a valid row are not looked at. Only
/// the producer writes words; it sets them back, or uses another value, before the next combine. docs/overlap.md has the
/// protocol. On CUDA words and rows are in memory of the device, and RuntimeConfig::block_overlap is needed.
struct ReadySignal {
  const std::int32_t* words = nullptr;  ///< null: all rows are there
  int block_size_m = 0;
  std::int32_t value = 0;
};

/// Inputs and the output of one combine, all owned by the caller but for the runtime's own buffers. The runtime is done
/// with them when combine returns (CPU) or in stream order (CUDA).
struct LatencyCombineRequest {
  /// BF16 rows in the order of the dispatch output: EXPERT_MAJOR [L, R*M, H], RANK_MAJOR [R*M, H] already weighted and
  /// summed by the caller, RANK_MAJOR with DIRECT_SEND [R*M, K, H] already weighted. LaneBuffers::combine_input or any
  /// other array. May be null on a rank without experts.
  const void* expert_output = nullptr;
  /// What the dispatch returned whose rows these are.
  DispatchHandle handle;
  /// [T, K], EXPERT_MAJOR only: used instead of the weights given at dispatch. Ranks need not agree on whether they give
  /// them; on CUDA with RANK_LOCAL_REDUCE it is slow if only some do and dispatch was given weights.
  const float* weights = nullptr;
  /// [T, H] BF16; zeros for a token that selected nothing. May be null if num_tokens is 0. Must not overlap the inputs.
  void* out = nullptr;
  /// T of that dispatch.
  int num_tokens = 0;
  /// These three as in LatencyDispatchRequest.
  void* stream = nullptr;
  void* wait_event = nullptr;
  int max_num_blocks = 0;
  /// If a block is not published within timeout_s after the one before it (CPU), or after the first look at it (CUDA), the
  /// operation, on CUDA the next one, throws PeerLost naming this rank. On CUDA a max_num_blocks of 0 then means half of
  /// those configured: the others are the producer's.
  ReadySignal ready;
};

/// Reserved: requests of the throughput mode. Every use is refused with ErrorCode::Unsupported.
struct ThroughputDispatchRequest {
  LatencyDispatchRequest request;
};
/// Reserved, as ThroughputDispatchRequest.
struct ThroughputCombineRequest {
  LatencyCombineRequest request;
};

/// One rank's end of a group that exchanges tokens.
///
/// **Who calls together.** Members marked collective are called by every rank of the group in the same order, each with
/// its own tokens. All others concern this rank alone.
///
/// **Threads.** One thread at a time per object. Different objects are independent.
///
/// **Streams.** On the CPU an operation is complete when its call returns. On CUDA it is put on the request's stream
/// and the call does not wait for the GPU; operations of one runtime run one after another also when their streams
/// differ; where the stream of the last one outside of a graph is being captured, one on another stream is refused. All
/// may be captured into a graph, which keeps the runtime's memory and so may outlive it; arrays of the caller remain the
/// caller's to keep.
///
/// **Errors.** All are Error, but for std::bad_alloc after construction and what a bootstrap of the caller's throws. What
/// the host can see is checked before anything is sent: such a call counts for nothing, the peers wait within timeout_s
/// for this rank's corrected one, and the runtime stays usable. Once a peer is lost under PeerLossPolicy::RAISE every
/// later operation throws PeerLost. After close() operations throw InvalidArgument. On CUDA any operation may throw Backend:
/// the driver has refused it, in its words; nothing was sent or received then.
///
/// **Forks.** A forked child has no part in a runtime of its parent: whatever asks for more than constants throws
/// InvalidArgument there, and its end leaves the parent's runtime alone.
///
/// **Memory.** All of it is allocated at construction.
class MoERuntime {
 public:
  /// Collective: every rank gets a runtime, or every rank throws.
  /// @param bootstrap  kept until the constructor returns, with a placement for the life of the runtime; used by nobody
  ///                   else during the constructor and update_placement()
  /// @throws Error InvalidArgument if a field is wrong, or ranks differ in one (naming it and every rank's value);
  ///         Unsupported; Backend if the system or driver refused, or memory ran out; PeerLost if a rank does not come
  MoERuntime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config);
  /// close(), and frees the buffers. Not collective, never throws, and safe after a peer was lost. On CUDA it waits for
  /// this runtime's own operations, whose waits are bounded.
  ~MoERuntime();
  MoERuntime(const MoERuntime&) = delete;
  MoERuntime& operator=(const MoERuntime&) = delete;

  /// Collective. Sends this rank's tokens to the ranks of their experts, and receives those for its own into the
  /// buffers of next_lane().
  /// @return the handle that combine takes
  /// @throws Error InvalidArgument; InvalidHandle while the lane holds what was sent and not received; PeerLost
  DispatchHandle dispatch(const LatencyDispatchRequest& request);
  /// Collective, with the handle of the same dispatch on every rank. Returns expert outputs to their tokens' ranks,
  /// which sum them into request.out.
  /// @throws Error InvalidArgument, InvalidHandle, Unsupported, PeerLost
  void combine(const LatencyCombineRequest& request);

  /// @name The same in two phases
  /// Send now, receive later: between the two nothing is held, neither a core nor an SM, and the rows travel. All four
  /// are collective, and sends and receives each come in the same order on every rank, with blocking operations among
  /// the sends; a rank may receive earlier or later than others. It may do an operation in two phases that others do
  /// in one.
  ///
  /// Inputs are done with after the send, as with the blocking call; outputs are valid after the receive. On a lane a
  /// dispatch is received before it is combined, and both are received before it is dispatched again: F lanes
  /// allow F dispatches with their combines under way. Another order is refused with InvalidHandle. Waits of the
  /// receive have timeout_s from its start on. CUDA needs RuntimeConfig::two_phase.
  /// @{

  /// Sends this rank's tokens. The handle is good for dispatch_receive, and after that for combine.
  /// @throws Error as dispatch; Unsupported
  DispatchHandle dispatch_send(const LatencyDispatchRequest& request);
  /// Receives into the buffers of the handle's lane, or into output_buffer of the request.
  /// @param stream  CUDA: what the receive is put on; it runs after all earlier operations of this runtime
  /// @throws Error InvalidHandle if there is nothing to receive for the handle; InvalidArgument if the stream cannot be used
  ///     now (CUDA; receive again); PeerLost
  void dispatch_receive(const DispatchHandle& handle, void* stream = nullptr);
  /// Sends expert outputs back. EXPERT_MAJOR with RANK_LOCAL_REDUCE sums before it sends: it waits for the weights of
  /// ranks that gave none to dispatch, and takes none in place of those that this rank gave there.
  /// @throws Error as combine; Unsupported
  void combine_send(const LatencyCombineRequest& request);
  /// Receives and sums into `out` of the request.
  /// @param handle  of the dispatch that was combined
  /// @throws Error as dispatch_receive; on the CPU also InvalidArgument for weights that ranks do not agree on
  void combine_receive(const DispatchHandle& handle, void* stream = nullptr);
  /// Before dispatch_receive: whether it would not wait (CPU); false (CUDA). After it: whether the outputs are there. A
  /// stale handle gets the answer for the dispatch that uses its lane now. On CUDA false after a dispatch in one phase,
  /// whose end the stream tells.
  /// @throws Error InvalidHandle if the handle is empty or of another runtime
  bool dispatch_done(const DispatchHandle& handle);
  /// The same of the combine that was sent last for the handle; false if none was.
  bool combine_done(const DispatchHandle& handle);
  /// @}

  /// @throws Error Unsupported, always
  DispatchHandle dispatch(const ThroughputDispatchRequest& request);
  /// @throws Error Unsupported, always
  void combine(const ThroughputCombineRequest& request);

  /// Collective, at the same place in the order of operations on every rank. Dispatches after it, in the order of the
  /// stream on CUDA, go by another placement, and those before it and their combines by theirs, also when they are still
  /// under way. The weights of experts that move are the caller's to move. Only for a runtime that was constructed with
  /// a placement; the new one holds as many logical experts. If it is refused on one rank, or ranks differ, every rank
  /// throws, and the old one stays.
  /// @param stream      CUDA: where in the order of work the table is replaced; not one that is being captured. The call
  ///                    waits for the work that it holds. Replayed graphs go by the table of the time of their replay, if
  ///                    they are launched in this order
  /// @param collective  false: nothing is exchanged, and this rank's table is replaced; that all who go on give the same
  ///                    one is up to the caller. For those who are left when a rank was lost
  /// @throws Error InvalidArgument, PeerLost, Backend: the driver refused the copy after all had agreed, so that this rank
  ///     alone has the old table: call again with collective = false
  void update_placement(const std::vector<int>& placement, void* stream = nullptr, bool collective = true);

  int rank() const noexcept;
  int num_ranks() const noexcept;
  /// L; may be 0.
  int num_local_experts() const noexcept;
  /// Global id of local expert 0.
  int first_local_expert() const noexcept;
  MoEMode mode() const noexcept;
  /// As given, with every default filled in, and the placement of the last update. Lives as long as the runtime.
  const RuntimeConfig& config() const noexcept;
  /// Neither closed nor ended by a lost peer.
  bool is_available() const noexcept;
  /// Lane of the next dispatch, 0 to F - 1.
  int next_lane() const noexcept;

  /// @throws Error InvalidArgument unless lane is 0 to F - 1
  const LaneBuffers& lane_buffers(int lane) const;
  /// LaneBuffers::tokens of the next dispatch.
  void* dispatch_output_buffer() const;
  /// LaneBuffers::combine_input of the last dispatch; of lane 0 before the first.
  void* combine_input_buffer() const;

  /// On CUDA this waits for a copy of the counters, which may run beside operations under way and count them in part.
  /// @throws Error Backend (CUDA)
  RuntimeStats stats() const;
  MemoryBytes memory_bytes() const noexcept;
  /// Ranks that this rank has lost so far, in ascending order.
  std::vector<int> lost_ranks() const;
  /// Throws what an operation would: on CUDA, what the device has reported so far.
  /// @throws Error InvalidArgument after close(), PeerLost
  void check();
  /// Takes this rank out. Not collective: peers that still wait for it, now or later, are told (CUDA: find out by their
  /// time-out). Twice is fine. Buffers live until destruction.
  void close() noexcept;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertwire
