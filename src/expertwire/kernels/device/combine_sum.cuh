// The second half of a combine: own tokens, from the own rank's part and what the others sent.
#pragma once

#include "combine_blocks.cuh"

namespace expertwire {

// Of an id as noted: kNoExpert for none.
__device__ inline i32 rank_of_id(u32 id) {
  return rank_of_expert(static_cast<i32>(id) < 0 ? -1 : static_cast<i32>(id));
}

// Of lane k, of one own token.
struct OwnFacts {
  u32 id;
  Selections selections;
  __device__ i32 rank() const { return rank_of_id(id); }
};

__device__ inline i32 first_own_item() { return grid_warp_of_part(kRanks - 1, kRanks); }

__device__ inline OwnFacts load_own_facts(const CombineKernelParams& p, i32 item) {
  OwnFacts facts{kNoExpert, Selections{-1, 0.0f}};
  const i32 lane = lane_idx(), token = item / kOutPieces;
  if (token >= kMaxTokens || lane >= kTopk) return facts;
  const i32 at_k = token * kTopkPadded + lane;
  facts.id = at<const u32>(p.lane.state, kState.own_ids)[at_k];
  facts.selections.position = at<const i32>(p.lane.state, kState.own_positions)[at_k];
  if constexpr (kWeighted && (kWhole || config::kDirectSend)) {
    const float* noted = at<const float>(p.lane.state, kState.own_weights) + at_k;
    facts.selections.weight =
        *(!kWhole || p.weights == nullptr || token >= p.num_tokens ? noted : p.weights + token * kTopk + lane);
  }
  return facts;
}

// In two phases DIRECT_SEND keeps the weights of combine, which the sums at its end need, in the own inbox.
constexpr bool kStagesWeights = !kWhole && kWeighted && config::kDirectSend;

__device__ inline u32* staged_weights(const CombineContext& c) {
  return weight_words(c.inbox, kInbox.combine_weights, c.buffers.route, c.rank, 0);
}

// Waits for a word that is being sent here, and puts the sentinel back.
__device__ inline Word take_word(Word* from, Word early, i32 peer, Wait& wait) {
  const Word v = poll(from, early, peer, wait);
  store_relaxed_sys(from, sentinel_word());
  return v;
}

// RANK_LOCAL_REDUCE: partials in ascending rank order.
__device__ inline Sums sum_partials(const CombineContext& c, i32 token, i32 piece, const OwnFacts& facts, Wait& wait) {
  const i32 rank_of_lane = facts.rank();
  constexpr i32 kBatch = kRanks < 4 ? kRanks : (kWords > 1 ? 2 : 4);  // partials in flight
  Word own[kWords];
  if (kWhole && __any_sync(kAllLanes, rank_of_lane == c.rank)) {
    if constexpr (config::kByBlocks) await_rows(c, facts.selections.position, wait);
    if constexpr (config::kRankMajor) {
      const Word* row = c.row(__shfl_sync(kAllLanes, facts.selections.position, 0));
#pragma unroll
      for (i32 u = 0; u < kWords; ++u)
        if (in_out(piece, u)) own[u] = load_once(row + word_of(piece, u));
    } else {
      const Sums sums = reduce_rows(c, facts.selections, piece);  // positions of rows that stayed here
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) own[u] = sums.of[u].round();
    }
  }
  Sums sums;
#pragma unroll 1
  for (i32 batch = 0; batch < kRanks; batch += kBatch) {
    Word early[kBatch][kWords];
#pragma unroll
    for (i32 b = 0; b < kBatch; ++b) {
      const i32 r = batch + b;
      if (r >= kRanks || (kWhole && r == c.rank) || is_absent(r) || !__any_sync(kAllLanes, rank_of_lane == r)) continue;
      const Word* from = combine_row(c.inbox, c.buffers, static_cast<u64>(r) * kMaxTokens + static_cast<u64>(token));
#pragma unroll
      for (i32 u = 0; u < kWords; ++u)
        if (in_out(piece, u)) early[b][u] = load_relaxed_sys(from + word_of(piece, u));
    }
#pragma unroll
    for (i32 b = 0; b < kBatch; ++b) {
      const i32 r = batch + b;
      if (r >= kRanks || is_absent(r) || !__any_sync(kAllLanes, rank_of_lane == r)) continue;
      Word* from = combine_row(c.inbox, c.buffers, static_cast<u64>(r) * kMaxTokens + static_cast<u64>(token));
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) {
        if (!in_out(piece, u)) continue;
        const Word v = kWhole && r == c.rank ? own[u] : take_word(from + word_of(piece, u), early[b][u], r, wait);
        if (!wait.gone(r)) sums.of[u].add(v);
      }
    }
  }
  return sums;
}

