// The second half of a dispatch: take the counts, place the own rows, receive the others'.
#pragma once

#include "dispatch_send.cuh"

namespace expertwire {

// RANK_MAJOR asks for a source's row count together with its rows. Else all blocks have the counts of all before the first.
constexpr bool kCountsWithRows = config::kRankMajor && !config::kMask;

// By one thread of the grid.
__device__ inline void note_rows(const DispatchContext& c, i32 source, u32 count) {
  at<u32>(c.p.lane.state, kState.num_rows)[source] = count;
  if (source != c.rank) count_received(c.p.lane.state, c.buffers, count & ~kWeightsComeLate);
  if constexpr (config::kRankMajor) c.p.num_tokens_per_rank[source] = static_cast<i32>(count & ~kWeightsComeLate);
}

// EXPERT_MAJOR: rows of every source, and where each source's rows start within each local expert. A thread for each
// expert, sources in order, a few asked for at once; block 0 publishes.
__device__ inline void take_counts(const DispatchContext& c, Wait& wait) {
  constexpr i32 kBatch = kRanks < 8 ? kRanks : 8;
  const i32 first = config::kFirstExpert[c.rank], num_local = config::kFirstExpert[c.rank + 1] - first;
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < num_local + kRanks; i += config::kNumThreads) {
    if (i >= num_local) {
      const i32 source = i - num_local;
      const u32 count = kWhole && source == c.rank ? own_row_count(c, source)
                                                   : poll_packet(count_packet(c.inbox, c.buffers, source, kRowCount),
                                                                 c.buffers.epoch, source, wait);
      c.marks.num_rows[source] = static_cast<i32>(count & ~kWeightsComeLate);
      if (blockIdx.x == 0) note_rows(c, source, count);
      continue;
    }
    i32 rows = 0;
#pragma unroll 1
    for (i32 batch = 0; batch < kRanks; batch += kBatch) {
      u64 counts[kBatch];
#pragma unroll
      for (i32 b = 0; b < kBatch; ++b) {
        if (batch + b < kRanks && (!kWhole || batch + b != c.rank))
          counts[b] = load_relaxed_sys(count_packet(c.inbox, c.buffers, batch + b, i));
      }
#pragma unroll
      for (i32 b = 0; b < kBatch; ++b) {
        const i32 source = batch + b;
        if (source >= kRanks) break;
        const i32 more = kWhole && source == c.rank
                             ? c.marks.count(kRanks + first + i)
                             : static_cast<i32>(poll_packet(count_packet(c.inbox, c.buffers, source, i), counts[b],
                                                            c.buffers.epoch, source, wait));
        c.marks.base[source * config::kMaxLocalExperts + i] = rows;
        if (blockIdx.x == 0) {
          c.p.rank_ranges[(i * kRanks + source) * 2] = rows;
          c.p.rank_ranges[(i * kRanks + source) * 2 + 1] = more;
          if (source != c.rank) count_selections_received(c.p.lane.state, c.buffers, static_cast<u32>(more));
        }
        rows += more;
      }
    }
    if (blockIdx.x == 0) {
      c.p.num_tokens_per_expert[i] = rows;
      at<u64>(c.p.lane.state, kState.expert_totals)[i] += static_cast<u64>(rows);
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

// EXPERT_MAJOR; in RANK_MAJOR own rows were placed while sending.
__device__ inline void place_own(const DispatchContext& c, i32 item, const OwnPart& own) {
  const i32 token = item / kParts, part = item % kParts;
  const Place slot = c.marks.place_of_warp(c.rank, token);
  if (!slot.has) return;
  i32 row = -1;
  if (own.facts.rank == c.rank) {
    const i32 local = own.facts.id - config::kFirstExpert[c.rank];
    row = local * kSourceRows + c.marks.base[c.rank * config::kMaxLocalExperts + local] +
          c.marks.place(kRanks + own.facts.id, token).before;
  }
  if (part < kPieces)
    place_everywhere(c, row, part, own.data);
  else
    record_row(c, c.rank, slot.before, token, own.facts.id, row, own.facts.weight);
}

// One part of a received row. What has not been sent looks like what has not arrived.
struct Received {
  Word payload[kWords];
  u32 scale[kWords];
  u32 tag;            // EXPERT_MAJOR with every part, for it says where the row goes
  u32 token, weight;  // of the last part
  u64 count;          // kCountsWithRows: the source's packet of its row count

  __device__ bool has_arrived(i32 part) const {
    bool all = tag != kSentinel;
    if (part == kPieces) return all && token != kSentinel && weight != kSentinel;
#pragma unroll
    for (i32 u = 0; u < kWords; ++u)
      all = all && expertwire::has_arrived(payload[u]) && (!config::kFp8 || scale[u] != kSentinel);
    return all;
  }
};

// A place in the list of parts that this warp receives: sources in turn, other warps for each.
struct Cursor {
  i32 source, item;  // step j is source (rank + j) % R

  __device__ Cursor(const DispatchContext& c, i32 j)
      : source((c.rank + j) % kRanks), item(grid_warp_of_part(j, kRanks)) {}
  __device__ i32 slot() const { return item / kParts; }
  __device__ i32 part() const { return item % kParts; }
  __device__ bool may_be_sent() const { return item < kMaxTokens * kParts; }
};

// All of it at once: a wait costs one trip to memory, however many words it is for.
__device__ inline Received load_received(const DispatchContext& c, const Cursor& cursor) {
  const i32 source = cursor.source, slot = cursor.slot(), part = cursor.part(), lane = lane_idx();
  Received r;
  r.tag = kNoExpert;
  r.token = r.weight = 0;
  r.count = 0;
  const u32* tags = row_tags(c.inbox, c.buffers.route, source, slot);
  if (part < kPieces) {
    const u8* row = dispatch_row(c.inbox, c.buffers, source, slot);
#pragma unroll
    for (i32 u = 0; u < kWords; ++u) {
      const i32 chunk = part * kWords + u;
      r.payload[u] = Word{0, 0, 0, 0};
      if (in_row(chunk)) r.payload[u] = load_relaxed_sys(reinterpret_cast<const Word*>(row) + chunk * 32 + lane);
      r.scale[u] = 0;
      if (config::kFp8 && scale_lane(chunk, lane))
        r.scale[u] =
            load_relaxed_sys(reinterpret_cast<const u32*>(row + kInbox.row.scales_offset) + scale_index(chunk, lane));
    }
  } else {
    r.token = load_relaxed_sys(tags + kTopk);
    if (lane < kTopkPadded)
      r.weight = load_relaxed_sys(weight_words(c.inbox, kInbox.row_weights, c.buffers.route, source, slot) + lane);
  }
  if (lane < kTopk && (!config::kRankMajor || part == kPieces)) r.tag = load_relaxed_sys(tags + lane);
  if constexpr (kCountsWithRows) r.count = load_relaxed_sys(count_packet(c.inbox, c.buffers, source, kRowCount));
  return r;
}

// Whether the source is known to send no such row.
__device__ inline bool is_never_sent(const DispatchContext& c, const Cursor& cursor, const Received& r) {
  if constexpr (kCountsWithRows) {
    return static_cast<u32>(r.count >> 32) == c.buffers.epoch &&
           cursor.slot() >= static_cast<i32>(static_cast<u32>(r.count) & ~kWeightsComeLate);
  } else {
    return cursor.slot() >= c.marks.num_rows[cursor.source];
  }
}

__device__ inline void await_received(const DispatchContext& c, const Cursor& cursor, Received& r, Wait& wait) {
  wait.poll(
      r, cursor.source, [&] { return load_received(c, cursor); },
      [&](const Received& got) { return got.has_arrived(cursor.part()) || is_never_sent(c, cursor, got); });
  if constexpr (config::kMask) {
    if (!wait.gone(cursor.source)) return;
    r.tag = kNoExpert;  // the row's place is not known
    add_to_set(block_losses().incomplete, cursor.source);
  }
}

__device__ inline void place_received(const DispatchContext& c, const Cursor& cursor, const Received& r) {
  const i32 source = cursor.source, slot = cursor.slot(), part = cursor.part(), lane = lane_idx();
  const i32 output = row_of_tag(c, source, slot, r.tag);
  if (part == kPieces) {
    record_row(c, source, slot, static_cast<i32>(r.token), static_cast<i32>(r.tag), output, r.weight);
    return;
  }
  u8* row = dispatch_row(c.inbox, c.buffers, source, slot);
  Piece data;
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    data.payload[u] = r.payload[u];
    data.scale[u] = r.scale[u];
  }
  if constexpr (config::kRankMajor)
    place_piece(c, source * kMaxTokens + slot, part, data);
  else
    place_everywhere(c, output, part, data);
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    const i32 chunk = part * kWords + u;
    if (in_row(chunk)) store_relaxed_sys(reinterpret_cast<Word*>(row) + chunk * 32 + lane, sentinel_word());
    if (config::kFp8 && scale_lane(chunk, lane))
      store_relaxed_sys(reinterpret_cast<u32*>(row + kInbox.row.scales_offset) + scale_index(chunk, lane), kSentinel);
  }
}

// Ids and weights of padding rows are defined.
__device__ inline void clear_padding(const DispatchContext& c, i32 source, i32 num_rows) {
  if constexpr (!config::kRankMajor) return;
#pragma unroll 1
  for (i32 i = num_rows * kTopk + grid_thread(); i < kMaxTokens * kTopk; i += grid_threads()) {
    c.p.out_topk_ids[source * kMaxTokens * kTopk + i] = config::kInvalidId;
    c.p.out_weights[source * kMaxTokens * kTopk + i] = 0.0f;
  }
}

// The first piece has been waited for by the caller.
__device__ inline void receive(const DispatchContext& c, Received r, Wait& wait) {
#pragma unroll 1
  for (i32 j = kFirstStep; j < kRanks; ++j) {
    Cursor cursor(c, j);
    i32 rows;
    if constexpr (kCountsWithRows) {
      const u64* packet = count_packet(c.inbox, c.buffers, cursor.source, kRowCount);
      const u64 known = j == kFirstStep ? r.count : load_relaxed_sys(packet);  // mostly there since the first part is
      // One lane's for all: one whose wait has ended has none.
      const u32 count = __shfl_sync(kAllLanes, poll_packet(packet, known, c.buffers.epoch, cursor.source, wait), 0);
      if (cursor.item == 0 && lane_idx() == 0 && !wait.failed()) note_rows(c, cursor.source, count);
      rows = static_cast<i32>(count & ~kWeightsComeLate);
    } else {
      rows = c.marks.num_rows[cursor.source];
    }
#pragma unroll 1
    for (bool taken = j == kFirstStep, is_loaded = false; cursor.item < rows * kParts; taken = false) {
      if (!taken) {
        if (!is_loaded) r = load_received(c, cursor);
        await_received(c, cursor, r, wait);
      }
      if (__any_sync(kAllLanes, wait.failed())) return;
      const Received now = r;
      const Cursor at = cursor;
      cursor.item += grid_warps();
      is_loaded = kPrefetches && cursor.item < rows * kParts;
      if (is_loaded) r = load_received(c, cursor);
      place_received(c, at, now);
    }
    clear_padding(c, cursor.source, rows);
  }
  if constexpr (kWhole) clear_padding(c, c.rank, c.marks.count(c.rank));
}

}  // namespace expertwire
