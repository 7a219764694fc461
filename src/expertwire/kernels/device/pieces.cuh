// What all steps of a dispatch share: the block's marks, pieces of rows on their way, and what is noted of a row.
#pragma once

#include "masking.cuh"
#include "quantize.cuh"
#include "traffic.cuh"
#include "wire.cuh"

namespace expertwire {

constexpr i32 kRowWords = static_cast<i32>(kInbox.row.payload_bytes / 16);
constexpr i32 kPieces = (kRowWords + 32 * kWords - 1) / (32 * kWords);
constexpr i32 kParts = kPieces + 1;  // of a row: pieces of its payload, then the facts of its routing
constexpr i32 kMaskWords = num_mask_words(kShape);
constexpr i32 kMarked = num_marks(kShape, config::kRankMajor);  // ranks, then experts

// The next part is asked for before this one is stored. (FP8: not enough registers.)
constexpr bool kPrefetches = kWords > 1 && !config::kFp8;

// Warps that share a kind of work, and this one's number among them.
struct Crew {
  i32 warp, num_warps;
  bool has_this;
};

// Whose warps send own tokens, and whose place those that stay: all do both, or kSenders in a hundred blocks the one and the
// rest the other. Stores to a peer wait for the wire, and on the same SM those behind them wait too. Few blocks are all needed
// for both.
constexpr i32 kFewBlocks = 64;
__device__ inline Crew crew_of(bool sends) {
  const i32 blocks = static_cast<i32>(gridDim.x), block = static_cast<i32>(blockIdx.x);
  if (!kWhole || config::kSenders == 0 || blocks <= kFewBlocks) return Crew{grid_warp(), grid_warps(), true};
  const i32 num_senders = blocks * config::kSenders / 100;
  const i32 first = sends ? 0 : num_senders, num = sends ? num_senders : blocks - num_senders;
  return Crew{warp_idx() * num + block - first, kNumWarps * num, (block < num_senders) == sends};
}
__device__ inline Crew senders() { return crew_of(true); }
__device__ inline Crew keepers() { return crew_of(false); }

// The part of an own token that a warp takes first: of those that it only places, the last.
__device__ inline i32 first_part(const DispatchKernelParams& p) {
  const Crew sending = senders(), keeping = keepers();
  if (sending.has_this) return sending.warp;
  const i32 more = (p.num_tokens * kParts - 1 - keeping.warp) / keeping.num_warps;
  return keeping.warp + (more > 0 ? more * keeping.num_warps : 0);
}

struct Place {
  i32 before;
  bool has;
};

// Shared memory of a block.
struct Marks {
  u32* bits;      // [kMaskWords, kMarked] which of the own tokens chose it
  i32* num_rows;  // [R] rows of each source
  i32* base;      // [R, L] rows of lower sources within each local expert

