// Words on the wire: which constants a kernel was compiled for, sentinels, bounded polls, and the walk over work.
//
// `config` is made by the host for one communicator:
//   kHiddenSize kNumExperts kNumLogicalExperts kPlaced kNumTopk kNumRanks kMaxTokens kMaxLocalExperts
//   kFirstExpert[kNumRanks + 1] kEvenExperts kRankMajor kDirectSend kFp8 kPow2 kUe8m0 kScaleBlock kColumnScales kInvalidId
//   kPhase kByBlocks kNumThreads kBlocksPerSm kWords kValidate kMask, of dispatch kMarkBatch kSenders, of combine kGather
#pragma once

#include "../shared/kernel_params.cuh"
#include "ptx.cuh"

namespace expertwire {

// Of one lane: a kernel has nothing to do with how many there are.
constexpr Shape kShape{config::kNumRanks,
                       config::kNumExperts,
                       config::kMaxLocalExperts,
                       config::kHiddenSize,
                       config::kNumTopk,
                       config::kMaxTokens,
                       1,
                       config::kFp8,
                       config::kUe8m0,
                       config::kDirectSend,
                       config::kMask,
                       config::kScaleBlock};
constexpr InboxLayout kInbox = make_inbox_layout(kShape);
constexpr LaneStateLayout kState = make_lane_state_layout(kShape);
constexpr i32 kRanks = config::kNumRanks, kTopk = config::kNumTopk, kTopkPadded = padded_topk(kShape),
              kMaxTokens = config::kMaxTokens;
constexpr i32 kNumWarps = config::kNumThreads / 32;
constexpr i32 kSourceRows = kRanks * kMaxTokens;
constexpr i32 kTags = num_tags(kShape);
constexpr i32 kTagWords = kMaxTokens * kTags, kWeightWords = kMaxTokens * kTopkPadded;  // of one source
constexpr i32 kCountWords = config::kMaxLocalExperts + 1,
              kRowCount = config::kMaxLocalExperts;  // rows for each expert, for the rank
constexpr u32 kWeightsComeLate = 0x80000000u;  // with a row count: none were given to dispatch, combine may bring them
constexpr u32 kAllLanes = 0xFFFFFFFFu;

// Work is cut into pieces of kWords chunks; a lane holds one 16-byte word of each chunk of 32.
constexpr i32 kWords = config::kWords;

// Which part of its operation a kernel does: all of it, the send, or the receive. In two phases the own rank is a peer like
// the others, its rows go through its own inbox: the receive needs no inputs. Walks over ranks take (rank + j) % R in step j.
constexpr bool kWhole = config::kPhase == 0, kSends = config::kPhase != 2, kReceives = config::kPhase != 1;
constexpr i32 kFirstStep = kWhole ? 1 : 0;

static_assert(kTopk <= 32, "a lane for each selection");

// A block has kNumThreads threads that move rows, and one more warp. That of the last block sends and takes packets, which
// an operation waits for, and no row.
constexpr i32 kBlockThreads = config::kNumThreads + 32;
__device__ inline void sync_workers() { sync_threads<config::kNumThreads>(); }

__device__ inline i32 lane_idx() { return static_cast<i32>(threadIdx.x) & 31; }
__device__ inline i32 warp_idx() { return static_cast<i32>(threadIdx.x) >> 5; }
__device__ inline bool is_worker() { return static_cast<i32>(threadIdx.x) < config::kNumThreads; }
__device__ inline bool has_packets() { return blockIdx.x == gridDim.x - 1 && warp_idx() == kNumWarps; }
// Consecutive items go to different SMs: one token uses as many as it has pieces.
__device__ inline i32 grid_warp() { return warp_idx() * static_cast<i32>(gridDim.x) + static_cast<i32>(blockIdx.x); }
__device__ inline i32 grid_warps() { return kNumWarps * static_cast<i32>(gridDim.x); }

__device__ inline i32 grid_thread() {
  return static_cast<i32>(blockIdx.x) * config::kNumThreads + static_cast<i32>(threadIdx.x);
}
__device__ inline i32 grid_threads() { return static_cast<i32>(gridDim.x) * config::kNumThreads; }
// The same warps in another order for each of `parts` lists of work: short lists fall on different warps.
__device__ inline i32 grid_warp_of_part(i32 part, i32 parts) {
  const i32 warp = grid_warp() - part * (grid_warps() / parts);
  return warp < 0 ? warp + grid_warps() : warp;
}

__device__ inline i32 rank_of_expert(i32 expert) {  // -1 for none
  if (expert < 0) return -1;
  if constexpr (config::kEvenExperts) return expert / config::kMaxLocalExperts;
  i32 rank = 0;
#pragma unroll
  for (i32 r = 1; r < kRanks; ++r) rank += expert >= config::kFirstExpert[r] ? 1 : 0;
  return rank;
}

template <typename T>
__device__ inline T* at(u8* base, u64 offset) {
  return reinterpret_cast<T*>(base + offset);
}

struct Buffers {  // which buffers an epoch uses
  u32 epoch;
  u32 row;
  u32 route;
  __device__ explicit Buffers(u32 e) : epoch(e), row(e % kNumRowBuffers), route(e % kNumRouteBuffers) {}
};

__device__ inline u64* dispatch_packet(u8* inbox, const Buffers& b, i32 source) {
  return at<u64>(inbox, kInbox.dispatch_packets) + b.row * kRanks + source;
}
__device__ inline u64* combine_packet(u8* inbox, const Buffers& b, i32 source) {
  return at<u64>(inbox, kInbox.combine_packets) + b.row * kRanks + source;
}
// "Send the sums for my tokens once more, with the weights that I gave to combine."
__device__ inline u64* repeat_packet(u8* inbox, const Buffers& b, i32 source) {
  return at<u64>(inbox, kInbox.repeat_packets) + b.row * kRanks + source;
}
__device__ inline u64* count_packet(u8* inbox, const Buffers& b, i32 source, i32 local) {
  return at<u64>(inbox, kInbox.count_packets) + (b.row * kRanks + source) * kCountWords + local;
}
__device__ inline u32* row_tags(u8* inbox, u32 buffer, i32 source, i32 row) {
  return at<u32>(inbox, kInbox.row_tags) + (static_cast<u64>(buffer) * kRanks + source) * kTagWords + row * kTags;
}
__device__ inline u32* weight_words(u8* inbox, u64 region, u32 buffer, i32 source, i32 row) {
  return at<u32>(inbox, region) + (static_cast<u64>(buffer) * kRanks + source) * kWeightWords + row * kTopkPadded;
}
__device__ inline u8* dispatch_row(u8* inbox, const Buffers& b, i32 source, i32 row) {
  return inbox + kInbox.dispatch_rows + b.row * kInbox.dispatch_buffer_bytes +
         (static_cast<u64>(source) * kMaxTokens + static_cast<u64>(row)) * kInbox.row.row_bytes;
}
// Reduced rows by (rank that reduced, token); direct rows by (token, k).
__device__ inline Word* combine_row(u8* inbox, const Buffers& b, u64 row) {
  return at<Word>(inbox, kInbox.combine_rows + b.row * kInbox.combine_buffer_bytes + row * (config::kHiddenSize * 2));
}

// A data word may not look like "not arrived". `instead` is another NaN of the format.
template <u32 instead>
__device__ inline Word avoid_sentinel(Word v) {
  v.x = v.x == kSentinel ? instead : v.x;
  v.y = v.y == kSentinel ? instead : v.y;
  v.z = v.z == kSentinel ? instead : v.z;
  v.w = v.w == kSentinel ? instead : v.w;
  return v;
}
constexpr u32 kNanBf16Pair = 0x7FFF7FFFu, kNanE4m3Quad = 0x7F7F7F7Fu, kNanFloat = 0x7FC00000u;
__device__ inline bool has_arrived(Word v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}
__device__ inline Word sentinel_word() { return Word{kSentinel, kSentinel, kSentinel, kSentinel}; }

// A kernel among those that may end the communicator next: neither 0 nor kEndedBefore. (With masking losses are for good and
// are dated by operation_code, with whole epochs; combine has no registers for 64 bits here.)
__device__ inline u32 operation_mark(i32 lane, i32 operation, u32 epoch) {
  constexpr u32 receives_alone = kSends ? 0u : 1u << 8;  // the send of its operation is another kernel
  return epoch << 9 | receives_alone | static_cast<u32>(lane) << 2 | 2u | static_cast<u32>(operation);
}
constexpr u32 kEndedBefore = 1u;  // from the first kernel on that finds the communicator ended: no mark comes again

struct Loss {
  i32 rank, peer, lane, operation;
  u32 epoch, seen;
};

// What a wait that expired has seen last.
template <typename T>
__device__ inline u32 seen_word(const T&) {
  return kSentinel;
}
__device__ inline u32 seen_word(u32 word) { return word; }
__device__ inline u32 seen_word(u64 packet) { return static_cast<u32>(packet >> 32); }

// By value and out of line: what waits stays in registers.
__device__ __noinline__ void report_loss(const WaitParams params, const Loss loss) {
  if (atomicCAS(params.abort, 0u, operation_mark(loss.lane, loss.operation, loss.epoch)) != 0u) return;
  LossReport* out = params.report;
  out->rank = loss.rank;
  out->peer = loss.peer;
  out->operation = loss.operation;
  out->epoch = loss.epoch;
  out->seen = loss.seen;
  __threadfence_system();
  *reinterpret_cast<volatile u32*>(&out->set) = 1u;
  __threadfence_system();
}

// Waits that are bounded: one that expires is reported once and ends the communicator, and all later waits end at once.
// (masking.cuh has the other kind.)
class EndingWait {
 public:
  // `ended_in`: the abort word, asked for with the first loads. If a kernel before this one has ended the communicator, this one
  // has failed from its start: the same for all blocks, however late they begin.
  __device__ EndingWait(const LaneParams& lane, i32 operation, u32 epoch, u32 ended_in)
      : params_(lane.wait), rank_(lane.rank), lane_(lane.lane), operation_(operation), epoch_(epoch) {
    failed_ = ended_in != 0 && ended_in != operation_mark(lane_, operation_, epoch_);
  }
  __device__ bool failed() const { return failed_; }
  __device__ static constexpr bool gone(i32) { return false; }  // no rank is ever left out

