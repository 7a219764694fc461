// Weights that are given to combine. They travel to the ranks that sum, RANK_LOCAL_REDUCE only.
#pragma once

#include "combine_return.cuh"
#include "combine_sum.cuh"

namespace expertwire {

// A warp for each token, to the ranks that it has selected. These wait for all of it before they sum: what a rank does not
// wait for could come when it has cleared the buffer, and meet the combine that uses that next.
__device__ inline void send_weights(const CombineContext& c) {
  if (!kSumsWithWeights || c.weights == nullptr) return;
  const i32 lane = lane_idx();
#pragma unroll 1
  for (i32 token = grid_warp(); token < c.num_tokens; token += grid_warps()) {
    i32 rank_of_lane = -1;
    u32 weight = 0;
    if (lane < kTopk) {
      rank_of_lane = rank_of_id(at<const u32>(c.p.lane.state, kState.own_ids)[token * kTopkPadded + lane]);
      weight = as_bits(c.weights[token * kTopk + lane]);
      if (weight == kSentinel) weight = kNanFloat;
    }
#pragma unroll 1
    for (i32 peer = 0; peer < kRanks; ++peer) {
      if (__any_sync(kAllLanes, rank_of_lane == peer) == 0 || peer == c.rank || is_absent(peer)) continue;
      u32* to = weight_words(c.p.lane.inboxes[peer], kInbox.combine_weights, c.buffers.route, c.rank, token);
      if (lane < kTopkPadded) store_relaxed_sys(to + lane, weight);
    }
  }
}

__device__ inline void stage_weights(const CombineContext& c) {
  if (!kStagesWeights || c.weights == nullptr) return;
  for (i32 i = grid_thread(); i < c.num_tokens * kTopk; i += grid_threads())
    staged_weights(c)[i / kTopk * kTopkPadded + i % kTopk] = as_bits(c.weights[i]);
}

__device__ inline void clear_old_weights(const CombineContext& c, u32 old_buffer) {
  if (!kSumsWithWeights) return;
  Word* words = reinterpret_cast<Word*>(weight_words(c.inbox, kInbox.combine_weights, old_buffer, 0, 0));
  for (i32 i = grid_thread(); i < kRanks * kWeightWords / 4; i += grid_threads())
    store_relaxed_sys(words + i, sentinel_word());
}

// Weights for combine in place of those of dispatch. A rank that brings some hears of its peers' before it sums for them.
// A rank that brings none cannot know, and its sums with the old weights are on their way: they are taken and dropped,
// and when all blocks have done so, the last one asks for others, which go where the first ones went. Returns whether some
// have not come in time: what comes later in their place may be old.
__device__ __noinline__ bool drop_old_sums(const CombineKernelParams& p, u32 epoch, u64 dispatched) {
  const CombineContext c = context_of(p, epoch, dispatched);
  Wait wait(p.lane, 1, epoch, load_relaxed_sys(p.lane.wait.abort));
  for (i32 item = first_own_item(); item < c.num_tokens * kOutPieces; item += grid_warps()) {
    const i32 token = item / kOutPieces, piece = item % kOutPieces;
    const i32 rank_of_lane = load_own_facts(p, item).rank();
#pragma unroll 1
    for (i32 r = 0; r < kRanks; ++r) {
      if (__any_sync(kAllLanes, rank_of_lane == r) == 0 || r == c.rank || is_absent(r)) continue;
      const u32 told = poll_packet(combine_packet(c.inbox, c.buffers, r), c.buffers.epoch, r, wait);
      if ((told & kHearsBeforeItSums) != 0) continue;
      Word* row = combine_row(c.inbox, c.buffers, static_cast<u64>(r) * kMaxTokens + static_cast<u64>(token));
#pragma unroll
      for (i32 u = 0; u < kWords; ++u)
        if (in_out(piece, u)) take_word(row + word_of(piece, u), sentinel_word(), r, wait);
      if constexpr (config::kMask) {
        if (wait.gone(r))
          add_to_set(block_losses().absent, r);  // what is still to come of it is old, and no part of a sum
      }
    }
  }
  sync_workers();
  if (threadIdx.x != 0) return wait.failed();
  u32* num_blocks_done = at<u32>(c.p.lane.state, kState.num_blocks_done);
  __threadfence_system();  // what the block has cleared comes before the request
  if (atomicAdd(num_blocks_done, 1u) != gridDim.x - 1) return wait.failed();
  *num_blocks_done = 0;
  __threadfence_system();
  for (i32 peer = 0; peer < kRanks; ++peer) {
    if (peer != c.rank && !is_absent(peer))
      store_release_sys(repeat_packet(c.p.lane.inboxes[peer], c.buffers, c.rank), u64{c.buffers.epoch} << 32);
  }
  return wait.failed();
}

// Whether a peer, whose packet is here, will ask for other sums. (Where this rank heard of its weights first, it will not.)
__device__ inline bool wants_others(const CombineContext& c, i32 source, u32 told) {
  return (told & kHasWeights) != 0 && (num_rows_of(c.p.lane.state, source) & kWeightsComeLate) == 0;
}

// By one block, after its share of everything else. Out of line, as what is rarely done: the rest keeps its registers.
__device__ __noinline__ void send_other_sums(const CombineKernelParams& p, u32 epoch, u64 dispatched) {
  const CombineContext c = context_of(p, epoch, dispatched);
  Wait wait(p.lane, 1, epoch, load_relaxed_sys(p.lane.wait.abort));
  for (i32 source = 0; source < kRanks; ++source) {
    if (source == c.rank || is_absent(source)) continue;
    if (!wants_others(c, source,
                      poll_packet(combine_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait)))
      continue;
    poll_packet(repeat_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait);
    load_acquire_sys(repeat_packet(c.inbox, c.buffers, source));
    const i32 end = static_cast<i32>(num_rows_of(c.p.lane.state, source) & ~kWeightsComeLate) * kOutPieces;
#pragma unroll 1
    for (i32 item = warp_idx(); item < end; item += kNumWarps) {
      ReturnFacts facts;
      load_row_facts(p, source, item, facts);
      return_piece(c, source, item, true, facts, wait);
    }
  }
}

}  // namespace expertwire
