// The first half of a combine: rows of other ranks' tokens go back.
#pragma once

#include "combine_blocks.cuh"

namespace expertwire {

// What dispatch noted of the first row that a warp returns, asked for before anything else is known.
struct ReturnFacts {
  Selections selections;
  u32 token;
  u32 num_rows;
  Word words[kWords];  // kRowsComeSummed: the row itself, wherever it turns out to go
};

constexpr bool kRowsComeSummed = config::kRankMajor && !config::kDirectSend;

__device__ inline i32 return_item(i32 j) { return grid_warp_of_part(j - kFirstStep, kRanks); }

__device__ inline void load_words(const CombineKernelParams& p, i32 row, i32 piece, Word (&words)[kWords]) {
  const Word* from = static_cast<const Word*>(p.expert_output) + static_cast<u64>(row) * kOutWords;
#pragma unroll
  for (i32 u = 0; u < kWords; ++u)
    if (in_out(piece, u)) words[u] = load_once(from + word_of(piece, u));
}

__device__ inline void load_row_facts(const CombineKernelParams& p, i32 source, i32 item, ReturnFacts& facts) {
  const i32 lane = lane_idx(), received = source * kMaxTokens + item / kOutPieces;
  facts.token = at<const u32>(p.lane.state, kState.tokens)[received];
  facts.selections = Selections{-1, 0.0f};
  if constexpr (kRowsComeSummed) {
    if constexpr (config::kByBlocks)
      facts.selections.position = received;
    else
      load_words(p, received, item % kOutPieces, facts.words);
    return;
  }
  if (lane >= kTopkPadded) return;
  facts.selections.position = at<const i32>(p.lane.state, kState.positions)[received * kTopkPadded + lane];
  if constexpr (kWeighted && !config::kDirectSend)
    facts.selections.weight = at<const float>(p.lane.state, kState.weights)[received * kTopkPadded + lane];
}

__device__ inline ReturnFacts load_return(const CombineKernelParams& p, i32 j) {
  const i32 source = (p.lane.rank + j) % kRanks, item = return_item(j);
  ReturnFacts facts;
  load_row_facts(p, source, item < kMaxTokens * kOutPieces ? item : 0, facts);
  facts.num_rows = num_rows_of(p.lane.state, source);
  return facts;
}

__device__ inline void return_words(const CombineContext& c, i32 peer, u64 row, i32 piece,
                                    const Word (&words)[kWords]) {
  Word* to = combine_row(c.p.lane.inboxes[peer], c.buffers, row);
#pragma unroll
  for (i32 u = 0; u < kWords; ++u)
    if (in_out(piece, u)) store_relaxed_sys(to + word_of(piece, u), avoid_sentinel<kNanBf16Pair>(words[u]));
}

// DIRECT_SEND: every row by itself, one behind the other. (Several in flight: slower, the more the slower.)
__device__ inline void return_direct(const CombineContext& c, i32 source, i32 piece, const ReturnFacts& facts) {
  const u32 selected = __ballot_sync(kAllLanes, facts.selections.position >= 0);
#pragma unroll 1
  for (u32 left = selected; left != 0; left &= left - 1) {
    const i32 k = __ffs(static_cast<i32>(left)) - 1;
    Word words[kWords];
    load_words(c.p, __shfl_sync(kAllLanes, facts.selections.position, k), piece, words);
    return_words(c, source, direct_slot(c.rank, static_cast<u64>(facts.token), k, selected), piece, words);
  }
}

// The peer's packet says whether weights come with this combine; they travel by token.
__device__ inline void take_late_weight(const CombineContext& c, i32 source, ReturnFacts& facts, Wait& wait) {
  const u32 told = poll_packet(combine_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait);
  if (!wait.gone(source) && (told & kHasWeights) != 0 && lane_idx() < kTopkPadded) {
    const u32* from =
        weight_words(c.inbox, kInbox.combine_weights, c.buffers.route, source, static_cast<i32>(facts.token));
    facts.selections.weight = as_float(poll(from + lane_idx(), kSentinel, source, wait));
  }
  __syncwarp();
}

// In two phases: the own rank's weights are at hand.
__device__ inline void take_own_weight(const CombineContext& c, ReturnFacts& facts) {
  if (c.weights != nullptr && lane_idx() < kTopk)
    facts.selections.weight = c.weights[static_cast<i32>(facts.token) * kTopk + lane_idx()];
}

__device__ inline void return_piece(const CombineContext& c, i32 source, i32 item, bool hears_first, ReturnFacts& facts,
                                    Wait& wait) {
  const i32 piece = item % kOutPieces;
  if constexpr (config::kByBlocks) {
    if (!await_rows(c, facts.selections.position, wait)) return;  // the peers find out by their time-outs
    if constexpr (kRowsComeSummed) load_words(c.p, facts.selections.position, piece, facts.words);
  }
  if constexpr (config::kDirectSend) {
    return_direct(c, source, piece, facts);
  } else {
    if constexpr (kWeighted) {
      if (!kWhole && source == c.rank)
        take_own_weight(c, facts);
      else if (hears_first)
        take_late_weight(c, source, facts, wait);
      // Without its weight a sum is wrong, and a peer that was only late would take it.
      if (hears_first && __any_sync(kAllLanes, wait.failed() ? 1 : 0) != 0) return;
      const Sums sums = reduce_rows(c, facts.selections, piece);
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) facts.words[u] = sums.of[u].round();
    }
    return_words(c, source, static_cast<u64>(c.rank) * kMaxTokens + static_cast<u64>(facts.token), piece, facts.words);
  }
}

__device__ inline void return_pieces(const CombineContext& c, bool hears_first, ReturnFacts facts, Wait& wait) {
#pragma unroll 1
  for (i32 j = kFirstStep; j < kRanks; ++j) {
    const i32 source = (c.rank + j) % kRanks, first = return_item(j);
    if (is_absent(source)) continue;
    if (j != kFirstStep) facts = load_return(c.p, j);
    const i32 end = static_cast<i32>(facts.num_rows & ~kWeightsComeLate) * kOutPieces;
#pragma unroll 1
    for (i32 item = first; item < end; item += grid_warps()) {
      if (item != first) load_row_facts(c.p, source, item, facts);
      return_piece(c, source, item, hears_first || (facts.num_rows & kWeightsComeLate) != 0, facts, wait);
    }
  }
}

}  // namespace expertwire