  // Loads until `arrived`; false: given up. Looks at the clock and at the abort word now and then.
  template <typename T, typename Load, typename Arrived>
  __device__ bool poll(T& value, i32 peer, Load load, Arrived arrived) {
    u64 start = 0;
#pragma unroll 1
    for (u32 polls = 1; !arrived(value); ++polls) {
      if (failed_) return false;
      value = load();
      if (polls % 128 != 0) continue;
      const u64 now = global_nanoseconds();
      if (start == 0) start = now;
      if (load_relaxed_sys(params_.abort) == 0) {
        if (now - start < params_.timeout_ns) continue;
        report_loss(params_, Loss{rank_, peer, lane_, operation_, epoch_, seen_word(value)});
      }
      failed_ = true;
    }
    return true;
  }

 private:
  const WaitParams& params_;
  i32 rank_, lane_, operation_;
  u32 epoch_;
  bool failed_;
};

template <typename Wait>
__device__ inline Word poll(const Word* address, Word value, i32 peer, Wait& wait) {
  const bool came = wait.poll(
      value, peer, [address] { return load_relaxed_sys(address); }, [](const Word& w) { return has_arrived(w); });
  return came ? value : Word{0, 0, 0, 0};
}

template <typename Wait>
__device__ inline u32 poll(const u32* address, u32 value, i32 peer, Wait& wait) {
  const bool came =
      wait.poll(value, peer, [address] { return load_relaxed_sys(address); }, [](u32 w) { return w != kSentinel; });
  return came ? value : 0;
}

// A packet: epoch in the upper half, data in the lower. The data of a lost peer reads as 0.
template <typename Wait>
__device__ inline u32 poll_packet(const u64* address, u64 value, u32 epoch, i32 peer, Wait& wait) {
  const bool came = wait.poll(
      value, peer, [address] { return load_relaxed_sys(address); },
      [epoch](u64 packet) { return static_cast<u32>(packet >> 32) == epoch; });
  return came ? static_cast<u32>(value) : 0;
}
template <typename Wait>
__device__ inline u32 poll_packet(const u64* address, u32 epoch, i32 peer, Wait& wait) {
  return poll_packet(address, load_relaxed_sys(address), epoch, peer, wait);
}

// As poll_packet, and what follows comes after all that the peer did before its release.
template <typename Wait>
__device__ inline u32 acquire_packet(const u64* address, u32 epoch, i32 peer, Wait& wait) {
  u64 value = load_acquire_sys(address);
  const bool came = wait.poll(
      value, peer, [address] { return load_acquire_sys(address); },
      [epoch](u64 packet) { return static_cast<u32>(packet >> 32) == epoch; });
  return came ? static_cast<u32>(value) : 0;
}

}  // namespace expertwire
