// A source that is lost in the middle of a dispatch: all blocks take its counts or none does, and its rows are there or zero.
#pragma once

#include "dispatch_receive.cuh"

namespace expertwire {

// Waits for other blocks of this grid, which all run at the same time.
template <typename Condition>
__device__ inline void wait_for_blocks(const DispatchContext& c, Wait& wait, Condition&& is_done) {
  for (i32 block = static_cast<i32>(threadIdx.x); block < static_cast<i32>(gridDim.x); block += config::kNumThreads) {
    bool done = is_done(block);
    wait.poll(done, c.rank, [&] { return is_done(block); }, [](bool value) { return value; });
  }
}

constexpr i32 kCountsOfSource = config::kRankMajor ? 1 : kCountWords;

__device__ inline bool is_count_word(const DispatchContext& c, i32 word) {
  return word == kRowCount || word < config::kFirstExpert[c.rank + 1] - config::kFirstExpert[c.rank];
}

__device__ inline void note_count(const DispatchContext& c, i32 source, i32 word, u32 count) {
  if (word != kRowCount) {
    c.marks.base[source * config::kMaxLocalExperts + word] = static_cast<i32>(count);
    if (blockIdx.x == 0 && source != c.rank) count_selections_received(c.p.lane.state, c.buffers, count);
    return;
  }
  c.marks.num_rows[source] = static_cast<i32>(count & ~kWeightsComeLate);
  if (blockIdx.x == 0) note_rows(c, source, count);
}

// Row counts of every source and, EXPERT_MAJOR, of every local expert, as far as they come.
__device__ inline void take_what_comes(const DispatchContext& c, Wait& wait) {
  const i32 first = config::kFirstExpert[c.rank];
  for (i32 i = static_cast<i32>(threadIdx.x); i < kRanks * kCountsOfSource; i += config::kNumThreads) {
    const i32 source = i / kCountsOfSource, word = kRowCount - i % kCountsOfSource;
    if (!is_count_word(c, word)) continue;
    u32 count = 0;
    if (kWhole && source == c.rank)
      count = word == kRowCount ? own_row_count(c, c.rank) : static_cast<u32>(c.marks.count(kRanks + first + word));
    else if (!is_absent(source))
      count = poll_packet(count_packet(c.inbox, c.buffers, source, word), c.buffers.epoch, source, wait);
    if (wait.gone(source)) add_to_set(block_losses().missing, source);
    note_count(c, source, word, count);
  }
}

// After take_what_comes, block-wide. A block that has the counts of all says so and goes on at once. One that has not waits
// until every block has spoken: if any of them has a source's counts, they are here and are taken after all; if none has,
// the source is absent for all. Each block speaks once, so that all who ask hear the same.
__device__ inline void settle_counts(const DispatchContext& c, Wait& wait) {
  BlockLosses& here = block_losses();
  const bool has_all = is_empty(here.missing);
  u64* taken = at<u64>(c.p.lane.state, kState.counts_taken);
  Word* missing = at<Word>(c.p.lane.state, kState.counts_missing);
  if (threadIdx.x == 0) {
    if (!has_all) {
      store_relaxed_sys(missing + blockIdx.x, Word{here.missing[0], here.missing[1], here.missing[2], 0});
      __threadfence();
    }
    store_relaxed_sys(taken + blockIdx.x, u64{c.buffers.epoch} << 32 | (has_all ? 0u : 1u));
  }
  if (has_all) return;
  if (threadIdx.x < kSetWords) here.agreed[threadIdx.x] = here.missing[threadIdx.x];
  sync_workers();
  wait_for_blocks(c, wait, [&](i32 block) {
    const u64 said = load_acquire_sys(taken + block);
    if (static_cast<u32>(said >> 32) != c.buffers.epoch) return false;
    const Word set = static_cast<u32>(said) != 0 ? load_relaxed_sys(missing + block) : Word{0, 0, 0, 0};
    atomicAnd(here.agreed + 0, set.x);
    atomicAnd(here.agreed + 1, set.y);
    atomicAnd(here.agreed + 2, set.z);
    return true;
  });
  sync_workers();
  if (threadIdx.x < kSetWords) here.absent[threadIdx.x] |= here.agreed[threadIdx.x];
  sync_workers();
  for (i32 i = static_cast<i32>(threadIdx.x); i < kRanks * kCountsOfSource; i += config::kNumThreads) {
    const i32 source = i / kCountsOfSource, word = kRowCount - i % kCountsOfSource;
    if (!in_set(here.missing, source) || !is_count_word(c, word)) continue;
    const u64* packet = count_packet(c.inbox, c.buffers, source, word);
    const u32 count = is_absent(source) ? 0 : acquire_packet(packet, c.buffers.epoch, c.rank, wait);
    note_count(c, source, word, count);
  }
  sync_workers();
}

// EXPERT_MAJOR: from rows of each source to where they start within each local expert; block 0 publishes the counts.
__device__ inline void sum_counts(const DispatchContext& c) {
  const i32 num_local = config::kFirstExpert[c.rank + 1] - config::kFirstExpert[c.rank];
  for (i32 local = static_cast<i32>(threadIdx.x); local < num_local; local += config::kNumThreads) {
    i32 rows = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      i32& base = c.marks.base[source * config::kMaxLocalExperts + local];
      const i32 more = base;
      base = rows;
      if (blockIdx.x == 0) {
        c.p.rank_ranges[(local * kRanks + source) * 2] = rows;
        c.p.rank_ranges[(local * kRanks + source) * 2 + 1] = more;
      }
      rows += more;
    }
    if (blockIdx.x != 0) continue;
    c.p.num_tokens_per_expert[local] = rows;
    at<u64>(c.p.lane.state, kState.expert_totals)[local] += static_cast<u64>(rows);
  }
}