  __device__ explicit Marks(u32* memory)
      : bits(memory), num_rows(reinterpret_cast<i32*>(memory + kMarked * kMaskWords)), base(num_rows + kRanks) {}
  __device__ void set(i32 mark, i32 token) const { atomicOr(bits + (token >> 5) * kMarked + mark, 1u << (token & 31)); }
  // Rows that lower tokens have under `mark`, and whether this token has one.
  __device__ Place place(i32 mark, i32 token) const {
    Place place{0, false};
#pragma unroll(kMaskWords <= 4 ? kMaskWords : 1)
    for (i32 i = 0; i < kMaskWords; ++i) {
      const u32 word = bits[i * kMarked + mark];
      const i32 lower = token - i * 32;  // tokens of this word before it
      place.before += __popc(lower >= 32 ? word : word & ~(kAllLanes << (lower > 0 ? lower : 0)));
      if (lower >= 0 && lower < 32) place.has = (word >> lower & 1u) != 0;
    }
    return place;
  }
  // The same by a whole warp, for one mark and token.
  __device__ Place place_of_warp(i32 mark, i32 token) const {
    if constexpr (kMaskWords <= 4) return place(mark, token);
    const i32 last = token >> 5;
    u32 before = 0;
#pragma unroll 1
    for (i32 i = lane_idx(); i <= last; i += 32)
      before += static_cast<u32>(__popc(bits[i * kMarked + mark] & (i < last ? kAllLanes : (1u << (token & 31)) - 1u)));
    const bool has = (bits[last * kMarked + mark] >> (token & 31) & 1u) != 0;
    return Place{static_cast<i32>(__reduce_add_sync(kAllLanes, before)), has};
  }
  __device__ i32 count(i32 mark) const {
    i32 count = 0;
#pragma unroll(kMaskWords <= 4 ? kMaskWords : 1)
    for (i32 i = 0; i < kMaskWords; ++i) count += __popc(bits[i * kMarked + mark]);
    return count;
  }
};

struct DispatchContext {
  const DispatchKernelParams& p;
  Buffers buffers;
  i32 rank;
  u8* inbox;
  Marks marks;
};

// An id as it lies in memory: looking at it would wait for its load.
struct alignas(8) RawId {
  u32 low, high;
};

__device__ inline RawId load_id(const DispatchKernelParams& p, i32 at_id) {
  RawId id{0, 0};
  if (p.topk_ids_are_64_bit != 0)
    id = static_cast<const RawId*>(p.topk_ids)[at_id];
  else
    id.low = static_cast<const u32*>(p.topk_ids)[at_id];
  return id;
}
constexpr RawId kNoId{kSentinel, kSentinel};

// The physical expert that an id chooses.
__device__ inline i32 id_or_none(const DispatchKernelParams& p, RawId id) {
  const bool in_range =
      id.low < static_cast<u32>(config::kNumLogicalExperts) && (id.high == 0 || p.topk_ids_are_64_bit == 0);
  if (!in_range) return -1;
  if constexpr (config::kPlaced) return p.physical_of_logical[id.low];
  return static_cast<i32>(id.low);
}

// The id of lane k < K of a token, or -1 if it repeats a lower k.
__device__ inline i32 drop_repeat(i32 id) {
  const u32 same = __match_any_sync(kAllLanes, id);
  return (same & ((1u << lane_idx()) - 1u)) != 0 ? -1 : id;
}

__device__ inline u32 own_row_count(const DispatchContext& c, i32 peer) {
  return static_cast<u32>(c.marks.count(peer)) | (c.p.weights == nullptr ? kWeightsComeLate : 0u);
}

__device__ inline bool in_row(i32 chunk) { return chunk * 32 + lane_idx() < kRowWords; }

// Payload and scales of one piece of a row, as they go on the wire.
struct Piece {
  Word payload[kWords];
  u32 scale[kWords];  // of lanes that hold one
};

struct Facts {  // of lane k: what a receiver, or this rank's combine, must know of selection k
  i32 id;
  i32 rank;
  u32 weight;
};

// One part of an own token as loaded, so that loads can be in flight. A piece has payload and, in EXPERT_MAJOR, ids; the
// last part has ids and weights.
struct Loaded {
  Word low[kWords], high[kWords];
  u32 scale[kWords];
  RawId id;
  u32 weight;
};

__device__ inline Loaded load_part(const DispatchKernelParams& p, i32 token, i32 part) {
  Loaded loaded;
  loaded.id = kNoId;
  loaded.weight = 0;
  const i32 lane = lane_idx();
  if (lane < kTopk) {
    if (!config::kRankMajor || part == kPieces) loaded.id = load_id(p, token * kTopk + lane);
    if (part == kPieces)
      loaded.weight = p.weights == nullptr ? as_bits(1.0f) : as_bits(p.weights[token * kTopk + lane]);
  }
  if (part == kPieces) return loaded;
  const Word* x = static_cast<const Word*>(p.x);
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    const i32 chunk = part * kWords + u, word = chunk * 32 + lane;
    loaded.low[u] = loaded.high[u] = Word{0, 0, 0, 0};
    loaded.scale[u] = 0;
    if (!in_row(chunk)) continue;
    const u64 at_word = static_cast<u64>(token) * kRowWords + static_cast<u64>(word);
    if (config::kFp8 && p.block_scales == nullptr) {
      loaded.low[u] = load_once(x + at_word * 2);
      loaded.high[u] = load_once(x + at_word * 2 + 1);
    } else {
      loaded.low[u] = load_once(x + at_word);
      if (config::kFp8 && scale_lane(chunk, lane))
        loaded.scale[u] = static_cast<const u32*>(p.block_scales)[token * kScalesInRow + scale_index(chunk, lane)];
    }
  }
  return loaded;
}

