// combine on the CPU:
//   send     [RANK_LOCAL_REDUCE of EXPERT_MAJOR: post the entry with the weights, await each destination's entry]
//            write rows for every other rank into the own buffer of this epoch -> post
//   receive  await all -> sum each token's rows
// Own rows are summed from where they lie; in two phases they are written like the others. The order of every sum is fixed
// by rank or by k, never by arrival.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>

#include "backend/cpu/cpu_backend.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cpu {
namespace {

constexpr std::uint16_t kNanBf16 = 0x7FC0;

}  // namespace

// What all steps of one combine look at.
struct CpuBackend::CombineView {
  Lane& lane;
  const CombineParams& params;
  const Operation& operation;
  DispatchBuffer sent;  // own ids and weights of the dispatch: intact while its handle is fresh
  CombineBuffer own;

  bool stages_own_rows() const { return lane.combine.stages_own_rows; }
  char& absent(int rank) const { return lane.combine.absent[static_cast<std::size_t>(rank)]; }
  const std::uint16_t* expert_output() const { return static_cast<const std::uint16_t*>(params.expert_output); }
};

CpuBackend::CombineView CpuBackend::view(Lane& lane) const {
  const Operation& operation = lane.combine.operation;
  return CombineView{lane, lane.combine.params, operation,
                     dispatch_buffer(problem_.rank, operation.lane, lane.dispatch_epoch),
                     combine_buffer(problem_.rank, operation.lane, operation.epoch)};
}

const std::uint16_t* CpuBackend::expert_row(const CombineView& call, std::size_t received, int selection) const {
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  const std::size_t at = call.lane.routes.first_selection(received) + static_cast<std::size_t>(selection);
  if (!rank_major_) return call.expert_output() + static_cast<std::size_t>(call.lane.routes.selection_row[at]) * hidden;
  if (!shape_.direct_send) return call.expert_output() + received * hidden;
  return call.expert_output() +
         (first_entry(received) + static_cast<std::size_t>(call.lane.routes.selection_k[at])) * hidden;
}

// A row for this rank, where `rank` has written it.
const std::uint16_t* CpuBackend::sent_row(const CombineView& call, int rank, std::size_t received,
                                          int selection) const {
  return combine_buffer(rank, call.operation.lane, call.operation.epoch).row(received, selection);
}

void CpuBackend::reduce_selections(const CombineView& call, std::size_t received, const float* new_weights,
                                   std::uint16_t* out) const {
  const Routes& routes = call.lane.routes;
  const int count = routes.num_selections[received];
  const std::size_t first = routes.first_selection(received), entries = first_entry(routes.token[received]);
  std::array<const std::uint16_t*, kMaxTopk> rows;
  std::array<float, kMaxTopk> weights;
  for (int i = 0; i < count; ++i) {
    const std::size_t at = first + static_cast<std::size_t>(i);
    rows[static_cast<std::size_t>(i)] = expert_row(call, received, i);
    weights[static_cast<std::size_t>(i)] =
        new_weights == nullptr ? routes.selection_weight[at]
                               : new_weights[entries + static_cast<std::size_t>(routes.selection_k[at])];
  }
  ops_.reduce(rows.data(), weights.data(), count, shape_.hidden_size, out);
}

// What goes back for one received row: its sum, or its rows as they are.
void CpuBackend::write_row(const CombineView& call, int destination, std::size_t received) {
  if (sums_here_) {
    const float* new_weights = call.lane.combine.new_weights[static_cast<std::size_t>(destination)];
    reduce_selections(call, received, new_weights, call.own.row(received, 0));
    return;
  }
  const std::size_t bytes = static_cast<std::size_t>(shape_.hidden_size) * 2;
  const int count = shape_.direct_send ? call.lane.routes.num_selections[received] : 1;
  for (int i = 0; i < count; ++i) std::memcpy(call.own.row(received, i), expert_row(call, received, i), bytes);
}

