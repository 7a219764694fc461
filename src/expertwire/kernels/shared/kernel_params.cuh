// The one argument of each kernel, shared by host C++ and kernels.
#pragma once

#include "inbox.cuh"

namespace expertwire {

constexpr i32 kMaxGpuRanks = 72;  // one NVLink domain

// Written once by the thread whose wait expired, in memory that the host reads.
struct LossReport {
  u32 set;  // written last
  i32 rank, peer;
  i32 operation;  // 0 dispatch, 1 combine
  u32 epoch;
  u32 seen;  // the word that was there instead
};

struct WaitParams {
  u32* abort;  // device word: not 0 once the communicator has ended
  LossReport* report;
  u64 timeout_ns;
};

// What a kernel needs of its rank and lane. Constant for the life of a communicator.
struct LaneParams {
  u8* inboxes[kMaxGpuRanks];  // this lane in every rank's segment; own at [rank]
  u8* state;                  // LaneStateLayout
  WaitParams wait;
  i32 rank;
};

struct DispatchKernelParams {
  LaneParams lane;
  const void* x;
  const void* block_scales;  // not null: x is E4M3 already
  const void* topk_ids;
  const float* weights;  // null: 1
  i32 num_tokens;
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
};

}  // namespace expertwire
