// combine: one kernel, the wire of dispatch backwards.
//
//   return   a warp takes a piece of a token of another rank, gathers the rows that dispatch noted, and stores their sum
//            (RANK_LOCAL_REDUCE) or each of them (DIRECT_SEND) to that rank.
//   sum      a warp takes a piece of an own token, makes the own rank's part, waits for the others' and adds all in the
//            fixed order: ascending rank, or ascending k.
//
// In two phases one kernel returns, to its own rank too, and another sums.
#pragma once

#include "device/combine_return.cuh"
#include "device/combine_sum.cuh"
#include "device/combine_weights.cuh"
#include "device/faults.cuh"
#include "device/traffic.cuh"

namespace expertwire {

__device__ inline void report_stale(const CombineContext& c, u32 found) {
  report_fault(c.p.lane.fault,
               CallFault{FaultKind::HANDLE_STALE, c.p.lane.lane, c.buffers.epoch, 0, 0, 0, c.p.call, found});
}

// A combine that did not complete shows no numbers. By every block that gave up or never began, for all of the output.
__device__ inline void fill_with_nan(const CombineKernelParams& p) {
  const Word nan{kNanBf16Pair, kNanBf16Pair, kNanBf16Pair, kNanBf16Pair};
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < p.num_tokens * kOutWords; i += kBlockThreads)
    static_cast<Word*>(p.out)[i] = nan;
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, config::kBlocksPerSm)
    combine_kernel(const __grid_constant__ CombineKernelParams p) {
  // While this one waits for blocks of rows, the next kernel's would keep places that their producer needs.
  if constexpr (!config::kByBlocks) grid_dependency_launch();
  grid_dependency_wait();
  if (p.num_tokens < 0) return;  // as dispatch
  const i32 rank = p.lane.rank;
  ReturnFacts first_return;
  OwnFacts first_own;
  if (is_worker()) {
    if constexpr (kSends) first_return = load_return(p, kFirstStep < kRanks ? kFirstStep : 0);
    if constexpr (kReceives) first_own = load_own_facts(p, first_own_item());
  }
  u32* own_epoch = at<u32>(p.lane.state, kState.combine_epochs) + blockIdx.x;
  const u32 previous = *own_epoch, ended_in = load_relaxed_sys(p.lane.wait.abort);
  const u64 dispatched = *at<const u64>(p.lane.state, kState.dispatched);
  const CombineContext c = context_of(p, kPacketEpochs.after(previous), dispatched);
  const bool replaces =
      kWhole && kSumsWithWeights && c.weights != nullptr && (num_rows_of(p.lane.state, c.rank) & kWeightsComeLate) == 0;
  Wait wait(p.lane, 1, c.buffers.epoch, ended_in);
  const bool takes_part = may_store(p.lane, wait);
  note_absent(p.lane, 1, c.buffers.epoch, wait);
  bool is_asked = false;    // for sums with other weights
  bool lacks_sums = false;  // made with old weights: what comes in their place may still be one of them
  if (takes_part && is_worker()) {
    if constexpr (kSends) {
      send_weights(c);
      stage_weights(c);
      return_pieces(c, replaces, first_return, wait);
    }
    if constexpr (kSends) clear_old_weights(c, (c.buffers.route + kNumRouteBuffers - 1) % kNumRouteBuffers);
    if (replaces) lacks_sums = __any_sync(kAllLanes, drop_old_sums(p, c.buffers.epoch, dispatched) ? 1 : 0) != 0;
    if (kReceives && !lacks_sums) sum_pieces(c, first_own, wait);
  } else if (takes_part && has_packets()) {
    exchange_packets(
        p.lane, c.buffers.epoch, (c.weights != nullptr ? kHasWeights : 0u) | (replaces ? kHearsBeforeItSums : 0u), wait,
        [&c](u8* inbox, i32 source) { return combine_packet(inbox, c.buffers, source); },
        [&](u32 told, i32 source) {
          if (kWhole && kSumsWithWeights && !replaces && wants_others(c, source, told)) is_asked = true;
        });
    if (kReceives && lane_idx() == 0) count_answers(p.lane.state);
  }
  if constexpr (!kReceives) return;
  // With the abort word, for a block may begin when another has given up.
  const bool has_failed = wait.failed() || lacks_sums || c.stale || ended_in != 0;
  if (__syncthreads_or(has_failed || is_asked ? 1 : 0) != 0) {
    if (kWhole && kSumsWithWeights && __syncthreads_or(is_asked ? 1 : 0) != 0 && is_worker())
      send_other_sums(p, c.buffers.epoch, dispatched);
    if (takes_part && c.stale && grid_thread() == 0) report_stale(c, static_cast<u32>(dispatched >> 32));
    if (__syncthreads_or(has_failed ? 1 : 0) != 0) fill_with_nan(p);
  }
  if (threadIdx.x == 0) *own_epoch = c.buffers.epoch;
}

}  // namespace expertwire