// DIRECT_SEND: rows in ascending k.
__device__ inline Sums sum_slots(const CombineContext& c, i32 token, i32 piece, const OwnFacts& facts, Wait& wait) {
  i32 rank_of_lane = facts.rank();
  u64 slot_of_lane = 0;  // with masking: where the row of lane k arrives
  if constexpr (config::kMask) {
    slot_of_lane =
        direct_slot(rank_of_lane, static_cast<u64>(token), lane_idx(), __match_any_sync(kAllLanes, rank_of_lane));
    if (rank_of_lane >= 0 && is_absent(rank_of_lane)) rank_of_lane = -1;
  }
  const auto sent_row = [&](i32 k) {
    const u64 slot =
        config::kMask ? __shfl_sync(kAllLanes, slot_of_lane, k) : static_cast<u64>(token) * kTopk + static_cast<u64>(k);
    return combine_row(c.inbox, c.buffers, slot);
  };
  Sums sums;
  if constexpr (config::kByBlocks && kWhole)
    await_rows(c, rank_of_lane == c.rank ? facts.selections.position : -1, wait);
#pragma unroll 1
  for (u32 left = __ballot_sync(kAllLanes, rank_of_lane >= 0); left != 0;) {
    Word rows[kGather][kWords];
    u32 batch = left;
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      if (batch == 0) break;
      const i32 k = __ffs(static_cast<i32>(batch)) - 1, rank = __shfl_sync(kAllLanes, rank_of_lane, k),
                position = __shfl_sync(kAllLanes, facts.selections.position, k);
      batch &= batch - 1;
      const Word* sent = sent_row(k);
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) {
        if (!in_out(piece, u)) continue;
        rows[i][u] = kWhole && rank == c.rank ? load_once(c.row(position) + word_of(piece, u))
                                              : load_relaxed_sys(sent + word_of(piece, u));
      }
    }
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      if (left == 0) break;
      const i32 k = __ffs(static_cast<i32>(left)) - 1, rank = __shfl_sync(kAllLanes, rank_of_lane, k);
      const float weight = __shfl_sync(kAllLanes, facts.selections.weight, k);
      left &= left - 1;
      Word* sent = sent_row(k);
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) {
        if (!in_out(piece, u)) continue;
        const Word v =
            kWhole && rank == c.rank ? rows[i][u] : take_word(sent + word_of(piece, u), rows[i][u], rank, wait);
        if (wait.gone(rank)) continue;
        if constexpr (kWeighted)
          sums.of[u].add_product(weight, v);
        else
          sums.of[u].add(v);
      }
    }
  }
  return sums;
}

__device__ inline void sum_pieces(const CombineContext& c, OwnFacts facts, Wait& wait) {
  const i32 end = c.num_tokens * kOutPieces;
#pragma unroll 1
  for (i32 item = first_own_item(); item < end; item += grid_warps()) {
    if (item != first_own_item()) facts = load_own_facts(c.p, item);
    const i32 token = item / kOutPieces, piece = item % kOutPieces;
    if (kStagesWeights && c.weights != nullptr && lane_idx() < kTopk)
      facts.selections.weight = as_float(staged_weights(c)[token * kTopkPadded + lane_idx()]);
    const Sums sums =
        config::kDirectSend ? sum_slots(c, token, piece, facts, wait) : sum_partials(c, token, piece, facts, wait);
    if (c.stale) continue;
    Word* out = static_cast<Word*>(c.p.out) + static_cast<u64>(token) * kOutWords;
#pragma unroll
    for (i32 u = 0; u < kWords; ++u)
      if (in_out(piece, u)) out[word_of(piece, u)] = sums.of[u].round();
  }
}

}  // namespace expertwire
