// The one argument of each kernel, shared by host C++ and kernels.
#pragma once

#include "inbox.cuh"

namespace expertwire {

constexpr i32 kMaxGpuRanks = 72;  // one NVLink domain

// Written once by the thread whose wait expired, in memory that the host reads.
struct LossReport {
  u32 set;         // written last
  i32 rank, peer;  // the peer: a rank, or producer_of_row
  i32 operation;   // 0 dispatch, 1 combine
  u32 epoch;
  u32 seen;  // the word that was there instead
};

// Whom a combine by blocks waits for in place of a rank: the producer of a row of expert_output. Below every rank's number,
// and below -1, which stands for none.
EW_HOST_DEVICE constexpr i32 producer_of_row(i32 row) { return -2 - row; }
EW_HOST_DEVICE constexpr i32 row_of_producer(i32 peer) { return -2 - peer; }

enum class FaultKind : u32 { NONE, ID_OUT_OF_RANGE, ID_REPEATED, HANDLE_STALE };

// A mistake of the caller that only the device can see, in memory that the host reads and then clears. The first stays.
struct CallFault {
  FaultKind kind;  // written last
  i32 lane;
  u32 epoch;     // of the operation of its kind on its lane
  i32 token, k;  // ids: where, and what was there
  i64 id;
  u32 wanted, found;  // handles: the host's calls of dispatch
};

enum class LossKind : u32 { NONE, TIMED_OUT, NAMED };  // by this rank, or by a peer

struct HostWords {  // all that kernels tell the host without being asked
  LossReport loss;
  CallFault fault;
  LossKind lost[kMaxGpuRanks];  // with masking
};

struct WaitParams {
  u32* abort;  // device word: the mark of the operation in which the communicator has ended, or 0
  LossReport* report;
  u64 timeout_ns;
};

// With masking: who is lost, for all lanes. Private memory of the GPU.
struct LossState {
  u64 lost_in[kMaxGpuRanks];  // the operation in which a rank was lost, or 0
  u64 attended_ns;            // when peers were last told that this rank waits
};

struct MaskParams {
  LossState* state;
  LossKind* host;  // [kMaxGpuRanks]
  u64 notices;     // NoticeLayout of any rank, from this lane's inbox there
};

// What a kernel needs of its rank and lane. Constant for the life of a communicator.
struct LaneParams {
  u8* inboxes[kMaxGpuRanks];  // this lane in every rank's segment; own at [rank]
  u8* state;                  // LaneStateLayout
  WaitParams wait;
  CallFault* fault;
  MaskParams mask;
  i32 rank, lane;
};

struct DispatchKernelParams {
  LaneParams lane;
  const void* x;
  const void* block_scales;  // not null: x is E4M3 already
  const void* topk_ids;
  const float* weights;            // null: 1
  const i32* physical_of_logical;  // [kNumLogicalExperts] with a placement; replaced between kernels
  i32 num_tokens;
  u32 call;  // the host's number for it, by which combine knows which dispatch it answers
  i32 topk_ids_are_64_bit;
  void* tokens;
  void* scales;
  i32* num_tokens_per_expert;
  i32* num_tokens_per_rank;
  i32* rank_ranges;
  i32* source_token;
  i32* out_topk_ids;
  float* out_weights;
};

struct CombineKernelParams {
  LaneParams lane;
  const void* expert_output;
  const float* weights;  // replaces those of dispatch; null: keep them
  void* out;
  i32 num_tokens;
  u32 call;  // of the dispatch that is answered
  // By blocks alone (kByBlocks): a word for each block of rows, which holds ready_value once it is published.
  const u32* ready_words;
  i32 ready_block_size;
  u32 ready_value;
};

}  // namespace expertwire
