// The symmetric memory of a GPU rank: peers push into it. Shared by host C++ and kernels; layout.cuh has the shape.
//
//   lane | dispatch packets [2, R] | count packets [2, R, L + 1] | combine packets [2, R] | repeat packets [2, R] |
//        | row tags [3, R, M, Kt] | row weights [3, R, M, Kp] | combine weights [3, R, M, Kp] |
//        | dispatch rows [2, R, M] | combine rows [2, R, M] or, direct, [2, M, K] or, with masking, [2, R, M, slots] |
//
// Row j of a source is the j-th token that it sends here, so that a receiver can take rows as they land. Its tags say where
// it goes: for each k the global expert (RANK_MAJOR) or local expert * M + index among the source's rows of that expert,
// and last the token's index at its source, where combine rows are expected. Two buffers by epoch for what its reader
// clears in the same operation, three for what the next operation of the kind clears.
#pragma once

#include "epochs.cuh"
#include "layout.cuh"

namespace expertwire {

constexpr u32 kSentinel = 0xFFFFFFFFu;  // "has not arrived", in every 32-bit word of rows, ids and weights
constexpr u32 kNoExpert = 0xFFFFFFFEu;  // a routed id that selects nothing
constexpr Epochs kPacketEpochs{0xFFFFFFFCu};
constexpr i32 kMaxBlocks = 1024;  // of a grid; each block has epochs of its own
constexpr i32 kNumRowBuffers = 2;
constexpr i32 kNumRouteBuffers = 3;
static_assert(kPacketEpochs.last % static_cast<u32>(kNumRowBuffers * kNumRouteBuffers) == 0);

EW_HOST_DEVICE constexpr i32 padded_topk(const Shape& shape) { return (shape.num_topk + 3) / 4 * 4; }
EW_HOST_DEVICE constexpr i32 num_tags(const Shape& shape) { return shape.num_topk + 1; }

struct InboxLayout {
  RowLayout row;
  u64 dispatch_packets = 0, count_packets = 0, combine_packets = 0, repeat_packets = 0;
  u64 row_tags = 0, row_weights = 0, combine_weights = 0;
  u64 dispatch_rows = 0, dispatch_buffer_bytes = 0;
  u64 combine_rows = 0, combine_buffer_bytes = 0;
  u64 sentinel_begin = 0;  // from here to the end everything starts as sentinels; before it, as zeros
  u64 lane_bytes = 0;
};

EW_HOST_DEVICE constexpr InboxLayout make_inbox_layout(const Shape& shape) {
  const u64 ranks = static_cast<u64>(shape.num_ranks), tokens = static_cast<u64>(shape.max_tokens_per_rank);
  InboxLayout layout;
  layout.row = dispatch_row_layout(shape);
  const u64 tag_bytes = tokens * static_cast<u64>(num_tags(shape)) * 4,
            weight_bytes = tokens * static_cast<u64>(padded_topk(shape)) * 4;
  layout.dispatch_buffer_bytes = ranks * tokens * layout.row.row_bytes;
  const u64 combine_slots = !shape.direct_send ? ranks
                            : shape.mask       ? ranks * static_cast<u64>(combine_row_slots(shape))
                                               : static_cast<u64>(shape.num_topk);
  layout.combine_buffer_bytes = tokens * combine_slots * static_cast<u64>(shape.hidden_size) * 2;
  RegionWalk walk;
  layout.dispatch_packets = walk.take(kNumRowBuffers * ranks * 8);
  layout.count_packets = walk.take(kNumRowBuffers * ranks * (static_cast<u64>(shape.max_local_experts) + 1) * 8);
  layout.combine_packets = walk.take(kNumRowBuffers * ranks * 8);
  layout.repeat_packets = walk.take(kNumRowBuffers * ranks * 8);
  layout.sentinel_begin = walk.bytes();
  layout.row_tags = walk.take(kNumRouteBuffers * ranks * tag_bytes);
  layout.row_weights = walk.take(kNumRouteBuffers * ranks * weight_bytes);
  layout.combine_weights = walk.take(kNumRouteBuffers * ranks * weight_bytes);
  layout.dispatch_rows = walk.take(kNumRowBuffers * layout.dispatch_buffer_bytes);
  layout.combine_rows = walk.take(kNumRowBuffers * layout.combine_buffer_bytes);
  layout.lane_bytes = walk.bytes();
  return layout;
}

// With masking, behind the lanes of a segment: what the other ranks say of lost ranks.
struct NoticeLayout {
  u64 notices =
      0;  // [R] 16 bytes of each source: the ranks that it has lost, 96 bits, and a number that changes while it waits
  u64 given_up = 0;  // u32, not 0: a peer has lost this rank
  u64 bytes = 0;
};

EW_HOST_DEVICE constexpr NoticeLayout make_notice_layout(const Shape& shape) {
  NoticeLayout layout;
  if (!shape.mask) return layout;
  RegionWalk walk;
  layout.notices = walk.take(static_cast<u64>(shape.num_ranks) * 16);
  layout.given_up = walk.take(4);
  layout.bytes = walk.bytes();
  return layout;
}

EW_HOST_DEVICE constexpr u64 inbox_bytes(const Shape& shape) {
  return make_inbox_layout(shape).lane_bytes * static_cast<u64>(shape.max_in_flight) + make_notice_layout(shape).bytes;
}

// Shared memory of a dispatch block: a bit for each own token under each rank and expert, and the rows of each source.
EW_HOST_DEVICE constexpr i32 num_mask_words(const Shape& shape) { return (shape.max_tokens_per_rank + 31) / 32; }
EW_HOST_DEVICE constexpr i32 num_marks(const Shape& shape, bool rank_major) {
  return shape.num_ranks + (rank_major ? 0 : shape.num_experts);
}
EW_HOST_DEVICE constexpr u64 dispatch_shared_bytes(const Shape& shape, bool rank_major) {
  const u64 bits = static_cast<u64>(num_marks(shape, rank_major)) * static_cast<u64>(num_mask_words(shape));
  return (bits + static_cast<u64>(shape.num_ranks) * (static_cast<u64>(shape.max_local_experts) + 1)) * 4;
}

// Rows that crossed to and from other ranks since the communicator was made, and how many of them each combine of a
// dispatch sends and receives, by route buffer: the next dispatch clears the one that the dispatch after it will use.
struct Traffic {
  u64 dispatch_sent, dispatch_received, combine_sent, combine_received;
  u64 owed[kNumRouteBuffers], due[kNumRouteBuffers];
};

// What a rank keeps of a dispatch for its combine, and its epochs. Private memory of the GPU.
struct LaneStateLayout {
  u64 dispatch_epochs = 0, combine_epochs = 0;  // u32 for each block: a block reads and advances its own
  u64 dispatched = 0;                           // u64 of the last dispatch: its host call, its number of own tokens
  u64 num_blocks_done = 0;                      // u32: blocks that have dropped sums made with old weights
  u64 num_rows = 0;                             // [R] of the last dispatch; the top bit: weights come with combine
  u64 own_ids = 0, own_weights = 0;             // [M, Kp] of the own tokens
  u64 own_positions = 0;                        // [M, Kp] as positions, of the own tokens' rows that stayed here
  u64 tokens = 0;                               // [R, M] token index of each received row at its source
  u64 positions = 0, weights = 0;               // [R, M, Kp] row of expert_output for each selection, or -1
  u64 expert_totals = 0;                        // u64 [L] rows received since the communicator was made
  u64 traffic = 0;                              // Traffic
  u64 waited_ns = 0;                            // u64 [R] in operations, until each source was heard to be in it, too
  // With masking, for each block of a dispatch: epoch whose counts it has, and in the lower half whether some are missing;
  // 16 bytes: of which ranks; epoch whose rows it has placed.
  u64 counts_taken = 0, counts_missing = 0, rows_placed = 0;
  u64 bytes = 0;
};

EW_HOST_DEVICE constexpr LaneStateLayout make_lane_state_layout(const Shape& shape) {
  const u64 ranks = static_cast<u64>(shape.num_ranks), tokens = static_cast<u64>(shape.max_tokens_per_rank);
  const u64 topk = static_cast<u64>(padded_topk(shape));
  LaneStateLayout layout;
  RegionWalk walk;
  layout.dispatch_epochs = walk.take(static_cast<u64>(kMaxBlocks) * 4);
  layout.combine_epochs = walk.take(static_cast<u64>(kMaxBlocks) * 4);
  layout.dispatched = walk.take(8);
  layout.num_blocks_done = walk.take(4);
  layout.num_rows = walk.take(ranks * 4);
  layout.own_ids = walk.take(tokens * topk * 4);
  layout.own_weights = walk.take(tokens * topk * 4);
  layout.own_positions = walk.take(tokens * topk * 4);
  layout.tokens = walk.take(ranks * tokens * 4);
  layout.positions = walk.take(ranks * tokens * topk * 4);
  layout.weights = walk.take(ranks * tokens * topk * 4);
  layout.expert_totals = walk.take(static_cast<u64>(shape.max_local_experts) * 8);
  layout.traffic = walk.take(sizeof(Traffic));
  layout.waited_ns = walk.take(ranks * 8);
  const u64 blocks = shape.mask ? static_cast<u64>(kMaxBlocks) : 0;
  layout.counts_taken = walk.take(blocks * 8);
  layout.counts_missing = walk.take(blocks * 16);
  layout.rows_placed = walk.take(blocks * 4);
  layout.bytes = walk.bytes();
  return layout;
}

}  // namespace expertwire
