// on_peer_loss="mask": which ranks this one does without. docs/protocol.md has the argument.
//
// A rank is lost when something awaited from it has not come and it has been silent for the time-out: ranks that wait for
// others say so now and then. Loss is for good. The block that finds it out tells the lost rank, so that it ends, and all
// others; packets say whether their sender has losses to tell of. Nothing here is touched while nobody is late, but for
// one look at the entry and one word for each block and kernel.
#pragma once

#include "wire.cuh"

namespace expertwire {

constexpr NoticeLayout kNotices = make_notice_layout(kShape);
constexpr u32 kHasLosses = 4u;  // in a packet's lower half: the sender's notice names lost ranks
constexpr i32 kSetWords = 3;    // 96 bits, one for each rank

static_assert(kRanks <= kSetWords * 32);

__device__ inline bool in_set(const u32* set, i32 rank) { return (set[rank >> 5] >> (rank & 31) & 1u) != 0; }
__device__ inline void add_to_set(u32* set, i32 rank) { atomicOr(set + (rank >> 5), 1u << (rank & 31)); }
__device__ inline bool is_empty(const u32* set) { return (set[0] | set[1] | set[2]) == 0; }

// Shared memory of a block: sets of ranks.
struct BlockLosses {
  u32 absent[kSetWords];      // not part of this operation
  u32 missing[kSetWords];     // whose counts this block has given up
  u32 agreed[kSetWords];      // whose counts every block has given up
  u32 incomplete[kSetWords];  // some of whose rows this block has given up
};

__device__ inline BlockLosses& block_losses() {
  __shared__ BlockLosses losses;
  return losses;
}

__device__ inline bool is_absent(i32 peer) {
  if constexpr (config::kMask) return in_set(block_losses().absent, peer);
  return false;
}

__device__ inline u64 operation_code(const LaneParams& lane, i32 operation, u32 epoch) {
  return static_cast<u64>(epoch) << 8 | static_cast<u64>(lane.lane) << 1 | static_cast<u64>(operation);
}

__device__ inline u8* notices_of(const LaneParams& lane, i32 rank) { return lane.inboxes[rank] + lane.mask.notices; }

// As EndingWait, but a rank that does not come is left out. `gone` says so of the rank that was given up last.
class MaskingWait {
 public:
  __device__ MaskingWait(const LaneParams& lane, i32 operation, u32 epoch, u32 ended_in)
      : lane_(lane), operation_(operation), epoch_(epoch), failed_(ended_in != 0) {
    if (!failed_ && is_given_up()) end(0);
  }

  __device__ bool expired(i32 peer, u32 seen) {
    if (failed_ || peer == gone_) return true;
    if ((++polls_ & 127u) != 0) return false;
    return judge(peer, seen);
  }
  template <typename T, typename Load, typename Arrived>
  __device__ bool poll(T& value, i32 peer, Load load, Arrived arrived) {
#pragma unroll 1
    while (!arrived(value)) {
      if (expired(peer, seen_word(value))) return false;
      value = load();
    }
    return true;
  }
  __device__ bool failed() const { return failed_; }
  __device__ bool gone(i32 peer) const { return peer == gone_; }

  // Takes over what a peer's notice says. What is said of this rank reaches it by a word of its own.
  __device__ __noinline__ void unite(i32 source) {
    const Word said = load_relaxed_sys(notice_from(source));
    const u32 set[kSetWords] = {said.x, said.y, said.z};
    for (i32 rank = 0; rank < kRanks; ++rank) {
      if (rank != lane_.rank && in_set(set, rank)) lose(rank, LossKind::NAMED);
    }
  }

 private:
  __device__ const Word* notice_from(i32 source) const {
    return at<const Word>(notices_of(lane_, lane_.rank), kNotices.notices) + source;
  }
  __device__ bool is_given_up() const {
    return load_relaxed_sys(at<const u32>(notices_of(lane_, lane_.rank), kNotices.given_up)) != 0;
  }
  __device__ bool is_lost(i32 rank) const { return load_relaxed_sys(lane_.mask.state->lost_in + rank) != 0; }

