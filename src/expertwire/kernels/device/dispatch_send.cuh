// The first half of a dispatch: route, tell the counts, send.
#pragma once

#include "pieces.cuh"

namespace expertwire {

// A thread for each id, several in flight. (A lane for each token, with ballots in place of atomics, reads K ids one behind
// the other: slower.)
constexpr i32 kMarkBatch = config::kMarkBatch;

struct MarkLoads {
  RawId ids[kMarkBatch];
};

__device__ inline MarkLoads load_marks(const DispatchKernelParams& p, i32 first) {
  MarkLoads loads;
#pragma unroll
  for (i32 b = 0; b < kMarkBatch; ++b) {
    const i32 i = first + b * config::kNumThreads;
    loads.ids[b] = kNoId;
    if (i < p.num_tokens * kTopk) loads.ids[b] = load_id(p, i);
  }
  return loads;
}

__device__ inline void mark_tokens(const DispatchContext& c, MarkLoads loads) {
#pragma unroll 1
  for (i32 first = static_cast<i32>(threadIdx.x); first < c.p.num_tokens * kTopk;) {
#pragma unroll
    for (i32 b = 0; b < kMarkBatch; ++b) {
      const i32 id = id_or_none(c.p, loads.ids[b]), token = (first + b * config::kNumThreads) / kTopk;
      if (id < 0) continue;
      c.marks.set(rank_of_expert(id), token);
      if constexpr (!config::kRankMajor) c.marks.set(kRanks + id, token);
    }
    first += kMarkBatch * config::kNumThreads;
    loads = load_marks(c.p, first);
  }
}

// One block tells every rank how many rows it gets and, EXPERT_MAJOR, how many for each expert. These carry the epoch, so
// nothing has to be ordered before them.
__device__ inline void send_counts(const DispatchContext& c) {
  constexpr i32 kCounts = kRanks + (config::kRankMajor ? 0 : config::kNumExperts);
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < kCounts; i += config::kNumThreads) {
    const i32 peer = i < kRanks ? i : rank_of_expert(i - kRanks);
    if (peer == c.rank || is_absent(peer)) continue;
    const i32 word = i < kRanks ? kRowCount : i - kRanks - config::kFirstExpert[peer];
    const u32 count = i < kRanks ? own_row_count(c, peer) : static_cast<u32>(c.marks.count(i));
    store_relaxed_sys(count_packet(c.p.lane.inboxes[peer], c.buffers, c.rank, word),
                      static_cast<u64>(c.buffers.epoch) << 32 | count);
    if (i < kRanks)
      count_sent(c.p.lane.state, c.buffers, count & ~kWeightsComeLate);
    else
      count_selections_sent(c.p.lane.state, c.buffers, count);
  }
}

// Tag k of a row for `peer`: where its selection k goes there.
__device__ inline u32 make_tag(const DispatchContext& c, const Facts& facts, i32 peer, i32 token) {
  if (facts.rank != peer) return kNoExpert;
  if constexpr (config::kRankMajor) return static_cast<u32>(facts.id);
  return static_cast<u32>((facts.id - config::kFirstExpert[peer]) * kMaxTokens +
                          c.marks.place(kRanks + facts.id, token).before);
}

__device__ inline void send_facts(const DispatchContext& c, const Facts& facts, i32 peer, i32 slot, i32 token) {
  u8* inbox = c.p.lane.inboxes[peer];
  const i32 lane = lane_idx();
  u32* tags = row_tags(inbox, c.buffers.route, c.rank, slot);
  if (lane < kTopk) store_relaxed_sys(tags + lane, make_tag(c, facts, peer, token));
  if (lane == 31) store_relaxed_sys(tags + kTopk, static_cast<u32>(token));
  if (lane < kTopkPadded)
    store_relaxed_sys(weight_words(inbox, kInbox.row_weights, c.buffers.route, c.rank, slot) + lane, facts.weight);
}

__device__ inline void send_piece(const DispatchContext& c, i32 peer, i32 slot, i32 piece, const Piece& data) {
  u8* row = dispatch_row(c.p.lane.inboxes[peer], c.buffers, c.rank, slot);
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    const i32 chunk = piece * kWords + u;
    if (in_row(chunk)) store_relaxed_sys(reinterpret_cast<Word*>(row) + chunk * 32 + lane_idx(), data.payload[u]);
    if constexpr (config::kFp8) {
      if (scale_lane(chunk, lane_idx()))
        store_relaxed_sys(reinterpret_cast<u32*>(row + kInbox.row.scales_offset) + scale_index(chunk, lane_idx()),
                          data.scale[u]);
    }
  }
}

// A part of an own token, ready for the wire; in EXPERT_MAJOR its own rank's copy is placed later.
struct OwnPart {
  Piece data;
  Facts facts;
};

__device__ inline OwnPart make_part(const DispatchContext& c, i32 part, const Loaded& loaded) {
  OwnPart own;
  own.facts = Facts{-1, -1, 0};
  if (!config::kRankMajor || part == kPieces) own.facts = make_facts(c.p, loaded);
  if (part < kPieces) own.data = encode(c.p, loaded, part);
  return own;
}

__device__ inline void send_part(const DispatchContext& c, i32 token, i32 part, const OwnPart& own) {
#pragma unroll 1
  for (i32 i = 1; i < kRanks; ++i) {
    const i32 peer = c.rank + i < kRanks ? c.rank + i : c.rank + i - kRanks;
    const Place slot = c.marks.place_of_warp(peer, token);
    if (!slot.has || is_absent(peer)) continue;
    if (part < kPieces)
      send_piece(c, peer, slot.before, part, own.data);
    else
      send_facts(c, own.facts, peer, slot.before, token);
  }
  if constexpr (config::kRankMajor) {
    const Place slot = c.marks.place_of_warp(c.rank, token);
    const i32 row = c.rank * kMaxTokens + slot.before;
    if (slot.has && part < kPieces) place_piece(c, row, part, own.data);
    if (slot.has && part == kPieces)
      record_row(c, c.rank, slot.before, token, own.facts.id, own.facts.rank == c.rank ? row : -1, own.facts.weight);
  }
  if (config::kRankMajor && config::kDirectSend && part == kPieces) {
    const u32 selected = __ballot_sync(kAllLanes, own.facts.rank >= 0 && own.facts.rank != c.rank);
    if (lane_idx() == 0) count_selections_sent(c.p.lane.state, c.buffers, static_cast<u32>(__popc(selected)));
  }
  if (part == kPieces && lane_idx() < kTopkPadded) {
    at<u32>(c.p.lane.state, kState.own_ids)[token * kTopkPadded + lane_idx()] =
        own.facts.id < 0 ? kNoExpert : static_cast<u32>(own.facts.id);
    at<u32>(c.p.lane.state, kState.own_weights)[token * kTopkPadded + lane_idx()] = own.facts.weight;
  }
}

}  // namespace expertwire
