// combine: one kernel, the wire of dispatch backwards.
//
//   return   a warp takes a piece of a token of another rank, gathers the rows that dispatch noted, and stores their sum
//            (RANK_LOCAL_REDUCE) or each of them (DIRECT_SEND) to that rank.
//   sum      a warp takes a piece of an own token, makes the own rank's part, waits for the others' and adds all in the
//            fixed order: ascending rank, or ascending k.
#pragma once

#include "device/reduce.cuh"
#include "device/wire.cuh"

namespace expertwire {

constexpr i32 kOutWords = config::kHiddenSize / 8;
constexpr i32 kOutPieces = (kOutWords + 31) / 32;
constexpr bool kWeighted = !config::kRankMajor;  // RANK_MAJOR rows come weighted

struct CombineContext {
  const CombineKernelParams& p;
  Buffers buffers;
  i32 rank;
  u8* inbox;
  const Word* rows;

  __device__ const Word* row_word(i32 row, i32 word) const {
    return rows + static_cast<u64>(row) * kOutWords + static_cast<u64>(word);
  }
};

// Lane k holds position and weight of selection k.
struct Selections {
  i32 position;
  float weight;
};

__device__ inline Selections load_selections(const CombineContext& c, i32 source, i32 slot) {
  const i32 lane = lane_idx(), received = source * kMaxTokens + slot;
  Selections s{-1, 0.0f};
  if constexpr (config::kRankMajor && !config::kDirectSend) {
    s.position = lane == 0 ? received : -1;  // one row, already summed
    return s;
  }
  if (lane >= kTopkPadded) return s;
  s.position = at<i32>(c.p.lane.state, kState.positions)[received * kTopkPadded + lane];
  if constexpr (kWeighted) s.weight = at<float>(c.p.lane.state, kState.weights)[received * kTopkPadded + lane];
  return s;
}

// This rank's sum of one piece of a token: ascending k, rounded once.
__device__ inline Word reduce_piece(const CombineContext& c, const Selections& s, i32 word, bool in_row) {
  constexpr i32 kGather = kTopk < config::kGather ? kTopk : config::kGather;  // loads in flight
  Sum sum;
  u32 left = __ballot_sync(kAllLanes, s.position >= 0);
  while (left != 0) {
    Word rows[kGather];
    float weights[kGather];
    u32 batch = left;
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      const i32 k = batch != 0 ? __ffs(static_cast<i32>(batch)) - 1 : 0;
      const i32 position = __shfl_sync(kAllLanes, s.position, k);
      weights[i] = __shfl_sync(kAllLanes, s.weight, k);
      if (batch != 0 && in_row) rows[i] = load_once(c.row_word(position, word));
      batch &= batch - 1;
    }
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      if (left == 0) break;
      if constexpr (kWeighted)
        sum.add_product(weights[i], rows[i]);
      else
        sum.add(rows[i]);
      left &= left - 1;
    }
  }
  return sum.round();
}

__device__ inline Selections own_selections(const CombineContext& c, i32 token) {
  const i32 lane = lane_idx();
  Selections s{-1, 0.0f};
  if (lane >= kTopkPadded) return s;
  s.position = at<i32>(c.p.lane.state, kState.own_positions)[token * kTopkPadded + lane];
  if constexpr (kWeighted) s.weight = as_float(at<u32>(c.p.lane.state, kState.own_weights)[token * kTopkPadded + lane]);
  return s;
}

struct ReturnLoads {
  Selections selections;
  u32 token;
};

__device__ inline ReturnLoads load_return(const CombineContext& c, i32 source, i32 slot) {
  return ReturnLoads{load_selections(c, source, slot),
                     at<const u32>(c.p.lane.state, kState.tokens)[source * kMaxTokens + slot]};
}

__device__ inline void return_piece(const CombineContext& c, i32 source, i32 piece, ReturnLoads loads,
                                    bool late_weights, Wait& wait) {
  const i32 word = piece * 32 + lane_idx();
  const bool in_row = word < kOutWords;
  const u64 token = static_cast<u64>(loads.token);
  Selections s = loads.selections;
  u8* peer_inbox = c.p.lane.inboxes[source];
  if constexpr (config::kDirectSend) {
    for (u32 left = __ballot_sync(kAllLanes, s.position >= 0); left != 0; left &= left - 1) {
      const i32 k = __ffs(static_cast<i32>(left)) - 1, row = __shfl_sync(kAllLanes, s.position, k);
      if (in_row)
        store_relaxed_sys(combine_row(peer_inbox, c.buffers, token * kTopk + static_cast<u64>(k)) + word,
                          avoid_sentinel<kNanBf16Pair>(load_once(c.row_word(row, word))));
    }
    return;
  }
  if (kWeighted && late_weights) {
    // Given to combine: the peer's packet says whether they come, and they travel by token.
    if (poll_packet(combine_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait) != 0 &&
        lane_idx() < kTopkPadded) {
      s.weight = as_float(poll(
          weight_words(c.inbox, kInbox.combine_weights, c.buffers.route, source, static_cast<i32>(token)) + lane_idx(),
          source, wait));
    }
  }
  const Word sum = reduce_piece(c, s, word, in_row);
  const u64 row = static_cast<u64>(c.rank) * kMaxTokens + token;
  if (in_row) store_relaxed_sys(combine_row(peer_inbox, c.buffers, row) + word, avoid_sentinel<kNanBf16Pair>(sum));
}