  __device__ __noinline__ bool judge(i32 peer, u32 seen) {
    if (load_relaxed_sys(lane_.wait.abort) != 0) return failed_ = true;
    if (is_given_up()) return end(seen);
    if (config::kByBlocks && peer < 0) return judge_producer(peer, seen);
    if (is_lost(peer)) return leave_out(peer);
    const u64 now = global_nanoseconds(), timeout = lane_.wait.timeout_ns;
    const u32 beat = load_relaxed_sys(&notice_from(peer)->w);
    if (peer != peer_ || beat != beat_) since_ = now;  // it is another's turn, or this one lives
    peer_ = peer;
    beat_ = beat;
    if (start_ == 0) start_ = now;
    attend(now);
    const bool too_long = now - start_ >= (kRanks + 2) * timeout;  // every wait ends, whatever others say
    if (peer == lane_.rank) return too_long && end(seen);  // for other blocks of this rank, which wait for ranks
    if (now - since_ < timeout && !too_long) return false;
    lose(peer, LossKind::TIMED_OUT);
    return leave_out(peer);
  }

  // The own producer cannot be left out. Meanwhile the others hear that this rank is here, and what they are waited for
  // afterwards is not shortened.
  __device__ bool judge_producer(i32 peer, u32 seen) {
    const u64 now = global_nanoseconds();
    if (peer != peer_) since_ = now;
    peer_ = peer;
    start_ = 0;
    attend(now);
    if (now - since_ < lane_.wait.timeout_ns) return false;
    report_loss(lane_.wait, Loss{lane_.rank, peer, lane_.lane, operation_, epoch_, seen});
    return failed_ = true;
  }

  __device__ bool leave_out(i32 peer) {
    gone_ = peer;
    return true;
  }

  // This rank was given up, or is stuck: the communicator ends.
  __device__ bool end(u32 seen) {
    report_loss(lane_.wait, Loss{lane_.rank, lane_.rank, lane_.lane, operation_, epoch_, seen});
    return failed_ = true;
  }

  __device__ __noinline__ void lose(i32 rank, LossKind kind) {
    if (atomicCAS(lane_.mask.state->lost_in + rank, u64{0}, operation_code(lane_, operation_, epoch_)) != 0) return;
    *reinterpret_cast<volatile u32*>(lane_.mask.host + rank) = static_cast<u32>(kind);
    __threadfence_system();
    store_relaxed_sys(at<u32>(notices_of(lane_, rank), kNotices.given_up), 1u);  // the last word to it
    tell();
  }

  // One thread of a rank that waits, every now and then: hears what others have lost, and says that it is here.
  __device__ void attend(u64 now) {
    u64* attended = &lane_.mask.state->attended_ns;
    const u64 last = load_relaxed_sys(attended);
    if (now - last < lane_.wait.timeout_ns / 8 || atomicCAS(attended, last, now) != last) return;
    for (i32 source = 0; source < kRanks; ++source) {
      if (source != lane_.rank && !is_lost(source)) unite(source);
    }
    tell();
  }

  // Threads may tell at the same time: whoever finds more lost than before tells once more, so that the last notice names all.
  __device__ __noinline__ void tell() {
    u32 num_known;
    do {
      num_known = num_lost();
      store_notices();
      __threadfence_system();
    } while (num_lost() != num_known);
  }

  __device__ __noinline__ u32 num_lost() const {
    u32 num = 0;
#pragma unroll 1
    for (i32 rank = 0; rank < kRanks; ++rank) num += is_lost(rank) ? 1u : 0u;
    return num;
  }

  __device__ __noinline__ void store_notices() {
    u32 set[kSetWords] = {0, 0, 0};
    for (i32 rank = 0; rank < kRanks; ++rank) set[rank >> 5] |= (is_lost(rank) ? 1u : 0u) << (rank & 31);
    const Word notice{set[0], set[1], set[2], static_cast<u32>(global_nanoseconds() >> 4) | 1u};
    for (i32 peer = 0; peer < kRanks; ++peer) {
      if (peer != lane_.rank && !in_set(set, peer))
        store_relaxed_sys(at<Word>(notices_of(lane_, peer), kNotices.notices) + lane_.rank, notice);
    }
  }

