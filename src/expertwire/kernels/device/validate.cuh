// Expert ids, looked at once more for the caller's sake.
#pragma once

#include "faults.cuh"
#include "pieces.cuh"

namespace expertwire {

__device__ inline i64 raw_id(const DispatchKernelParams& p, i32 at_id) {
  return p.topk_ids_are_64_bit != 0 ? static_cast<const i64*>(p.topk_ids)[at_id]
                                    : static_cast<i64>(static_cast<const i32*>(p.topk_ids)[at_id]);
}

// Block 0, with `validate`: the first wrong id in the order of tokens and k. What is wrong with it was dropped already.
__device__ inline void validate_ids(const DispatchContext& c) {
  if constexpr (!config::kValidate) return;
  __shared__ u32 first_wrong;  // token * 32 + k
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) first_wrong = kAllLanes;
  sync_workers();
  for (i32 token = warp_idx(); token < c.p.num_tokens; token += kNumWarps) {
    const bool has_id = lane_idx() < kTopk;
    const bool beyond = has_id && raw_id(c.p, token * kTopk + lane_idx()) >= config::kNumLogicalExperts;
    const i32 id = has_id ? id_or_none(c.p, load_id(c.p, token * kTopk + lane_idx())) : -1;
    const bool repeats = drop_repeat(id) < 0 && id >= 0;  // all lanes take part
    const u32 wrong = __ballot_sync(kAllLanes, beyond || repeats);
    if (wrong != 0 && lane_idx() == 0)
      atomicMin(&first_wrong, static_cast<u32>(token) * 32u + static_cast<u32>(__ffs(static_cast<i32>(wrong)) - 1));
  }
  sync_workers();
  if (threadIdx.x != 0 || first_wrong == kAllLanes) return;
  const i32 token = static_cast<i32>(first_wrong / 32u), k = static_cast<i32>(first_wrong % 32u);
  const i64 id = raw_id(c.p, token * kTopk + k);
  report_fault(c.p.lane.fault,
               CallFault{id < config::kNumLogicalExperts ? FaultKind::ID_REPEATED : FaultKind::ID_OUT_OF_RANGE,
                         c.p.lane.lane, c.buffers.epoch, token, k, id, 0, 0});
}

}  // namespace expertwire
