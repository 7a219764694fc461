// dispatch: one kernel, every block for itself.
//
//   route    the block marks which tokens chose which rank and (EXPERT_MAJOR) which expert, in shared memory. Positions are
//            counts of bits: the same whatever the timing, and no block needs another.
//   send     a warp takes a part of a token, a piece of its payload or its facts (tags and weights), and stores it to every
//            rank that wants it; in RANK_MAJOR its own rank's copy goes straight to its place.
//   receive  a warp takes a part of a row of any source, waits for it, stores it to its rows, and puts the sentinel back.
//   packets  one more warp of the last block tells all ranks that this one is here, and waits until all have told it.
//
// In two phases one kernel routes and sends, to its own rank too, and another receives.
#pragma once

#include "device/dispatch_masking.cuh"
#include "device/dispatch_receive.cuh"
#include "device/dispatch_send.cuh"
#include "device/validate.cuh"

namespace expertwire {

// Tags and weights that the dispatch before received: every block has read them, for its kernel has ended.
__device__ inline void clear_old_tags(const DispatchContext& c) {
  const u32 old_buffer = (c.buffers.route + kNumRouteBuffers - 1) % kNumRouteBuffers;
  u32* tags = row_tags(c.inbox, old_buffer, 0, 0);
#pragma unroll 1
  for (i32 i = grid_thread(); i < kRanks * kTagWords; i += grid_threads()) store_relaxed_sys(tags + i, kSentinel);
  Word* weights = reinterpret_cast<Word*>(weight_words(c.inbox, kInbox.row_weights, old_buffer, 0, 0));
#pragma unroll 1
  for (i32 i = grid_thread(); i < kRanks * kWeightWords / 4; i += grid_threads())
    store_relaxed_sys(weights + i, sentinel_word());
}

// A dispatch that did not complete shows no rows. By every block that gave up or never began; a warp whose wait has ended
// notes no counts any more.
__device__ inline void clear_counts(const DispatchKernelParams& p) {
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < config::kMaxLocalExperts * kRanks; i += kBlockThreads) {
    if constexpr (config::kRankMajor) {
      if (i < kRanks) p.num_tokens_per_rank[i] = 0;
      continue;
    }
    if (i >= (config::kFirstExpert[p.lane.rank + 1] - config::kFirstExpert[p.lane.rank]) * kRanks) continue;
    p.rank_ranges[i * 2 + 1] = 0;
    if (i % kRanks == 0) p.num_tokens_per_expert[i / kRanks] = 0;
  }
}

__device__ inline void note_dispatched(const DispatchContext& c) {
  if (grid_thread() != 0) return;
  *at<u64>(c.p.lane.state, kState.dispatched) = static_cast<u64>(c.p.call) << 32 | static_cast<u32>(c.p.num_tokens);
  clear_next_counts(c.p.lane.state, c.buffers);
}

__device__ inline void move_rows(const DispatchContext& c, const MarkLoads& mark_loads, Loaded loaded, Wait& wait) {
  const i32 items = c.p.num_tokens * kParts;
  const Crew sending = senders(), keeping = keepers();
  mark_tokens(c, mark_loads);
  sync_workers();
  if (blockIdx.x == 0) send_counts(c);
  OwnPart own;
  i32 kept = first_part(c.p);
  if (!sending.has_this && kept < items) own = make_part(c, kept % kParts, loaded);
#pragma unroll 1
  for (i32 item = kept; sending.has_this && item < items; item += sending.num_warps) {
    if (!kPrefetches && item != kept) loaded = load_part(c.p, item / kParts, item % kParts);
    own = make_part(c, item % kParts, loaded);
    const i32 next = item + sending.num_warps;
    if (kPrefetches && next < items) loaded = load_part(c.p, next / kParts, next % kParts);
    send_part(c, item / kParts, item % kParts, own);
    kept = item;
  }
  clear_old_tags(c);
  const Cursor first(c, 1);
  const bool has_first = kRanks > 1 && first.may_be_sent() && !is_absent(first.source);
  Received received;
  received.count = 0;
  if constexpr (kCountsWithRows) {
    if (has_first) received = load_received(c, first);
    if (grid_thread() == 0) note_rows(c, c.rank, own_row_count(c, c.rank));
    if (has_first) await_received(c, first, received, wait);
  } else {
    if constexpr (config::kMask) {
      agree_on_counts(c, wait);
    } else {
      take_counts(c, wait);
      sync_workers();
    }
    if (has_first) received = load_received(c, first);
#pragma unroll 1
    for (i32 item = kept; !config::kRankMajor && keeping.has_this && item >= 0 && item < items;
         item -= keeping.num_warps) {
      if (!kPrefetches && item != kept) own = make_part(c, item % kParts, load_part(c.p, item / kParts, item % kParts));
      const i32 next = item - keeping.num_warps;
      const bool goes_on = kPrefetches && next >= 0;
      if (goes_on) loaded = load_part(c.p, next / kParts, next % kParts);
      place_own(c, item, own);
      if (goes_on) own = make_part(c, next % kParts, loaded);
    }
    if (has_first) await_received(c, first, received, wait);
  }
  receive(c, received, wait);
  validate_ids(c);
  note_dispatched(c);
}

