// What all steps of a dispatch share: the block's marks, pieces of rows on their way, and what is noted of a row.
#pragma once

#include "quantize.cuh"
#include "wire.cuh"

namespace expertwire {

constexpr i32 kRowWords = static_cast<i32>(kInbox.row.payload_bytes / 16);
constexpr i32 kPieces = (kRowWords + 31) / 32;
constexpr i32 kMaskWords = num_mask_words(kShape);
constexpr i32 kMarked = num_marks(kShape, config::kRankMajor);  // ranks, then experts

// Shared memory of a block.
struct Marks {
  u32* bits;      // [kMarked, kMaskWords] which of the own tokens chose it
  i32* num_rows;  // [R] rows of each source
  i32* base;      // [R, L] rows of lower sources within each local expert

  __device__ explicit Marks(u32* memory)
      : bits(memory), num_rows(reinterpret_cast<i32*>(memory + kMarked * kMaskWords)), base(num_rows + kRanks) {}
  __device__ void set(i32 mark, i32 token) const {
    atomicOr(bits + mark * kMaskWords + (token >> 5), 1u << (token & 31));
  }
  __device__ bool has(i32 mark, i32 token) const {
    return (bits[mark * kMaskWords + (token >> 5)] >> (token & 31) & 1u) != 0;
  }
  __device__ i32 count_before(i32 mark, i32 token) const {
    const u32* words = bits + mark * kMaskWords;
    i32 count = __popc(words[token >> 5] & ((1u << (token & 31)) - 1u));
    for (i32 i = 0; i < (token >> 5); ++i) count += __popc(words[i]);
    return count;
  }
  __device__ i32 count(i32 mark) const {
    i32 count = 0;
    for (i32 i = 0; i < kMaskWords; ++i) count += __popc(bits[mark * kMaskWords + i]);
    return count;
  }
};

constexpr i32 kInFlight = config::kInFlight;  // pieces of a warp whose loads are out at once

struct DispatchContext {
  const DispatchKernelParams& p;
  Buffers buffers;
  i32 rank;
  u8* inbox;
  Marks marks;
};

__device__ inline i32 load_id(const DispatchKernelParams& p, i32 at_id) {
  if (p.topk_ids_are_64_bit != 0) {
    const i64 id = static_cast<const i64*>(p.topk_ids)[at_id];
    return id >= 0 && id < config::kNumExperts ? static_cast<i32>(id) : -1;
  }
  const i32 id = static_cast<const i32*>(p.topk_ids)[at_id];
  return id >= 0 && id < config::kNumExperts ? id : -1;
}

// The id of lane k < K of a token, or -1 if it repeats a lower k.
__device__ inline i32 drop_repeat(i32 id) {
  const u32 same = __match_any_sync(kAllLanes, id);
  return (same & ((1u << lane_idx()) - 1u)) != 0 ? -1 : id;
}

__device__ inline i32 load_unique_id(const DispatchKernelParams& p, i32 token) {
  return drop_repeat(lane_idx() < kTopk ? load_id(p, token * kTopk + lane_idx()) : -1);
}

__device__ inline u32 load_weight(const DispatchKernelParams& p, i32 token) {  // of lane k
  const i32 lane = lane_idx();
  if (lane >= kTopk) return 0;
  const u32 bits = p.weights == nullptr ? as_bits(1.0f) : as_bits(p.weights[token * kTopk + lane]);
  return bits == kSentinel ? kNanFloat : bits;
}

__device__ inline u32 own_row_count(const DispatchContext& c, i32 peer) {
  return static_cast<u32>(c.marks.count(peer)) | (c.p.weights == nullptr ? kWeightsComeLate : 0u);
}

// Payload and scale of one piece of a row, as they go on the wire.
struct Piece {
  Word payload;
  u32 scale;  // of lanes that hold one
};

__device__ inline bool in_row(i32 piece) { return piece * 32 + lane_idx() < kRowWords; }

struct RawPiece {  // as loaded, so that loads of several pieces can be in flight
  Word low, high;
  u32 scale;
  i32 id;  // of lane k, with the row's first piece
  u32 weight;
};

__device__ inline RawPiece load_raw(const DispatchKernelParams& p, i32 token, i32 piece) {
  RawPiece raw{Word{0, 0, 0, 0}, Word{0, 0, 0, 0}, 0, -1, 0};
  if (piece == 0 && lane_idx() < kTopk) {
    raw.id = load_id(p, token * kTopk + lane_idx());
    raw.weight = load_weight(p, token);
  }
  const u64 at_word = static_cast<u64>(token) * kRowWords + static_cast<u64>(piece * 32 + lane_idx());
  if (!in_row(piece)) return raw;
  const Word* x = static_cast<const Word*>(p.x);
  if (config::kFp8 && p.block_scales == nullptr) {
    raw.low = load_once(x + at_word * 2);
    raw.high = load_once(x + at_word * 2 + 1);
  } else {
    raw.low = load_once(x + at_word);
    if (config::kFp8 && scale_lane(piece, lane_idx()))
      raw.scale = static_cast<const u32*>(p.block_scales)[token * kScalesInRow + scale_index(piece, lane_idx())];
  }
  return raw;
}

__device__ inline Piece encode(const DispatchKernelParams& p, const RawPiece& raw, i32 piece) {
  if constexpr (!config::kFp8) {
    return Piece{avoid_sentinel<kNanBf16Pair>(raw.low), 0};
  } else {
    Piece out{raw.low, raw.scale};
    if (p.block_scales == nullptr) {
      const Quantized q = quantize_piece(raw.low, raw.high, in_row(piece));
      out = Piece{q.payload, q.scale};
    }
    out.payload = avoid_sentinel<kNanE4m3Quad>(out.payload);
    if (out.scale == kSentinel) out.scale = config::kUe8m0 ? 0xFFFFFFFEu : kNanFloat;
    return out;
  }
}

__device__ inline void store_scale(const DispatchContext& c, i32 row, i32 scale_idx, u32 scale) {
  constexpr u64 kScales = static_cast<u64>(num_scales(kShape));
  u32* out = static_cast<u32*>(c.p.scales);
  const u64 r = static_cast<u64>(row), s = static_cast<u64>(scale_idx);
  if constexpr (config::kColumnScales)
    out[r / kSourceRows * kSourceRows * kScales + s * kSourceRows + r % kSourceRows] = scale;
  else
    out[r * kScales + s] = scale;
}

__device__ inline void place_piece(const DispatchContext& c, i32 row, i32 piece, const Piece& data) {
  if (in_row(piece))
    static_cast<Word*>(c.p.tokens)[static_cast<u64>(row) * kRowWords + static_cast<u64>(piece * 32 + lane_idx())] =
        data.payload;
  if constexpr (config::kFp8) {
    if (scale_lane(piece, lane_idx())) store_scale(c, row, scale_index(piece, lane_idx()), data.scale);
  }
}

// What combine needs to know, and the outputs that come once a row. `row` of lane k: where selection k went, or -1.
__device__ inline void record_row(const DispatchContext& c, i32 source, i32 slot, i32 token, i32 id, i32 row,
                                  u32 weight) {
  const i32 lane = lane_idx(), received = source * kMaxTokens + slot;
  if (lane == 0) at<i32>(c.p.lane.state, kState.tokens)[received] = token;
  if (config::kRankMajor && lane < kTopk) {
    c.p.out_topk_ids[received * kTopk + lane] = row >= 0 ? id : config::kInvalidId;
    c.p.out_weights[received * kTopk + lane] = row >= 0 ? as_float(weight) : 0.0f;
  }
  if (config::kRankMajor && row >= 0)
    atomicAdd(at<u64>(c.p.lane.state, kState.expert_totals) + (id - config::kFirstExpert[c.rank]), u64{1});
  if (!config::kRankMajor && row >= 0) c.p.source_token[row] = source * kMaxTokens + token;
  if (lane >= kTopkPadded) return;
  i32 position = row;
  if constexpr (config::kRankMajor) {
    if constexpr (config::kDirectSend)
      position = row >= 0 ? received * kTopk + lane : -1;
    else
      position = lane == 0 ? received : -1;
  }
  at<i32>(c.p.lane.state, kState.positions)[received * kTopkPadded + lane] = position;
  at<u32>(c.p.lane.state, kState.weights)[received * kTopkPadded + lane] = weight;
  if (source == c.rank) at<i32>(c.p.lane.state, kState.own_positions)[token * kTopkPadded + lane] = position;
}

__device__ inline void place_everywhere(const DispatchContext& c, i32 row, i32 piece, const Piece& data) {
  for (u32 left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
    place_piece(c, __shfl_sync(kAllLanes, row, __ffs(static_cast<i32>(left)) - 1), piece, data);
  }
}

}  // namespace expertwire
