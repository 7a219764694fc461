// The first half of a dispatch: route, tell the counts, send.
#pragma once

#include "pieces.cuh"

namespace expertwire {

// A thread for each id. (A lane for each token, with ballots in place of atomics, reads K ids one behind the other: slower.)
__device__ inline void mark_tokens(const DispatchContext& c) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < c.p.num_tokens * kTopk; i += config::kNumThreads) {
    const i32 id = load_id(c.p, i);
    if (id < 0) continue;
    c.marks.set(rank_of_expert(id), i / kTopk);
    if constexpr (!config::kRankMajor) c.marks.set(kRanks + id, i / kTopk);
  }
}

// One block tells every rank how many rows it gets and, EXPERT_MAJOR, how many for each expert. These carry the epoch, so
// nothing has to be ordered before them.
__device__ inline void send_counts(const DispatchContext& c) {
  constexpr i32 kCounts = kRanks + (config::kRankMajor ? 0 : config::kNumExperts);
  for (i32 i = static_cast<i32>(threadIdx.x); i < kCounts; i += config::kNumThreads) {
    const i32 peer = i < kRanks ? i : rank_of_expert(i - kRanks);
    if (peer == c.rank) continue;
    const i32 word = i < kRanks ? kRowCount : i - kRanks - config::kFirstExpert[peer];
    const u32 count = i < kRanks ? own_row_count(c, peer) : static_cast<u32>(c.marks.count(i));
    store_relaxed_sys(count_packet(c.p.lane.inboxes[peer], c.buffers, c.rank, word),
                      static_cast<u64>(c.buffers.epoch) << 32 | count);
  }
}

// This rank has finished its dispatch before, clean-up included: a release, by threads with no stores of their own pending.
__device__ inline void send_packets(const DispatchContext& c) {
  for (i32 peer = lane_idx(); peer < kRanks; peer += 32) {
    if (peer != c.rank)
      store_release_sys(dispatch_packet(c.p.lane.inboxes[peer], c.buffers, c.rank), static_cast<u64>(c.buffers.epoch)
                                                                                        << 32);
  }
}

struct RowFacts {  // of lane k: what a receiver, or this rank's combine, must know of selection k
  i32 id;
  i32 rank;
  u32 weight;
};

// Tag k of a row for `peer`: where its selection k goes there.
__device__ inline u32 make_tag(const DispatchContext& c, const RowFacts& facts, i32 peer, i32 token) {
  if (facts.rank != peer) return kNoExpert;
  if constexpr (config::kRankMajor) return static_cast<u32>(facts.id);
  return static_cast<u32>((facts.id - config::kFirstExpert[peer]) * kMaxTokens +
                          c.marks.count_before(kRanks + facts.id, token));
}

__device__ inline void send_tags(const DispatchContext& c, const RowFacts& facts, i32 peer, i32 slot, i32 token) {
  u8* inbox = c.p.lane.inboxes[peer];
  const i32 lane = lane_idx();
  if (lane < kTopk)
    store_relaxed_sys(row_tags(inbox, c.buffers.route, c.rank, slot) + lane, make_tag(c, facts, peer, token));
  if (lane == 31) store_relaxed_sys(row_tags(inbox, c.buffers.route, c.rank, slot) + kTopk, static_cast<u32>(token));
  if (lane < kTopkPadded)
    store_relaxed_sys(weight_words(inbox, kInbox.row_weights, c.buffers.route, c.rank, slot) + lane, facts.weight);
}

__device__ inline void send_piece(const DispatchContext& c, i32 peer, i32 slot, i32 piece, const Piece& data) {
  u8* row = dispatch_row(c.p.lane.inboxes[peer], c.buffers, c.rank, slot);
  if (in_row(piece)) store_relaxed_sys(reinterpret_cast<Word*>(row) + piece * 32 + lane_idx(), data.payload);
  if constexpr (config::kFp8) {
    if (scale_lane(piece, lane_idx()))
      store_relaxed_sys(reinterpret_cast<u32*>(row + kInbox.row.scales_offset) + scale_index(piece, lane_idx()),
                        data.scale);
  }
}

__device__ inline void send_token_piece(const DispatchContext& c, i32 token, i32 piece, const RawPiece& raw) {
  const Piece data = encode(c.p, raw, piece);
  RowFacts facts{-1, -1, 0};
  if (piece == 0) {
    facts.id = drop_repeat(raw.id);
    facts.rank = rank_of_expert(facts.id);
    facts.weight = raw.weight;
  }
#pragma unroll 1
  for (i32 i = 1; i <= kRanks; ++i) {
    const i32 peer = (c.rank + i) % kRanks;
    if (!c.marks.has(peer, token)) continue;
    if (peer == c.rank) {
      if constexpr (config::kRankMajor) {
        const i32 slot = c.marks.count_before(peer, token), row = peer * kMaxTokens + slot;
        place_piece(c, row, piece, data);
        if (piece == 0) record_row(c, peer, slot, token, facts.id, facts.rank == peer ? row : -1, facts.weight);
      }
      continue;
    }
    const i32 slot = c.marks.count_before(peer, token);
    send_piece(c, peer, slot, piece, data);
    if (piece == 0) send_tags(c, facts, peer, slot, token);
  }
  if (piece == 0 && lane_idx() < kTopkPadded) {
    at<u32>(c.p.lane.state, kState.own_ids)[token * kTopkPadded + lane_idx()] =
        facts.id < 0 ? kNoExpert : static_cast<u32>(facts.id);
    at<u32>(c.p.lane.state, kState.own_weights)[token * kTopkPadded + lane_idx()] = facts.weight;
  }
}

struct SendLoads {
  RawPiece raw[kInFlight];
};

__device__ inline SendLoads load_pieces(const DispatchContext& c, i32 item) {
  SendLoads loads;
#pragma unroll
  for (i32 u = 0; u < kInFlight; ++u) {
    const i32 at_item = item + u * grid_warps();
    if (at_item < c.p.num_tokens * kPieces) loads.raw[u] = load_raw(c.p, at_item / kPieces, at_item % kPieces);
  }
  return loads;
}

__device__ inline void send(const DispatchContext& c, SendLoads loads) {
  for (i32 item = grid_warp(); item < c.p.num_tokens * kPieces; item += kInFlight * grid_warps()) {
    if (item != grid_warp()) loads = load_pieces(c, item);
#pragma unroll
    for (i32 u = 0; u < kInFlight; ++u) {
      const i32 at_item = item + u * grid_warps();
      if (at_item < c.p.num_tokens * kPieces) send_token_piece(c, at_item / kPieces, at_item % kPieces, loads.raw[u]);
    }
  }
}

}  // namespace expertwire