__device__ inline void return_pieces(const CombineContext& c, Wait& wait) {
#pragma unroll 1
  for (i32 j = 1; j < kRanks; ++j) {
    const i32 source = (c.rank + j) % kRanks, first = grid_warp_of_part(j - 1, kRanks);
    // Facts of the first row are asked for together with the number of rows.
    ReturnLoads loads = load_return(c, source, first / kOutPieces < kMaxTokens ? first / kOutPieces : 0);
    const u32 rows = at<const u32>(c.p.lane.state, kState.num_rows)[source];
    const i32 end = static_cast<i32>(rows & ~kWeightsComeLate) * kOutPieces;
    for (i32 item = first; item < end; item += grid_warps()) {
      if (item != first) loads = load_return(c, source, item / kOutPieces);
      return_piece(c, source, item % kOutPieces, loads, (rows & kWeightsComeLate) != 0, wait);
    }
  }
}

__device__ inline float own_weight(const CombineContext& c, i32 token, float noted) {
  if (c.p.weights == nullptr || lane_idx() >= kTopk) return noted;
  return c.p.weights[token * kTopk + lane_idx()];
}

__device__ inline Word take_word(const CombineContext& c, u64 row, i32 word, i32 peer, Word early, Wait& wait) {
  Word* from = combine_row(c.inbox, c.buffers, row) + word;
  const Word v = poll(from, early, peer, wait);
  store_relaxed_sys(from, sentinel_word());
  return v;
}

// RANK_LOCAL_REDUCE: partials in ascending rank order.
__device__ inline Word sum_partials(const CombineContext& c, i32 token, i32 word, i32 rank_of_lane, bool in_row,
                                    Wait& wait) {
  constexpr i32 kEarly = kRanks < 8 ? kRanks : 8;
  Selections s = own_selections(c, token);
  Word early[kEarly];
#pragma unroll
  for (i32 r = 0; r < kEarly; ++r) {
    if (r != c.rank && __any_sync(kAllLanes, rank_of_lane == r) != 0 && in_row)
      early[r] = load_relaxed_sys(
          combine_row(c.inbox, c.buffers, static_cast<u64>(r) * kMaxTokens + static_cast<u64>(token)) + word);
  }
  if constexpr (kWeighted) s.weight = own_weight(c, token, s.weight);
  Word own{0, 0, 0, 0};
  if (__any_sync(kAllLanes, rank_of_lane == c.rank) != 0) own = reduce_piece(c, s, word, in_row);
  Sum sum;
#pragma unroll
  for (i32 r = 0; r < kRanks; ++r) {
    if (__any_sync(kAllLanes, rank_of_lane == r) == 0) continue;
    const u64 row = static_cast<u64>(r) * kMaxTokens + static_cast<u64>(token);
    if (r == c.rank)
      sum.add(own);
    else if (in_row)
      sum.add(take_word(c, row, word, r, r < kEarly ? early[r < kEarly ? r : 0] : sentinel_word(), wait));
  }
  return sum.round();
}

// DIRECT_SEND: rows in ascending k.
__device__ inline Word sum_slots(const CombineContext& c, i32 token, i32 word, i32 rank_of_lane, bool in_row,
                                 Wait& wait) {
  const Selections s = own_selections(c, token);
  float weight = 0.0f;
  if constexpr (kWeighted) {
    if (lane_idx() < kTopk)
      weight = as_float(at<const u32>(c.p.lane.state, kState.own_weights)[token * kTopkPadded + lane_idx()]);
    weight = own_weight(c, token, weight);
  }
  constexpr i32 kGather = kTopk < config::kGather ? kTopk : config::kGather;
  Sum sum;
#pragma unroll 1
  for (i32 first = 0; first < kTopk; first += kGather) {
    Word early[kGather];
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      const i32 k = first + i, rank = __shfl_sync(kAllLanes, rank_of_lane, k & 31),
                position = __shfl_sync(kAllLanes, s.position, k & 31);
      if (k >= kTopk || rank < 0 || !in_row) continue;
      early[i] =
          rank == c.rank
              ? load_once(c.row_word(position, word))
              : load_relaxed_sys(
                    combine_row(c.inbox, c.buffers, static_cast<u64>(token) * kTopk + static_cast<u64>(k)) + word);
    }
#pragma unroll
    for (i32 i = 0; i < kGather; ++i) {
      const i32 k = first + i, rank = __shfl_sync(kAllLanes, rank_of_lane, k & 31);
      const float w = __shfl_sync(kAllLanes, weight, k & 31);
      if (k >= kTopk || rank < 0 || !in_row) continue;
      const Word v = rank == c.rank ? early[i]
                                    : take_word(c, static_cast<u64>(token) * kTopk + static_cast<u64>(k), word, rank,
                                                early[i], wait);
      if constexpr (kWeighted)
        sum.add_product(w, v);
      else
        sum.add(v);
    }
  }
  return sum.round();
}