  const LaneParams& lane_;
  i32 operation_;
  u32 epoch_;
  u32 polls_ = 0;
  i32 gone_ = -1;
  i32 peer_ = -1;  // whom the last look was at, what its notice said last, and since when nothing has come from it
  u32 beat_ = 0;
  u64 since_ = 0, start_ = 0;
  bool failed_;
};

template <bool kMask>
struct WaitOf {
  using Type = EndingWait;
};
template <>
struct WaitOf<true> {
  using Type = MaskingWait;
};
using Wait = WaitOf<config::kMask>::Type;

// At the start of a kernel. Once the communicator has ended there are no rows that are right: nothing may be stored to others,
// and who waits for it finds out by a wait of its own. (With masking there are no others then.)
__device__ inline bool may_store(const LaneParams& lane, const Wait& wait) {
  if (config::kMask || !wait.failed()) return true;
  store_relaxed_sys(lane.wait.abort, kEndedBefore);
  return false;
}

// Which ranks this operation is without from its start, the same for all its blocks: a rank that is lost while it runs is
// not among them, however late a block begins. After a failure there are no others at all.
__device__ inline void note_absent(const LaneParams& lane, i32 operation, u32 epoch, const Wait& wait) {
  if constexpr (config::kMask) {
    BlockLosses& here = block_losses();
    if (threadIdx.x < kSetWords) {
      const u32 i = threadIdx.x;
      here.absent[i] = here.missing[i] = here.incomplete[i] = 0;
    }
    __syncthreads();
    for (i32 rank = static_cast<i32>(threadIdx.x); rank < kRanks; rank += kBlockThreads) {
      const u64 lost_in = load_relaxed_sys(lane.mask.state->lost_in + rank);
      if (wait.failed() || (lost_in != 0 && lost_in != operation_code(lane, operation, epoch)))
        add_to_set(here.absent, rank);
    }
    __syncthreads();
  }
}

// For a packet's lower half.
__device__ inline u32 losses_to_tell() {
  if constexpr (config::kMask) return is_empty(block_losses().absent) ? 0u : kHasLosses;
  return 0u;
}

// By the thread that has seen a peer's packet: what one rank knew when an operation began, all know when it ends.
template <typename AnyWait>
__device__ inline void hear_losses(u32 told, i32 source, AnyWait& wait) {
  if constexpr (config::kMask) {
    if ((told & kHasLosses) != 0) wait.unite(source);
  }
}

// A rank's packet of an epoch says that it has finished its operation of this kind before, clean-up included: that kernel has
// ended, so all of it has been performed, and the store needs no release, which takes longer than a row does. With masking
// it tells of notices, which are this kernel's. An operation ends only when it has seen every rank's packet.
// `packet(inbox, source)`: where source's packet lies in an inbox. `heard(told, source)`: what came with one.
template <typename Packet, typename Heard>
__device__ inline void exchange_packets(const LaneParams& lane, u32 epoch, u32 data, Wait& wait, Packet packet,
                                        Heard heard) {
  for (i32 peer = lane_idx(); kSends && peer < kRanks; peer += 32) {
    if (peer == lane.rank || is_absent(peer)) continue;
    const u64 word = static_cast<u64>(epoch) << 32 | data | losses_to_tell();
    if constexpr (config::kMask)
      store_release_sys(packet(lane.inboxes[peer], lane.rank), word);
    else
      store_relaxed_sys(packet(lane.inboxes[peer], lane.rank), word);
  }
  const u64 began_ns = global_nanoseconds();
  for (i32 source = lane_idx(); kReceives && source < kRanks; source += 32) {
    if (source == lane.rank || is_absent(source)) continue;
    const u64* from = packet(lane.inboxes[lane.rank], source);
    const u32 told = config::kMask ? acquire_packet(from, epoch, source, wait) : poll_packet(from, epoch, source, wait);
    atomicAdd(at<u64>(lane.state, kState.waited_ns) + source, global_nanoseconds() - began_ns);
    hear_losses(told, source, wait);
    heard(told, source);
  }
}

}  // namespace expertwire