__device__ inline void send_rows(const DispatchContext& c, const MarkLoads& mark_loads, Loaded loaded) {
  mark_tokens(c, mark_loads);
  sync_workers();
  if (blockIdx.x == 0) send_counts(c);
#pragma unroll 1
  for (i32 item = grid_warp(); item < c.p.num_tokens * kParts; item += grid_warps()) {
    if (item != grid_warp()) loaded = load_part(c.p, item / kParts, item % kParts);
    send_part(c, item / kParts, item % kParts, make_part(c, item % kParts, loaded));
  }
  clear_old_tags(c);
  validate_ids(c);
}

__device__ inline void receive_rows(const DispatchContext& c, Wait& wait) {
  const Cursor first(c, kFirstStep);
  const bool has_first = first.may_be_sent() && !is_absent(first.source);
  Received received;
  received.count = 0;
  if constexpr (config::kMask) {
    agree_on_counts(c, wait);
  } else if constexpr (!kCountsWithRows) {
    take_counts(c, wait);
    sync_workers();
  }
  if (has_first) {
    received = load_received(c, first);
    await_received(c, first, received, wait);
  }
  receive(c, received, wait);
  note_dispatched(c);
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, config::kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ DispatchKernelParams p) {
  extern __shared__ u32 shared_memory[];
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); kSends && i < kMarked * kMaskWords; i += kBlockThreads)
    shared_memory[i] = 0;
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();
  if (p.num_tokens < 0) return;  // launched at construction so that no later launch has anything to load or to size
  const i32 rank = p.lane.rank;
  u32* own_epoch = at<u32>(p.lane.state, kState.dispatch_epochs) + blockIdx.x;
  const u32 previous = *own_epoch, ended_in = load_relaxed_sys(p.lane.wait.abort);
  MarkLoads mark_loads;
  Loaded loaded;
  if (kSends && is_worker()) {  // in flight while the block routes
    mark_loads = load_marks(p, static_cast<i32>(threadIdx.x));
    const i32 first = first_part(p);
    if (first < p.num_tokens * kParts) loaded = load_part(p, first / kParts, first % kParts);
  }
  const DispatchContext c{p, Buffers(kPacketEpochs.after(previous)), rank, p.lane.inboxes[rank], Marks(shared_memory)};
  Wait wait(p.lane, 0, c.buffers.epoch, ended_in);
  const bool takes_part = may_store(p.lane, wait);
  note_absent(p.lane, 0, c.buffers.epoch, wait);
  if (takes_part && is_worker()) {
    if constexpr (kWhole)
      move_rows(c, mark_loads, loaded, wait);
    else if constexpr (kSends)
      send_rows(c, mark_loads, loaded);
    else
      receive_rows(c, wait);
  } else if (takes_part && has_packets()) {
    exchange_packets(
        p.lane, c.buffers.epoch, 0, wait,
        [&c](u8* inbox, i32 source) { return dispatch_packet(inbox, c.buffers, source); }, [](u32, i32) {});
  }
  if constexpr (!kReceives) return;
  if (__syncthreads_or(wait.failed() || ended_in != 0 ? 1 : 0) != 0) clear_counts(p);
  finish_rows(c, wait);
  if (threadIdx.x == 0) *own_epoch = c.buffers.epoch;
}

}  // namespace expertwire
