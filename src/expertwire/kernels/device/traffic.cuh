// Counting what crosses. Every count is an atomic whose result nobody waits for.
#pragma once

#include "wire.cuh"

namespace expertwire {

__device__ inline Traffic* traffic(u8* state) { return at<Traffic>(state, kState.traffic); }

// RANK_LOCAL_REDUCE answers once a row, DIRECT_SEND once a selection.
constexpr bool kAnswersByRow = !config::kDirectSend;

__device__ inline void count_sent(u8* state, const Buffers& b, u32 rows) {
  atomicAdd(&traffic(state)->dispatch_sent, u64{rows});
  if constexpr (kAnswersByRow) atomicAdd(traffic(state)->due + b.route, u64{rows});
}

__device__ inline void count_received(u8* state, const Buffers& b, u32 rows) {
  atomicAdd(&traffic(state)->dispatch_received, u64{rows});
  if constexpr (kAnswersByRow) atomicAdd(traffic(state)->owed + b.route, u64{rows});
}

__device__ inline void count_selections_sent(u8* state, const Buffers& b, u32 selections) {
  if constexpr (!kAnswersByRow) atomicAdd(traffic(state)->due + b.route, u64{selections});
}

__device__ inline void count_selections_received(u8* state, const Buffers& b, u32 selections) {
  if constexpr (!kAnswersByRow) atomicAdd(traffic(state)->owed + b.route, u64{selections});
}

// By one thread of a dispatch: no combine of the dispatch before looks at the next one's counts.
__device__ inline void clear_next_counts(u8* state, const Buffers& b) {
  const u32 next = (b.route + 1) % kNumRouteBuffers;
  traffic(state)->owed[next] = 0;
  traffic(state)->due[next] = 0;
}

// By one thread of a combine.
__device__ inline void count_answers(u8* state) {
  const u32 route = *at<const u32>(state, kState.dispatch_epochs) % kNumRouteBuffers;
  atomicAdd(&traffic(state)->combine_sent, traffic(state)->owed[route]);
  atomicAdd(&traffic(state)->combine_received, traffic(state)->due[route]);
}

}  // namespace expertwire
