// What both halves of a combine share: expert rows, gathered and summed.
#pragma once

#include "masking.cuh"
#include "reduce.cuh"
#include "wire.cuh"

namespace expertwire {

constexpr i32 kOutWords = config::kHiddenSize / 8;
constexpr i32 kOutPieces = (kOutWords + 32 * kWords - 1) / (32 * kWords);
constexpr bool kWeighted = !config::kRankMajor;                             // RANK_MAJOR rows come weighted
constexpr i32 kGather = kTopk < config::kGather ? kTopk : config::kGather;  // rows that a warp loads at once

constexpr bool kSumsWithWeights = kWeighted && !config::kDirectSend;  // of other ranks' tokens

// What a combine's packet says beside the epoch.
constexpr u32 kHasWeights = 1u;         // weights come with this combine
constexpr u32 kHearsBeforeItSums = 2u;  // its sums are made when it knows whether the token's rank brings weights

struct CombineContext {
  const CombineKernelParams& p;
  Buffers buffers;
  i32 rank;
  u8* inbox;
  const Word* rows;
  bool stale;            // another dispatch has used the lane: a replay of a graph that is out of date
  i32 num_tokens;        // of the lane's last dispatch, so that the wire stays right also then
  const float* weights;  // given to combine, or null

  __device__ const Word* row(i32 row) const { return rows + static_cast<u64>(row) * kOutWords; }
};

// `dispatched`: which host call has used the lane last, and its number of tokens.
__device__ inline CombineContext context_of(const CombineKernelParams& p, u32 epoch, u64 dispatched) {
  const i32 rank = p.lane.rank, num_tokens = static_cast<i32>(dispatched);
  const bool stale = static_cast<u32>(dispatched >> 32) != p.call;
  return CombineContext{p,
                        Buffers(epoch),
                        rank,
                        p.lane.inboxes[rank],
                        static_cast<const Word*>(p.expert_output),
                        stale,
                        num_tokens,
                        stale ? nullptr : p.weights};
}

__device__ inline u32 num_rows_of(u8* state, i32 source) { return at<const u32>(state, kState.num_rows)[source]; }

// Lane k holds position and weight of selection k.
struct Selections {
  i32 position;
  float weight;
};

// Word u of a piece, in this lane.
__device__ inline i32 word_of(i32 piece, i32 u) { return (piece * kWords + u) * 32 + lane_idx(); }
__device__ inline bool in_out(i32 piece, i32 u) { return word_of(piece, u) < kOutWords; }

struct Sums {
  Sum of[kWords];
};

// Where the row for selection k of a token goes there. `selected`: the token's selections of the rank that sends it. With
// masking each rank has slots of its own, or late rows of a lost one could meet those of another.
__device__ inline u64 direct_slot(i32 rank, u64 token, i32 k, u32 selected) {
  if constexpr (!config::kMask) return token * kTopk + static_cast<u64>(k);
  return (static_cast<u64>(rank) * kMaxTokens + token) * static_cast<u64>(combine_row_slots(kShape)) +
         static_cast<u64>(__popc(selected & ((1u << k) - 1u)));
}

// This rank's sum of one piece of a token, in ascending k.
__device__ inline Sums reduce_rows(const CombineContext& c, const Selections& s, i32 piece) {
  Sums sums;
  u32 left = __ballot_sync(kAllLanes, s.position >= 0);
#pragma unroll 1
  while (left != 0) {
    Word rows[kGather][kWords];
    u32 batch = left;
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      if (batch == 0) break;
      const Word* row = c.row(__shfl_sync(kAllLanes, s.position, __ffs(static_cast<i32>(batch)) - 1));
#pragma unroll
      for (i32 u = 0; u < kWords; ++u)
        if (in_out(piece, u)) rows[i][u] = load_once(row + word_of(piece, u));
      batch &= batch - 1;
    }
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      if (left == 0) break;
      const float weight = kWeighted ? __shfl_sync(kAllLanes, s.weight, __ffs(static_cast<i32>(left)) - 1) : 1.0f;
#pragma unroll
      for (i32 u = 0; u < kWords; ++u) {
        if constexpr (kWeighted)
          sums.of[u].add_product(weight, rows[i][u]);
        else
          sums.of[u].add(rows[i][u]);
      }
      left &= left - 1;
    }
  }
  return sums;
}

}  // namespace expertwire
