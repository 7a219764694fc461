// The one description of a rank's symmetric memory (what other ranks map), shared by host C++ and kernels.
//
//   segment   | SegmentHeader | lane 0 | lane 1 | ... | lane F-1 |
//   lane      | dispatch word | entry word | combine word | dispatch buffer 0 | 1 | combine buffer 0 | 1 |
//   dispatch  | rows for each rank [R] | row lists [R, M] | topk_ids [M, K] | weights [M, K] |
//   buffer    | rows [M] of (payload, scales) |
//   combine   | CombinePacket | weights [M, K] | rows [R, M, row_slots] |
//   buffer
//
// Offsets and the total come from walking this list once; no size is written down twice. docs/layout.md draws it.
#pragma once

#include "platform.cuh"

namespace expertwire {

constexpr i32 kMaxTopk = 32;           // experts that a token may choose
constexpr i32 kScaleBlock = 128;       // hidden elements that share one FP8 scale
constexpr i32 kMxScaleBlock = 32;      // the same of MXFP8
constexpr u64 kRegionAlignment = 128;  // every region starts a line pair of its own, so that no two ranks share a line
constexpr i32 kNumBuffers = 2;         // used in turn; docs/protocol.md says why two suffice

// What the layout depends on. The same on all ranks, so that every rank can address every other rank's segment.
struct Shape {
  i32 num_ranks = 0;
  i32 num_experts = 0;
  i32 max_local_experts = 0;  // largest number of experts on one rank
  i32 hidden_size = 0;
  i32 num_topk = 0;
  i32 max_tokens_per_rank = 0;
  i32 max_in_flight = 1;
  bool fp8 = false;          // dispatched rows are E4M3 with scales, else BF16
  bool ue8m0 = false;        // scales are exponent bytes, four in an int32
  bool direct_send = false;  // combine sends one row per (token, expert) instead of one per (token, rank)
  bool mask = false;         // GPU: ranks go on without the lost ones, whose late stores must meet nobody else's
  i32 scale_block = kScaleBlock;
};

EW_HOST_DEVICE constexpr u64 align_up(u64 value, u64 alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// A row as it crosses the wire in dispatch.
struct RowLayout {
  u64 payload_bytes = 0;
  u64 scales_offset = 0;  // from the row's start
  u64 scale_bytes = 0;
  u64 row_bytes = 0;  // stride
};

EW_HOST_DEVICE constexpr i32 num_scales(const Shape& shape) {  // 32-bit words of scales per row
  if (!shape.fp8) return 0;
  const i32 blocks = shape.hidden_size / shape.scale_block;
  return shape.ue8m0 ? (blocks + 3) / 4 : blocks;
}

EW_HOST_DEVICE constexpr RowLayout dispatch_row_layout(const Shape& shape) {
  RowLayout row;
  row.payload_bytes = static_cast<u64>(shape.hidden_size) * (shape.fp8 ? 1 : 2);
  row.scales_offset = align_up(row.payload_bytes, 16);
  row.scale_bytes = static_cast<u64>(num_scales(shape)) * 4;
  row.row_bytes = align_up(row.scales_offset + row.scale_bytes, 64);
  return row;
}

EW_HOST_DEVICE constexpr u64 combine_row_bytes(const Shape& shape) {
  return align_up(static_cast<u64>(shape.hidden_size) * 2, 64);
}

// Rows that one (source rank, row) may occupy in a combine buffer: a token chooses at most this many experts of one rank.
EW_HOST_DEVICE constexpr i32 combine_row_slots(const Shape& shape) {
  if (!shape.direct_send) return 1;
  return shape.num_topk < shape.max_local_experts ? shape.num_topk : shape.max_local_experts;
}

struct DispatchRegions {  // offsets from the start of a dispatch buffer
  u64 rank_rows = 0, row_lists = 0, topk_ids = 0, weights = 0, rows = 0, bytes = 0;
};

struct CombineRegions {  // offsets from the start of a combine buffer
  u64 packet = 0, weights = 0, rows = 0, bytes = 0;
};

struct CombinePacket {
  u32 dispatch_epoch;  // which dispatch is being combined; ranks that disagree are told
  i32 has_weights;     // this rank's weights replace those it gave at dispatch
  i32 keeps_weights;   // whoever gave weights to dispatch was not asked for others
};

struct SegmentLayout {
  RowLayout row;
  u64 combine_row_bytes = 0;
  i32 combine_row_slots = 1;
  DispatchRegions dispatch;
  CombineRegions combine;
  u64 first_lane = 0, dispatch_word = 0, entry_word = 0, combine_word = 0, dispatch_buffers = 0, combine_buffers = 0;
  u64 lane_bytes = 0;
  u64 bytes = 0;

  EW_HOST_DEVICE constexpr u64 lane(i32 lane_idx) const { return first_lane + lane_bytes * static_cast<u64>(lane_idx); }
  EW_HOST_DEVICE constexpr u64 dispatch_buffer(i32 lane_idx, u32 epoch) const {
    return lane(lane_idx) + dispatch_buffers + dispatch.bytes * (epoch % kNumBuffers);
  }
  EW_HOST_DEVICE constexpr u64 combine_buffer(i32 lane_idx, u32 epoch) const {
    return lane(lane_idx) + combine_buffers + combine.bytes * (epoch % kNumBuffers);
  }
};

class RegionWalk {
 public:
  EW_HOST_DEVICE constexpr u64 take(u64 bytes) {
    const u64 start = at_;
    at_ = align_up(at_ + bytes, kRegionAlignment);
    return start;
  }
  EW_HOST_DEVICE constexpr u64 bytes() const { return at_; }

 private:
  u64 at_ = 0;
};

constexpr u64 kSegmentHeaderBytes = 4096;

EW_HOST_DEVICE constexpr SegmentLayout make_segment_layout(const Shape& shape) {
  const u64 ranks = static_cast<u64>(shape.num_ranks), topk = static_cast<u64>(shape.num_topk);
  const u64 tokens = static_cast<u64>(shape.max_tokens_per_rank);
  SegmentLayout layout;
  layout.row = dispatch_row_layout(shape);
  layout.combine_row_bytes = combine_row_bytes(shape);
  layout.combine_row_slots = combine_row_slots(shape);

  RegionWalk dispatch;
  layout.dispatch.rank_rows = dispatch.take(ranks * 4);
  layout.dispatch.row_lists = dispatch.take(ranks * tokens * 4);
  layout.dispatch.topk_ids = dispatch.take(tokens * topk * 4);
  layout.dispatch.weights = dispatch.take(tokens * topk * 4);
  layout.dispatch.rows = dispatch.take(tokens * layout.row.row_bytes);
  layout.dispatch.bytes = dispatch.bytes();

  RegionWalk combine;
  layout.combine.packet = combine.take(sizeof(CombinePacket));
  layout.combine.weights = combine.take(tokens * topk * 4);
  layout.combine.rows =
      combine.take(ranks * tokens * static_cast<u64>(layout.combine_row_slots) * layout.combine_row_bytes);
  layout.combine.bytes = combine.bytes();

  RegionWalk lane;
  layout.dispatch_word = lane.take(8);
  layout.entry_word = lane.take(8);
  layout.combine_word = lane.take(8);
  layout.dispatch_buffers = lane.take(kNumBuffers * layout.dispatch.bytes);
  layout.combine_buffers = lane.take(kNumBuffers * layout.combine.bytes);
  layout.lane_bytes = lane.bytes();

  RegionWalk segment;
  segment.take(kSegmentHeaderBytes);
  layout.first_lane = segment.bytes();
  segment.take(layout.lane_bytes * static_cast<u64>(shape.max_in_flight));
  layout.bytes = segment.bytes();
  return layout;
}

// ScaleLayout::COLUMN: distance, in scales, from one block's scales to the next one's, within an expert or (RANK_MAJOR) all
// rows. Grouped GEMMs read them by TMA, which wants distances of 16 bytes.
EW_HOST_DEVICE constexpr u64 column_stride(const Shape& shape) {
  return align_up(static_cast<u64>(shape.num_ranks) * static_cast<u64>(shape.max_tokens_per_rank), 4);
}

// One lane's outputs on this rank: what dispatch returns and what combine may take. Private to the rank.
struct OutputLayout {
  u64 tokens = 0, scales = 0, num_tokens_per_expert = 0, num_tokens_per_rank = 0, rank_ranges = 0, source_token = 0;
  u64 topk_ids = 0, weights = 0, combine_input = 0;
  u64 num_rows = 0;          // rows of tokens: L*R*M or R*M
  u64 combine_num_rows = 0;  // rows of combine_input: as tokens, or R*M*K
  u64 bytes = 0;
};

EW_HOST_DEVICE constexpr OutputLayout make_output_layout(const Shape& shape, i32 num_local_experts, bool rank_major) {
  const u64 ranks = static_cast<u64>(shape.num_ranks), local = static_cast<u64>(num_local_experts);
  const u64 source_rows = ranks * static_cast<u64>(shape.max_tokens_per_rank), topk = static_cast<u64>(shape.num_topk);
  const u64 expert_rows = rank_major ? 0 : local * source_rows, rank_rows = rank_major ? source_rows : 0;
  OutputLayout layout;
  layout.num_rows = expert_rows + rank_rows;
  layout.combine_num_rows = rank_major && shape.direct_send ? source_rows * topk : layout.num_rows;
  RegionWalk walk;
  layout.tokens = walk.take(layout.num_rows * dispatch_row_layout(shape).payload_bytes);
  layout.scales = walk.take((rank_major ? 1 : local) * column_stride(shape) * dispatch_row_layout(shape).scale_bytes);
  layout.num_tokens_per_expert = walk.take(rank_major ? 0 : local * 4);
  layout.num_tokens_per_rank = walk.take(rank_major ? ranks * 4 : 0);
  layout.rank_ranges = walk.take(rank_major ? 0 : local * ranks * 8);
  layout.source_token = walk.take(expert_rows * 4);
  layout.topk_ids = walk.take(rank_rows * topk * 4);
  layout.weights = walk.take(rank_rows * topk * 4);
  layout.combine_input = walk.take(layout.combine_num_rows * static_cast<u64>(shape.hidden_size) * 2);
  layout.bytes = walk.bytes();
  return layout;
}

// One lane's routing facts: what combine must know of the dispatch that it answers. Private to the rank.
// A destination is a (rank, slot): slot j of rank d is the j-th token that this rank sent to d. A selection is one local
// expert of a received row: the output row it went to, its k and its weight; a row has at most `selections` of them.
struct RouteLayout {
  u64 num_destinations = 0, destination_rank = 0, destination_slot = 0;  // sent
  u64 rank_rows = 0, token = 0, num_selections = 0, selection_row = 0, selection_k = 0,
      selection_weight = 0;  // received
  i32 destinations = 0;      // per token, at most
  i32 selections = 0;        // per received row, at most
  u64 bytes = 0;
};

EW_HOST_DEVICE constexpr RouteLayout make_route_layout(const Shape& shape) {
  const u64 tokens = static_cast<u64>(shape.max_tokens_per_rank), ranks = static_cast<u64>(shape.num_ranks);
  RouteLayout layout;
  layout.destinations = shape.num_topk < shape.num_ranks ? shape.num_topk : shape.num_ranks;
  layout.selections = shape.num_topk < shape.max_local_experts ? shape.num_topk : shape.max_local_experts;
  const u64 sent = tokens * static_cast<u64>(layout.destinations);
  const u64 received = ranks * tokens, selected = received * static_cast<u64>(layout.selections);
  RegionWalk walk;
  layout.num_destinations = walk.take(tokens * 4);
  layout.destination_rank = walk.take(sent * 4);
  layout.destination_slot = walk.take(sent * 4);
  layout.rank_rows = walk.take(ranks * 4);
  layout.token = walk.take(received * 4);
  layout.num_selections = walk.take(received * 4);
  layout.selection_row = walk.take(selected * 4);
  layout.selection_k = walk.take(selected * 4);
  layout.selection_weight = walk.take(selected * 4);
  layout.bytes = walk.bytes();
  return layout;
}

}  // namespace expertwire