__device__ inline Piece encode(const DispatchKernelParams& p, const Loaded& loaded, i32 piece) {
  Piece out;
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    if constexpr (!config::kFp8) {
      out.payload[u] = avoid_sentinel<kNanBf16Pair>(loaded.low[u]);
      out.scale[u] = 0;
    } else {
      out.payload[u] = loaded.low[u];
      out.scale[u] = loaded.scale[u];
      if (p.block_scales == nullptr) {
        const Quantized q = quantize_piece(loaded.low[u], loaded.high[u], in_row(piece * kWords + u));
        out.payload[u] = q.payload;
        out.scale[u] = q.scale;
      }
      out.payload[u] = avoid_sentinel<kNanE4m3Quad>(out.payload[u]);
      if (out.scale[u] == kSentinel) out.scale[u] = config::kUe8m0 ? 0xFFFFFFFEu : kNanFloat;
    }
  }
  return out;
}

__device__ inline Facts make_facts(const DispatchKernelParams& p, const Loaded& loaded) {
  const i32 id = drop_repeat(id_or_none(p, loaded.id));
  return Facts{id, rank_of_expert(id), loaded.weight == kSentinel ? kNanFloat : loaded.weight};
}

__device__ inline void store_scale(const DispatchContext& c, i32 row, i32 scale_idx, u32 scale) {
  constexpr u64 kScales = static_cast<u64>(num_scales(kShape)), kColumnStride = column_stride(kShape);
  u32* out = static_cast<u32*>(c.p.scales);
  const u64 r = static_cast<u64>(row), s = static_cast<u64>(scale_idx);
  if constexpr (config::kColumnScales)
    out[(r / kSourceRows * kScales + s) * kColumnStride + r % kSourceRows] = scale;
  else
    out[r * kScales + s] = scale;
}

__device__ inline void place_piece(const DispatchContext& c, i32 row, i32 piece, const Piece& data) {
  Word* out = static_cast<Word*>(c.p.tokens) + static_cast<u64>(row) * kRowWords;
#pragma unroll
  for (i32 u = 0; u < kWords; ++u) {
    const i32 chunk = piece * kWords + u;
    if (in_row(chunk)) out[chunk * 32 + lane_idx()] = data.payload[u];
    if constexpr (config::kFp8) {
      if (scale_lane(chunk, lane_idx())) store_scale(c, row, scale_index(chunk, lane_idx()), data.scale[u]);
    }
  }
}

// What combine needs to know, and the outputs that come once a row. `row` of lane k: where selection k went, or -1.
__device__ inline void record_row(const DispatchContext& c, i32 source, i32 slot, i32 token, i32 id, i32 row,
                                  u32 weight) {
  const i32 lane = lane_idx(), received = source * kMaxTokens + slot;
  i32 position = row;
  if (lane == 0) at<i32>(c.p.lane.state, kState.tokens)[received] = token;
  if constexpr (config::kRankMajor) {
    if (lane < kTopk) {
      c.p.out_topk_ids[received * kTopk + lane] = row >= 0 ? id : config::kInvalidId;
      c.p.out_weights[received * kTopk + lane] = row >= 0 ? as_float(weight) : 0.0f;
    }
    if (row >= 0)
      atomicAdd(at<u64>(c.p.lane.state, kState.expert_totals) + (id - config::kFirstExpert[c.rank]), u64{1});
    if constexpr (config::kDirectSend)
      position = row >= 0 ? received * kTopk + lane : -1;
    else
      position = lane == 0 ? received : -1;
    if (config::kDirectSend && source != c.rank) {
      const u32 selected = __ballot_sync(kAllLanes, row >= 0);
      if (lane == 0) count_selections_received(c.p.lane.state, c.buffers, static_cast<u32>(__popc(selected)));
    }
  } else {
    if (row >= 0) c.p.source_token[row] = source * kMaxTokens + token;
  }
  if (lane >= kTopkPadded) return;
  if constexpr (!config::kRankMajor || config::kDirectSend)
    at<i32>(c.p.lane.state, kState.positions)[received * kTopkPadded + lane] = position;
  if constexpr (!config::kRankMajor) at<u32>(c.p.lane.state, kState.weights)[received * kTopkPadded + lane] = weight;
  if (source == c.rank) at<i32>(c.p.lane.state, kState.own_positions)[token * kTopkPadded + lane] = position;
}

__device__ inline void place_everywhere(const DispatchContext& c, i32 row, i32 piece, const Piece& data) {
  for (u32 left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
    place_piece(c, __shfl_sync(kAllLanes, row, __ffs(static_cast<i32>(left)) - 1), piece, data);
  }
}

}  // namespace expertwire