// take_counts, where a source may not come.
__device__ inline void agree_on_counts(const DispatchContext& c, Wait& wait) {
  take_what_comes(c, wait);
  sync_workers();
  settle_counts(c, wait);
  if constexpr (config::kRankMajor) return;
  sum_counts(c);
  sync_workers();
}

__device__ inline void zero_row(const DispatchContext& c, i32 row, i32 source) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  for (i32 word = thread; word < kRowWords; word += config::kNumThreads)
    static_cast<Word*>(c.p.tokens)[static_cast<u64>(row) * kRowWords + static_cast<u64>(word)] = Word{0, 0, 0, 0};
  if constexpr (config::kFp8) {
    for (i32 scale = thread; scale < kScalesInRow; scale += config::kNumThreads) store_scale(c, row, scale, 0);
  }
  if constexpr (config::kRankMajor) {
    for (i32 k = thread; k < kTopk; k += config::kNumThreads) {
      c.p.out_topk_ids[row * kTopk + k] = config::kInvalidId;
      c.p.out_weights[row * kTopk + k] = 0.0f;
    }
  } else if (thread == 0) {
    c.p.source_token[row] = source * kMaxTokens;
  }
}

__device__ inline void zero_rows_of(const DispatchContext& c, i32 source) {
  if constexpr (config::kRankMajor) {
    for (i32 slot = 0; slot < c.marks.num_rows[source]; ++slot) zero_row(c, source * kMaxTokens + slot, source);
  } else {
    const i32 num_local = config::kFirstExpert[c.rank + 1] - config::kFirstExpert[c.rank];
    for (i32 local = 0; local < num_local; ++local) {
      const i32* range = c.p.rank_ranges + (local * kRanks + source) * 2;  // block 0 wrote it before it was done
      const i32 first = local * kSourceRows + range[0], count = range[1];
      for (i32 i = 0; i < count; ++i) zero_row(c, first + i, source);
    }
  }
}

// After the last row, block-wide. If this block has missed rows of a source, then all that this source announced become
// zero, once no block writes any more of them.
__device__ inline void finish_rows(const DispatchContext& c, Wait& wait) {
  if constexpr (!config::kMask) return;
  u32* placed = at<u32>(c.p.lane.state, kState.rows_placed);
  if (threadIdx.x == 0) store_release_gpu(placed + blockIdx.x, c.buffers.epoch);
  const BlockLosses& here = block_losses();
  if (is_empty(here.incomplete)) return;
  wait_for_blocks(c, wait, [&](i32 block) { return load_acquire_gpu(placed + block) == c.buffers.epoch; });
  __syncthreads();
  for (i32 source = 0; source < kRanks; ++source) {
    if (in_set(here.incomplete, source)) zero_rows_of(c, source);
  }
}

}  // namespace expertwire
