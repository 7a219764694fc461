// The second half of a dispatch: take the counts, place the own rows, receive the others'.
#pragma once

#include "pieces.cuh"

namespace expertwire {

// Row counts of every source and, EXPERT_MAJOR, of every local expert.
__device__ inline void take_counts(const DispatchContext& c, Wait& wait) {
  constexpr i32 kEach = config::kRankMajor ? 1 : kCountWords;
  const i32 first = config::kFirstExpert[c.rank], num_local = config::kFirstExpert[c.rank + 1] - first;
  for (i32 i = static_cast<i32>(threadIdx.x); i < kRanks * kEach; i += config::kNumThreads) {
    const i32 source = i / kEach, word = kRowCount - i % kEach;
    if (word != kRowCount && word >= num_local) continue;
    u32 count;
    if (source == c.rank)
      count = word == kRowCount ? own_row_count(c, c.rank) : static_cast<u32>(c.marks.count(kRanks + first + word));
    else
      count = poll_packet(count_packet(c.inbox, c.buffers, source, word), c.buffers.epoch, source, wait);
    if (word != kRowCount) {
      c.marks.base[source * config::kMaxLocalExperts + word] = static_cast<i32>(count);
      continue;
    }
    c.marks.num_rows[source] = static_cast<i32>(count & ~kWeightsComeLate);
    if (blockIdx.x == 0) {
      at<u32>(c.p.lane.state, kState.num_rows)[source] = count;
      if constexpr (config::kRankMajor) c.p.num_tokens_per_rank[source] = c.marks.num_rows[source];
    }
  }
}

// EXPERT_MAJOR: from rows of each source to where they start within each local expert; block 0 publishes the counts.
__device__ inline void sum_counts(const DispatchContext& c) {
  const i32 num_local = config::kFirstExpert[c.rank + 1] - config::kFirstExpert[c.rank];
  for (i32 local = static_cast<i32>(threadIdx.x); local < num_local; local += config::kNumThreads) {
    i32 rows = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      i32& base = c.marks.base[source * config::kMaxLocalExperts + local];
      const i32 more = base;
      base = rows;
      if (blockIdx.x == 0) {
        c.p.rank_ranges[(local * kRanks + source) * 2] = rows;
        c.p.rank_ranges[(local * kRanks + source) * 2 + 1] = more;
      }
      rows += more;
    }
    if (blockIdx.x == 0) {
      c.p.num_tokens_per_expert[local] = rows;
      at<u64>(c.p.lane.state, kState.expert_totals)[local] += static_cast<u64>(rows);
    }
  }
}

// Lane k: the output row of selection k of a received row, from its tag.
__device__ inline i32 row_of_tag(const DispatchContext& c, i32 source, i32 slot, u32 tag) {
  if (tag == kNoExpert) return -1;
  if constexpr (config::kRankMajor) return source * kMaxTokens + slot;
  const i32 local = static_cast<i32>(tag) / kMaxTokens;
  return local * kSourceRows + c.marks.base[source * config::kMaxLocalExperts + local] +
         static_cast<i32>(tag) % kMaxTokens;
}

// Own tokens in EXPERT_MAJOR; in RANK_MAJOR they were placed while sending.
__device__ inline void place_own(const DispatchContext& c) {
  for (i32 item = grid_warp_of_part(1, kRanks + 1); item < c.p.num_tokens * kPieces; item += grid_warps()) {
    const i32 token = item / kPieces, piece = item % kPieces;
    if (!c.marks.has(c.rank, token)) continue;
    const RawPiece raw = load_raw(c.p, token, piece);
    const i32 id = load_unique_id(c.p, token), rank = rank_of_expert(id), local = id - config::kFirstExpert[c.rank];
    i32 row = -1;
    if (rank == c.rank)
      row = local * kSourceRows + c.marks.base[c.rank * config::kMaxLocalExperts + local] +
            c.marks.count_before(kRanks + id, token);
    place_everywhere(c, row, piece, encode(c.p, raw, piece));
    if (piece == 0) record_row(c, c.rank, c.marks.count_before(c.rank, token), token, id, row, load_weight(c.p, token));
  }
}

struct ReceiveLoads {
  Word payload;
  u32 tag, scale;
  u32 token, weight;  // with the row's first piece
};

struct RowPiece {
  i32 source, slot, piece;
};

