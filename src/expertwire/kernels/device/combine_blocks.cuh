// Combine by blocks (kByBlocks): expert rows are read once the block that holds them has been published (docs/overlap.md).
#pragma once

#include "combine_rows.cuh"

namespace expertwire {

// Which word of ready_signal stands for a row.
__device__ inline i32 ready_word(const CombineKernelParams& p, i32 row) {
  const i32 words = (kSourceRows - 1) / p.ready_block_size + 1;  // of one expert; in RANK_MAJOR of all rows
  return row / kSourceRows * words + row % kSourceRows / p.ready_block_size;
}

// By a whole warp: waits until the rows of all lanes are published, each at `position` as dispatch noted it, or -1 for
// none. False if one does not come in time: then nothing may be sent of any; what is not sent becomes NaN. A lane polls
// without order and acquires once, since an acquire empties the L1 of its SM; the barrier of the warp hands what it
// acquired to the other lanes. A replay whose handle is stale shows no numbers, and its rows are not those that the
// producer makes: it waits for none.
__device__ inline bool await_rows(const CombineContext& c, i32 position, Wait& wait) {
  bool came = true;
  if (position >= 0 && !c.stale) {
    const i32 row = config::kRankMajor && config::kDirectSend ? position / kTopk : position;
    const u32* word = c.p.ready_words + ready_word(c.p, row);
    u32 value = load_relaxed_sys(word);
    came = wait.poll(
        value, producer_of_row(row), [word] { return load_relaxed_sys(word); },
        [&c](u32 seen) { return seen == c.p.ready_value; });
    if (came) load_acquire_gpu(word);
  }
  __syncwarp();
  return __all_sync(kAllLanes, came) != 0;
}

}  // namespace expertwire