// Whether all expert rows of a received row are in blocks that their producer has published.
bool CpuBackend::is_published(const CombineView& call, std::size_t received) const {
  const std::size_t group = num_source_rows(), block = static_cast<std::size_t>(call.params.ready_block_size);
  const auto has = [&](std::size_t row) {
    const std::size_t word = row / group * ((group + block - 1) / block) + row % group / block;
    auto& value = const_cast<i32&>(call.params.ready_words[word]);
    return std::atomic_ref<i32>(value).load(std::memory_order_acquire) == call.params.ready_value;
  };
  if (rank_major_) return has(received);
  const i32* rows = call.lane.routes.selection_row + call.lane.routes.first_selection(received);
  const int count = call.lane.routes.num_selections[received];
  return std::all_of(rows, rows + count, [&](i32 row) { return has(static_cast<std::size_t>(row)); });
}

// Rows in the order in which they are published. What is missing is looked for again, with a short sleep where a whole
// look has found nothing.
void CpuBackend::write_published_rows(const CombineView& call) {
  std::fill(is_written_.begin(), is_written_.end(), 0);
  board_.restart_waits();
  for (bool all = false; !all;) {
    bool any = false;
    all = true;
    for (int destination = 0; destination < shape_.num_ranks; ++destination) {
      if (call.absent(destination)) continue;
      for (int slot = 0; slot < call.lane.routes.rank_rows[destination]; ++slot) {
        const std::size_t received = source_row(destination, slot);
        if (is_written_[received]) continue;
        if (!is_published(call, received)) {
          all = false;
          continue;
        }
        write_row(call, destination, received);
        is_written_[received] = 1;
        any = true;
      }
    }
    if (any) board_.restart_waits();
    if (!any && !all) board_.sleep_for_producer(call.operation);
  }
}

// RANK_LOCAL_REDUCE: one row for each rank that the token went to, in ascending rank order.
int CpuBackend::collect_partials(const CombineView& call, int token, const std::uint16_t** rows) {
  const std::size_t first = call.lane.routes.first_destination(token);
  int count = 0;
  for (int i = 0; i < call.lane.routes.num_destinations[token]; ++i) {
    const i32 rank = call.lane.routes.destination_rank[first + static_cast<std::size_t>(i)];
    const std::size_t received =
        source_row(problem_.rank, call.lane.routes.destination_slot[first + static_cast<std::size_t>(i)]);
    if (call.absent(rank)) continue;
    if (rank != problem_.rank || call.stages_own_rows()) {
      rows[count++] = sent_row(call, rank, received, 0);
    } else if (rank_major_) {
      rows[count++] = expert_row(call, received, 0);
    } else {
      reduce_selections(call, received, call.params.weights, partial_row_.data());
      rows[count++] = partial_row_.data();
    }
  }
  return count;
}

// DIRECT_SEND: one row for each selection, in ascending k.
int CpuBackend::collect_slots(const CombineView& call, int token, const std::uint16_t** rows, float* weights) const {
  const std::size_t first = call.lane.routes.first_destination(token), entries = first_entry(token);
  const i32* ranks = call.lane.routes.destination_rank + first;
  const float* token_weights = (call.own.packet->has_weights ? call.own.weights : call.sent.weights) + entries;
  std::array<int, kMaxTopk> taken{};  // selections of each destination so far
  int count = 0;
  for (int k = 0; k < shape_.num_topk; ++k) {
    const i32 expert = call.sent.topk_ids[entries + static_cast<std::size_t>(k)];
    if (expert < 0) continue;
    const i32 rank = rank_of_expert_[static_cast<std::size_t>(expert)];
    const auto destination =
        static_cast<std::size_t>(std::find(ranks, ranks + call.lane.routes.num_destinations[token], rank) - ranks);
    const int selection = taken[destination]++;
    if (call.absent(rank)) continue;
    const std::size_t received = source_row(problem_.rank, call.lane.routes.destination_slot[first + destination]);
    rows[count] = rank == problem_.rank && !call.stages_own_rows() ? expert_row(call, received, selection)
                                                                   : sent_row(call, rank, received, selection);
    weights[count++] = token_weights[k];
  }
  return count;
}