__device__ inline void sum_pieces(const CombineContext& c, Wait& wait) {
  for (i32 item = grid_warp_of_part(kRanks - 1, kRanks); item < c.p.num_tokens * kOutPieces; item += grid_warps()) {
    const i32 token = item / kOutPieces, piece = item % kOutPieces, word = piece * 32 + lane_idx();
    const bool in_row = word < kOutWords;
    const u32 id = lane_idx() < kTopkPadded
                       ? at<const u32>(c.p.lane.state, kState.own_ids)[token * kTopkPadded + lane_idx()]
                       : kNoExpert;
    const i32 rank = rank_of_expert(static_cast<i32>(id) < 0 ? -1 : static_cast<i32>(id));
    const Word sum = config::kDirectSend ? sum_slots(c, token, word, rank, in_row, wait)
                                         : sum_partials(c, token, word, rank, in_row, wait);
    if (in_row) static_cast<Word*>(c.p.out)[static_cast<u64>(token) * kOutWords + static_cast<u64>(word)] = sum;
  }
}

__device__ inline void send_weights(const CombineContext& c) {
  if (!kWeighted || config::kDirectSend || c.p.weights == nullptr) return;
  for (i32 i = grid_thread(); i < c.p.num_tokens * kTopkPadded; i += grid_threads()) {
    const i32 token = i / kTopkPadded, k = i % kTopkPadded;
    u32 weight = k < kTopk ? as_bits(c.p.weights[token * kTopk + k]) : 0;
    if (weight == kSentinel) weight = kNanFloat;
    for (i32 peer = 0; peer < kRanks; ++peer) {
      if (peer != c.rank)
        store_relaxed_sys(weight_words(c.p.lane.inboxes[peer], kInbox.combine_weights, c.buffers.route, c.rank, 0) + i,
                          weight);
    }
  }
}

__device__ inline void clear_old_weights(const CombineContext& c, u32 old_buffer) {
  if (!kWeighted || config::kDirectSend) return;
  Word* words = reinterpret_cast<Word*>(weight_words(c.inbox, kInbox.combine_weights, old_buffer, 0, 0));
  for (i32 i = grid_thread(); i < kRanks * kWeightWords / 4; i += grid_threads())
    store_relaxed_sys(words + i, sentinel_word());
}

// A combine that did not complete shows no numbers. By every block that gave up, for all of the output.
__device__ inline void fill_with_nan(const CombineKernelParams& p) {
  const Word nan{kNanBf16Pair, kNanBf16Pair, kNanBf16Pair, kNanBf16Pair};
  for (i32 i = static_cast<i32>(threadIdx.x); i < p.num_tokens * kOutWords; i += config::kNumThreads)
    static_cast<Word*>(p.out)[i] = nan;
}

extern "C" __global__ void __launch_bounds__(config::kNumThreads, config::kBlocksPerSm)
    combine_kernel(const __grid_constant__ CombineKernelParams p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (p.num_tokens < 0) return;  // as dispatch
  u32* own_epoch = at<u32>(p.lane.state, kState.combine_epochs) + blockIdx.x;
  const u32 previous = *own_epoch, ended = load_relaxed_sys(p.lane.wait.abort);
  const i32 rank = p.lane.rank;
  const CombineContext c{p, Buffers(next_packet_epoch(previous)), rank, p.lane.inboxes[rank],
                         static_cast<const Word*>(p.expert_output)};
  Wait wait(p.lane.wait, rank, 1, c.buffers.epoch, ended != 0);
  if (blockIdx.x == gridDim.x - 1 && warp_idx() == kNumWarps - 1) {
    for (i32 peer = lane_idx(); peer < kRanks; peer += 32) {
      const u32 has_weights = p.weights != nullptr ? 1u : 0u;
      if (peer != rank)
        store_release_sys(combine_packet(p.lane.inboxes[peer], c.buffers, rank),
                          (static_cast<u64>(c.buffers.epoch) << 32) | has_weights);
    }
  }
  send_weights(c);
  return_pieces(c, wait);
  sum_pieces(c, wait);
  clear_old_weights(c, (c.buffers.route + kNumRouteBuffers - 1) % kNumRouteBuffers);
  if (blockIdx.x == 0) {
    for (i32 source = static_cast<i32>(threadIdx.x); source < kRanks; source += config::kNumThreads) {
      if (source == rank) continue;
      poll_packet(combine_packet(c.inbox, c.buffers, source), c.buffers.epoch, source, wait);
      load_acquire_sys(combine_packet(c.inbox, c.buffers, source));
    }
  }
  if (__syncthreads_or(wait.failed() ? 1 : 0) != 0) fill_with_nan(p);
  if (threadIdx.x == 0) *own_epoch = c.buffers.epoch;
}

}  // namespace expertwire