__device__ inline ReceiveLoads load_received(const DispatchContext& c, const RowPiece& at_piece) {
  ReceiveLoads loads{Word{0, 0, 0, 0}, kNoExpert, 0, 0, 0};
  const u8* row = dispatch_row(c.inbox, c.buffers, at_piece.source, at_piece.slot);
  if (lane_idx() < kTopk && (!config::kRankMajor || at_piece.piece == 0))
    loads.tag = load_relaxed_sys(row_tags(c.inbox, c.buffers.route, at_piece.source, at_piece.slot) + lane_idx());
  if (at_piece.piece == 0) {
    loads.token = load_relaxed_sys(row_tags(c.inbox, c.buffers.route, at_piece.source, at_piece.slot) + kTopk);
    if (lane_idx() < kTopkPadded)
      loads.weight = load_relaxed_sys(
          weight_words(c.inbox, kInbox.row_weights, c.buffers.route, at_piece.source, at_piece.slot) + lane_idx());
  }
  if (in_row(at_piece.piece))
    loads.payload = load_relaxed_sys(reinterpret_cast<const Word*>(row) + at_piece.piece * 32 + lane_idx());
  if (config::kFp8 && scale_lane(at_piece.piece, lane_idx())) {
    loads.scale = load_relaxed_sys(reinterpret_cast<const u32*>(row + kInbox.row.scales_offset) +
                                   scale_index(at_piece.piece, lane_idx()));
  }
  return loads;
}

__device__ inline void take_piece(const DispatchContext& c, const RowPiece& at_piece, ReceiveLoads loads, Wait& wait) {
  const i32 source = at_piece.source, slot = at_piece.slot, piece = at_piece.piece, lane = lane_idx();
  u8* row = dispatch_row(c.inbox, c.buffers, source, slot);
  const u32* tags = row_tags(c.inbox, c.buffers.route, source, slot);
  if (loads.tag == kSentinel) loads.tag = poll(tags + lane, source, wait);
  const i32 output = row_of_tag(c, source, slot, loads.tag);
  if (piece == 0) {
    if (loads.token == kSentinel) loads.token = poll(tags + kTopk, source, wait);
    if (loads.weight == kSentinel)
      loads.weight =
          poll(weight_words(c.inbox, kInbox.row_weights, c.buffers.route, source, slot) + lane, source, wait);
    record_row(c, source, slot, static_cast<i32>(loads.token), static_cast<i32>(loads.tag), output, loads.weight);
  }
  Piece data{loads.payload, loads.scale};
  if (in_row(piece)) {
    Word* from = reinterpret_cast<Word*>(row) + piece * 32 + lane;
    data.payload = poll(from, loads.payload, source, wait);
    store_relaxed_sys(from, sentinel_word());
  }
  if constexpr (config::kFp8) {
    if (scale_lane(piece, lane)) {
      u32* from = reinterpret_cast<u32*>(row + kInbox.row.scales_offset) + scale_index(piece, lane);
      if (data.scale == kSentinel) data.scale = poll(from, source, wait);
      store_relaxed_sys(from, kSentinel);
    }
  }
  if constexpr (config::kRankMajor)
    place_piece(c, source * kMaxTokens + slot, piece, data);
  else
    place_everywhere(c, output, piece, data);
}

// The first pieces from the next rank are asked for before it is known how many rows there are: what has not been sent looks
// like what has not arrived, and is not waited for.
struct EarlyLoads {
  ReceiveLoads loads[kInFlight];
};

__device__ inline RowPiece row_piece(i32 source, i32 item) { return RowPiece{source, item / kPieces, item % kPieces}; }

__device__ inline EarlyLoads load_early(const DispatchContext& c) {
  EarlyLoads early;
  const i32 first = grid_warp_of_part(2, kRanks + 1), source = (c.rank + 1) % kRanks;
#pragma unroll
  for (i32 u = 0; u < kInFlight; ++u) {
    const i32 item = first + u * grid_warps();
    if (kRanks > 1 && item < kMaxTokens * kPieces) early.loads[u] = load_received(c, row_piece(source, item));
  }
  return early;
}

__device__ inline void receive(const DispatchContext& c, EarlyLoads early, Wait& wait) {
#pragma unroll 1
  for (i32 j = 1; j < kRanks; ++j) {
    const i32 source = (c.rank + j) % kRanks, first = grid_warp_of_part(j + 1, kRanks + 1),
              end = c.marks.num_rows[source] * kPieces;
    for (i32 item = first; item < end; item += kInFlight * grid_warps()) {
      if (j != 1 || item != first) {
#pragma unroll
        for (i32 u = 0; u < kInFlight; ++u) {
          if (item + u * grid_warps() < end)
            early.loads[u] = load_received(c, row_piece(source, item + u * grid_warps()));
        }
      }
#pragma unroll
      for (i32 u = 0; u < kInFlight; ++u) {
        if (item + u * grid_warps() < end)
          take_piece(c, row_piece(source, item + u * grid_warps()), early.loads[u], wait);
      }
    }
  }
}

}  // namespace expertwire