void CpuBackend::sum_token(const CombineView& call, int token) {
  std::array<const std::uint16_t*, kMaxTopk> rows;
  std::array<float, kMaxTopk> weights;
  auto* out = static_cast<std::uint16_t*>(call.params.out) +
              static_cast<std::size_t>(token) * static_cast<std::size_t>(shape_.hidden_size);
  const int count = shape_.direct_send ? collect_slots(call, token, rows.data(), weights.data())
                                       : collect_partials(call, token, rows.data());
  const bool weighted = shape_.direct_send && !rank_major_;
  ops_.reduce(rows.data(), weighted ? weights.data() : nullptr, count, shape_.hidden_size, out);
}

// Waits for `peer` and notes whether its rows count: not if it is lost, nor if it combines another dispatch.
void CpuBackend::meet(const CombineView& call, WordKind kind, int peer) {
  const auto idx = static_cast<std::size_t>(peer);
  if (!board_.await(kind, peer, call.operation)) {
    call.absent(peer) = 1;
    return;
  }
  const CombinePacket& theirs = *combine_buffer(peer, call.operation.lane, call.operation.epoch).packet;
  call.lane.combine.kept_weights[idx] = theirs.keeps_weights != 0;
  if (theirs.dispatch_epoch == call.lane.dispatch_epoch) return;
  call.absent(peer) = 1;
  call.lane.combine.other_dispatch[idx] = theirs.dispatch_epoch;
}

// In two phases a rank that gave weights to dispatch is not waited for: it may not bring others. One that is lost is
// looked at, or it would not find out.
bool CpuBackend::hears_of_weights(const CombineView& call, int destination) const {
  return !call.lane.combine.in_two_phases || call.lane.weights_come_late[static_cast<std::size_t>(destination)] ||
         board_.is_lost(destination);
}

void CpuBackend::send_rows(const CombineView& call) {
  if (sums_here_) board_.post(WordKind::ENTRY, call.operation);
  for (int i = call.stages_own_rows() ? 0 : 1; i < shape_.num_ranks; ++i) {
    const int destination = (problem_.rank + i) % shape_.num_ranks;
    const float*& new_weights = call.lane.combine.new_weights[static_cast<std::size_t>(destination)];
    new_weights = i == 0 ? call.params.weights : nullptr;
    if (i > 0 && sums_here_ && hears_of_weights(call, destination)) {
      meet(call, WordKind::ENTRY, destination);
      if (call.absent(destination)) continue;
      const CombineBuffer theirs = combine_buffer(destination, call.operation.lane, call.operation.epoch);
      if (theirs.packet->has_weights) new_weights = theirs.weights;
    }
    if (call.params.ready_words != nullptr) continue;
    for (int slot = 0; slot < call.lane.routes.rank_rows[destination]; ++slot)
      write_row(call, destination, source_row(destination, slot));
  }
  if (call.params.ready_words != nullptr) write_published_rows(call);
  if (sums_here_) board_.restart_waits();  // all have entered; now they sum
  board_.post(WordKind::COMBINE, call.operation);
}

// A combine that did not complete shows no numbers.
void CpuBackend::fill_with_nan(const CombineParams& params) const {
  std::fill_n(static_cast<std::uint16_t*>(params.out),
              static_cast<std::size_t>(params.num_tokens) * static_cast<std::size_t>(shape_.hidden_size), kNanBf16);
}

void CpuBackend::send_combine(int lane_idx, const CombineParams& params, bool in_two_phases) {
  board_.require_available();
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  lane.combine.params = params;
  lane.combine.operation = board_.begin("combine", lane_idx, lane.combine_epoch);
  lane.combine.in_two_phases = in_two_phases;
  lane.combine.stages_own_rows = in_two_phases || params.ready_words != nullptr;
  std::fill(lane.combine.absent.begin(), lane.combine.absent.end(), 0);
  std::fill(lane.combine.other_dispatch.begin(), lane.combine.other_dispatch.end(), 0);
  const CombineView call = view(lane);
  *call.own.packet = CombinePacket{lane.dispatch_epoch, params.weights != nullptr, in_two_phases};
  if (params.weights != nullptr) std::copy_n(params.weights, first_entry(params.num_tokens), call.own.weights);
  try {
    send_rows(call);
  } catch (const Error&) {
    fill_with_nan(params);
    throw;
  }
}

