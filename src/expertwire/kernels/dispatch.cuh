// dispatch: one kernel, every block for itself.
//
//   route    the block marks which tokens chose which rank and (EXPERT_MAJOR) which expert, in shared memory. Positions are
//            counts of bits: the same whatever the timing, and no block needs another.
//   send     a warp takes a piece of a token and stores it to every rank that wants it; in RANK_MAJOR its own rank's copy
//            goes straight to its place. The piece with the row's start also sends tags and weights.
//   receive  a warp takes a piece of a row of any source, waits for it, stores it to its rows, and puts the sentinel back.
#pragma once

#include "device/dispatch_receive.cuh"
#include "device/dispatch_send.cuh"

namespace expertwire {

// Ids and weights of padding rows are defined.
__device__ inline void clear_padding(const DispatchContext& c) {
  if constexpr (!config::kRankMajor) return;
  for (i32 i = grid_thread(); i < kSourceRows * kTopk; i += grid_threads()) {
    const i32 row = i / kTopk;
    if (row % kMaxTokens < c.marks.num_rows[row / kMaxTokens]) continue;
    c.p.out_topk_ids[i] = config::kInvalidId;
    c.p.out_weights[i] = 0.0f;
  }
}

// Tags and weights that the dispatch before received: every block has read them, for its kernel has ended.
__device__ inline void clear_old_tags(const DispatchContext& c) {
  const u32 old_buffer = (c.buffers.route + kNumRouteBuffers - 1) % kNumRouteBuffers;
  u32* tags = row_tags(c.inbox, old_buffer, 0, 0);
  for (i32 i = grid_thread(); i < kRanks * kTagWords; i += grid_threads()) store_relaxed_sys(tags + i, kSentinel);
  Word* weights = reinterpret_cast<Word*>(weight_words(c.inbox, kInbox.row_weights, old_buffer, 0, 0));
  for (i32 i = grid_thread(); i < kRanks * kWeightWords / 4; i += grid_threads())
    store_relaxed_sys(weights + i, sentinel_word());
}

// A dispatch that did not complete shows no rows. By any block that gave up, at least a time-out after all counts were written.
__device__ inline void clear_counts(const DispatchKernelParams& p) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < config::kMaxLocalExperts * kRanks; i += config::kNumThreads) {
    if constexpr (config::kRankMajor) {
      if (i < kRanks) p.num_tokens_per_rank[i] = 0;
      continue;
    }
    if (i >= (config::kFirstExpert[p.lane.rank + 1] - config::kFirstExpert[p.lane.rank]) * kRanks) continue;
    p.rank_ranges[i * 2 + 1] = 0;
    if (i % kRanks == 0) p.num_tokens_per_expert[i / kRanks] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(config::kNumThreads, config::kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ DispatchKernelParams p) {
  extern __shared__ u32 shared_memory[];
  grid_dependency_launch();
  for (i32 i = static_cast<i32>(threadIdx.x); i < kMarked * kMaskWords; i += config::kNumThreads) shared_memory[i] = 0;
  __syncthreads();
  grid_dependency_wait();
  if (p.num_tokens < 0) return;  // launched at construction so that no later launch has anything to load or to size
  u32* own_epoch = at<u32>(p.lane.state, kState.dispatch_epochs) + blockIdx.x;
  const u32 previous = *own_epoch, ended = load_relaxed_sys(p.lane.wait.abort);
  const i32 rank = p.lane.rank;
  const DispatchContext c{p, Buffers(next_packet_epoch(previous)), rank, p.lane.inboxes[rank], Marks(shared_memory)};
  Wait wait(p.lane.wait, rank, 0, c.buffers.epoch, ended != 0);

  const SendLoads loads = load_pieces(c, grid_warp());  // in flight while the block routes
  mark_tokens(c);
  __syncthreads();
  if (blockIdx.x == 0) send_counts(c);
  if (blockIdx.x == gridDim.x - 1 && warp_idx() == kNumWarps - 1) send_packets(c);  // the warp with the least to send
  send(c, loads);
  clear_old_tags(c);
  take_counts(c, wait);
  const EarlyLoads early = load_early(c);
  __syncthreads();
  if constexpr (!config::kRankMajor) {
    sum_counts(c);
    __syncthreads();
    place_own(c);
  }
  receive(c, early, wait);
  clear_padding(c);

  if (blockIdx.x == 0) {
    for (i32 source = static_cast<i32>(threadIdx.x); source < kRanks; source += config::kNumThreads) {
      if (source == rank) continue;
      // Orders what follows this kernel after the peers' clean-up: relaxed polls of data do not.
      poll_packet(dispatch_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait);
      load_acquire_sys(dispatch_packet(c.inbox, c.buffers, source));
    }
  }
  if (__syncthreads_or(wait.failed() ? 1 : 0) != 0) clear_counts(p);
  if (threadIdx.x == 0) *own_epoch = c.buffers.epoch;
}

}  // namespace expertwire
