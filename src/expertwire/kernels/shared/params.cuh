// One parameter struct per operation: what changes from call to call. What does not is in Shape and in the backend.
#pragma once

#include "platform.cuh"

namespace expertwire {

struct DispatchParams {
  const void* x = nullptr;             // [T, H] BF16, or E4M3 with block_scales
  const void* block_scales = nullptr;  // null: quantise here (FP8) or nothing to scale (BF16)
  const void* topk_ids = nullptr;      // [T, K]
  const float* weights = nullptr;      // [T, K] or null
  i32 num_tokens = 0;
  bool topk_ids_are_64_bit = false;
  void* tokens = nullptr;  // output rows: the lane's or the caller's
  void* stream = nullptr;
  void* wait_event = nullptr;
  i32 max_num_blocks = 0;  // 0: as configured
};

struct CombineParams {
  const void* expert_output = nullptr;  // BF16, rows as dispatch laid them out
  const float* weights = nullptr;       // [T, K]: replaces the weights of dispatch; null: keep them
  void* out = nullptr;                  // [T, H] BF16
  i32 num_tokens = 0;
  void* stream = nullptr;
  void* wait_event = nullptr;
  i32 max_num_blocks = 0;
  const i32* ready_words = nullptr;  // null: all rows are there; else a word for each block of rows
  i32 ready_block_size = 0;
  i32 ready_value = 0;
};

}  // namespace expertwire