void CpuBackend::receive_combine(Lane& lane) {
  const CombineView call = view(lane);
  try {
    if (lane.combine.in_two_phases) board_.require_available();
    for (int peer = 0; peer < shape_.num_ranks; ++peer) {
      if (peer != problem_.rank) meet(call, WordKind::COMBINE, peer);
    }
    for (int token = 0; token < call.params.num_tokens; ++token) sum_token(call, token);
    board_.confirm(WordKind::COMBINE, call.operation);
  } catch (const Error&) {
    fill_with_nan(call.params);
    throw;
  }
  lane.combine_epoch = call.operation.epoch;
  ++stats_.combine_calls;
  count_combine_bytes(call);
  require_agreement(call);
}

void CpuBackend::combine(int lane_idx, const CombineParams& params) {
  send_combine(lane_idx, params, false);
  receive_combine(lanes_[static_cast<std::size_t>(lane_idx)]);
}

void CpuBackend::send(int lane_idx, const CombineParams& params) { send_combine(lane_idx, params, true); }

void CpuBackend::count_combine_bytes(const CombineView& call) {
  const std::uint64_t row_bytes = static_cast<std::uint64_t>(shape_.hidden_size) * 2;
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer == problem_.rank || call.absent(peer)) continue;
    for (int slot = 0; slot < call.lane.routes.rank_rows[peer]; ++slot) {
      stats_.bytes_sent +=
          row_bytes *
          static_cast<std::uint64_t>(shape_.direct_send ? call.lane.routes.num_selections[source_row(peer, slot)] : 1);
    }
  }
  for (int token = 0; token < call.params.num_tokens; ++token) {
    const std::size_t first = call.lane.routes.first_destination(token);
    if (!shape_.direct_send) {
      for (int i = 0; i < call.lane.routes.num_destinations[token]; ++i) {
        const i32 rank = call.lane.routes.destination_rank[first + static_cast<std::size_t>(i)];
        if (rank != problem_.rank && !call.absent(rank)) stats_.bytes_received += row_bytes;
      }
      continue;
    }
    for (std::size_t entry = first_entry(token); entry < first_entry(token + 1); ++entry) {
      const i32 expert = call.sent.topk_ids[entry];
      if (expert < 0) continue;
      const i32 rank = rank_of_expert_[static_cast<std::size_t>(expert)];
      if (rank != problem_.rank && !call.absent(rank)) stats_.bytes_received += row_bytes;
    }
  }
}

// What ranks must agree on is a mistake of the callers that shows when packets have been exchanged, with the epochs in step.
void CpuBackend::require_agreement(const CombineView& call) const {
  const bool replaces = sums_here_ && call.own.packet->has_weights &&
                        !call.lane.weights_come_late[static_cast<std::size_t>(problem_.rank)];
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    const auto idx = static_cast<std::size_t>(peer);
    const std::uint32_t theirs = call.lane.combine.other_dispatch[idx];
    if (theirs != 0) {
      throw Error(ErrorCode::InvalidHandle,
                  "rank " + std::to_string(peer) + " combines dispatch " + std::to_string(kWordEpochs.number(theirs)) +
                      " of lane " + std::to_string(call.operation.lane) + ", this rank dispatch " +
                      std::to_string(kWordEpochs.number(call.lane.dispatch_epoch)) + ": the output is not valid");
    }
    if (replaces && peer != problem_.rank && !call.absent(peer) && call.lane.combine.kept_weights[idx]) {
      throw Error(ErrorCode::InvalidArgument,
                  "weights: replace those of dispatch, but rank " + std::to_string(peer) +
                      " combines in two phases and does not wait for them: the output is not valid");
    }
  }
}

}  // namespace expertwire::cpu
