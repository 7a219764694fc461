// dispatch on the CPU:
//   send     check ids -> write routes, then rows, into the own buffer of this epoch -> post
//   receive  for every source: await, place
// Nothing is visible to a peer before the post, so a refused call leaves no trace.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "backend/cpu/cpu_backend.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cpu {
namespace {

ScaleRule scale_rule(const QuantConfig& quant) {
  if (quant.format == DispatchDataType::MXFP8) return ScaleRule::MX;
  if (quant.scale_format == ScaleFormat::UE8M0) return ScaleRule::UE8M0;
  return quant.round_scale_pow2 ? ScaleRule::POW2 : ScaleRule::FLOAT32;
}

std::string slot_name(int token, int k) { return "topk_ids[" + std::to_string(token) + ", " + std::to_string(k) + "]"; }

}  // namespace

// Reads each id once, so that what is routed is what was checked, whatever another thread does to the array meanwhile.
// From here on all ids are of physical experts.
template <typename Index>
void CpuBackend::take_topk_ids(const Index* topk_ids, int num_tokens, DispatchBuffer& own) {
  for (int token = 0; token < num_tokens; ++token) {
    ++token_counter_;
    for (int k = 0; k < shape_.num_topk; ++k) {
      const std::size_t entry = first_entry(token) + static_cast<std::size_t>(k);
      const Index id = topk_ids[entry];
      own.topk_ids[entry] = -1;
      if (id < 0) continue;
      if (id >= problem_.num_logical_experts) {
        throw Error(ErrorCode::InvalidArgument, slot_name(token, k) + " = " + std::to_string(id) + ": must be below " +
                                                    problem_.id_bound() + ", or negative to select nothing");
      }
      own.topk_ids[entry] = problem_.physical_of_logical.empty()
                                ? static_cast<i32>(id)
                                : problem_.physical_of_logical[static_cast<std::size_t>(id)];
      std::uint64_t& last = last_token_[static_cast<std::size_t>(id)];
      if (last == token_counter_) {
        throw Error(ErrorCode::InvalidArgument,
                    slot_name(token, k) + " = " + std::to_string(id) + ": the token names this expert twice");
      }
      last = token_counter_;
    }
  }
}

void CpuBackend::write_routes(Lane& lane, const DispatchParams& params, DispatchBuffer& own) {
  std::fill_n(own.rank_rows, shape_.num_ranks, 0);
  for (int token = 0; token < params.num_tokens; ++token) {
    i32* ranks = lane.routes.destination_rank + lane.routes.first_destination(token);
    i32* slots = lane.routes.destination_slot + lane.routes.first_destination(token);
    int num_destinations = 0;
    for (std::size_t entry = first_entry(token); entry < first_entry(token + 1); ++entry) {
      const i32 expert = own.topk_ids[entry];
      own.weights[entry] = params.weights == nullptr ? 1.0f : params.weights[entry];
      if (expert < 0) continue;
      const i32 rank = rank_of_expert_[static_cast<std::size_t>(expert)];
      int position = num_destinations;  // ascending, each rank once
      while (position > 0 && ranks[position - 1] > rank) --position;
      if (position > 0 && ranks[position - 1] == rank) continue;
      std::copy_backward(ranks + position, ranks + num_destinations, ranks + num_destinations + 1);
      ranks[position] = rank;
      ++num_destinations;
    }
    lane.routes.num_destinations[token] = num_destinations;
    for (int i = 0; i < num_destinations; ++i) {
      slots[i] = own.rank_rows[ranks[i]]++;
      own.row_lists[source_row(ranks[i], slots[i])] = token;
    }
  }
  if (params.weights != nullptr) return;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) own.rank_rows[rank] |= kWeightsComeLate;
}

void CpuBackend::write_rows(const Lane& lane, DispatchBuffer& own) const {
  const RowLayout& row = plan_.layout.row;
  const DispatchParams& params = lane.dispatch.params;
  const bool quantize = shape_.fp8 && params.block_scales == nullptr;
  const std::size_t input_bytes = static_cast<std::size_t>(shape_.hidden_size) * (shape_.fp8 && !quantize ? 1 : 2);
  const std::byte* x = static_cast<const std::byte*>(params.x);
  const std::byte* scales = static_cast<const std::byte*>(params.block_scales);
  for (int token = 0; token < params.num_tokens; ++token) {
    const int num_destinations = lane.routes.num_destinations[token];
    const i32* ranks = lane.routes.destination_rank + lane.routes.first_destination(token);
    const bool stays = num_destinations == 1 && ranks[0] == problem_.rank && !lane.dispatch.in_two_phases;
    if (num_destinations == 0 || (stays && !quantize)) continue;  // own rows are placed from x where they can be
    const std::byte* from = x + static_cast<std::size_t>(token) * input_bytes;
    std::byte* to = own.row(token);
    if (quantize) {
      ops_.quantize(reinterpret_cast<const std::uint16_t*>(from), shape_.hidden_size, scale_rule(problem_.config.quant),
                    reinterpret_cast<std::uint8_t*>(to), to + row.scales_offset);
      continue;
    }
    std::memcpy(to, from, input_bytes);
    if (scales != nullptr)
      std::memcpy(to + row.scales_offset, scales + static_cast<std::size_t>(token) * row.scale_bytes, row.scale_bytes);
  }
}

void CpuBackend::place_scales(Lane& lane, const std::byte* scales, std::size_t output_row) const {
  const std::size_t count = static_cast<std::size_t>(num_scales(shape_));
  auto* out = static_cast<std::uint32_t*>(lane.buffers.scales);
  if (problem_.config.quant.scale_layout == ScaleLayout::ROW) {
    std::memcpy(out + output_row * count, scales, count * 4);
    return;
  }
  // [.., S', stride]: one matrix for each expert, or a single one for RANK_MAJOR
  const std::size_t rows = num_source_rows(), stride = column_stride(shape_);
  std::uint32_t* column = out + output_row / rows * count * stride + output_row % rows;
  for (std::size_t i = 0; i < count; ++i) std::memcpy(column + i * stride, scales + i * 4, 4);
}

void CpuBackend::place_row(Lane& lane, const DispatchParams& params, std::size_t received, const std::byte* row,
                           const std::byte* scales) {
  const std::size_t payload = plan_.layout.row.payload_bytes;
  std::byte* tokens = static_cast<std::byte*>(params.tokens);
  std::array<void*, kMaxTopk> destinations;
  int count = 0;
  if (rank_major_) {
    destinations[0] = tokens + received * payload;
    count = 1;
    if (scales != nullptr) place_scales(lane, scales, received);
  } else {
    const i32* rows = lane.routes.selection_row + lane.routes.first_selection(received);
    for (; count < lane.routes.num_selections[received]; ++count) {
      destinations[static_cast<std::size_t>(count)] = tokens + static_cast<std::size_t>(rows[count]) * payload;
      if (scales != nullptr) place_scales(lane, scales, static_cast<std::size_t>(rows[count]));
    }
  }
  ops_.copy(row, payload, destinations.data(), count);
}

// Notes where the row's selections go, EXPERT_MAJOR behind the rows before it. What a peer wrote is taken only within
// bounds: a rank that was given up may read a buffer that is being written again, and learns it at the end.
void CpuBackend::note_selections(Lane& lane, const DispatchBuffer& from, std::size_t received, int source, int token) {
  const auto num_topk = static_cast<std::size_t>(shape_.num_topk);
  const auto expert_capacity = static_cast<i32>(num_source_rows());
  const std::size_t first = lane.routes.first_selection(received);
  int count = 0;
  for (std::size_t k = 0; k < num_topk; ++k) {
    const std::size_t entry = first_entry(token) + k;
    const i32 local = from.topk_ids[entry] - problem_.first_local_expert;
    const bool selected = local >= 0 && local < problem_.num_local_experts && count < plan_.routes.selections;
    if (rank_major_) {
      lane.buffers.topk_ids[first_entry(received) + k] =
          selected ? from.topk_ids[entry] : problem_.config.invalid_token_expert_id;
      lane.buffers.weights[first_entry(received) + k] = selected ? from.weights[entry] : 0.0f;
    }
    if (!selected || expert_rows_[static_cast<std::size_t>(local)] == expert_capacity) continue;
    const std::size_t at = first + static_cast<std::size_t>(count++);
    const i32 position = expert_rows_[static_cast<std::size_t>(local)]++;
    lane.routes.selection_k[at] = static_cast<i32>(k);
    lane.routes.selection_weight[at] = from.weights[entry];
    if (rank_major_) continue;
    const i32 row = local * expert_capacity + position;
    lane.routes.selection_row[at] = row;
    lane.buffers.source_token[row] = static_cast<i32>(source_row(source, token));
  }
  lane.routes.num_selections[received] = count;
}

void CpuBackend::receive_from(int source, Lane& lane, const DispatchBuffer& from, int num_rows) {
  const RowLayout& layout = plan_.layout.row;
  const DispatchParams& params = lane.dispatch.params;
  const bool from_x =
      source == problem_.rank && !lane.dispatch.in_two_phases && (!shape_.fp8 || params.block_scales != nullptr);
  for (int slot = 0; slot < num_rows; ++slot) {
    const std::size_t received = source_row(source, slot);
    const i32 token = std::clamp(from.row_lists[source_row(problem_.rank, slot)], 0, shape_.max_tokens_per_rank - 1);
    const auto token_idx = static_cast<std::size_t>(token);
    lane.routes.token[received] = token;
    note_selections(lane, from, received, source, token);
    const std::byte* sent = from.row(token);
    const std::byte* row = from_x ? static_cast<const std::byte*>(params.x) + token_idx * layout.payload_bytes : sent;
    const std::byte* scales = !shape_.fp8 ? nullptr
                              : from_x
                                  ? static_cast<const std::byte*>(params.block_scales) + token_idx * layout.scale_bytes
                                  : sent + layout.scales_offset;
    place_row(lane, params, received, row, scales);
  }
}

void CpuBackend::finish_source(int source, Lane& lane, int num_rows) {
  lane.routes.rank_rows[source] = num_rows;
  if (rank_major_) {
    lane.buffers.num_tokens_per_rank[source] = num_rows;
    fill_padding(lane, source_row(source, num_rows), source_row(source + 1, 0));
    return;
  }
  const auto ranks = static_cast<std::size_t>(shape_.num_ranks);
  for (std::size_t expert = 0; expert < expert_rows_.size(); ++expert) {
    i32* range = lane.buffers.rank_ranges + (expert * ranks + static_cast<std::size_t>(source)) * 2;
    range[0] = source == 0 ? 0 : range[-2] + range[-1];
    range[1] = expert_rows_[expert] - range[0];
    lane.buffers.num_tokens_per_expert[expert] = expert_rows_[expert];
  }
}

// RANK_MAJOR: ids and weights of rows [first, last) that hold no token are defined.
void CpuBackend::fill_padding(Lane& lane, std::size_t first, std::size_t last) const {
  std::fill(lane.buffers.topk_ids + first_entry(first), lane.buffers.topk_ids + first_entry(last),
            problem_.config.invalid_token_expert_id);
  std::fill(lane.buffers.weights + first_entry(first), lane.buffers.weights + first_entry(last), 0.0f);
}

// A dispatch that did not complete shows no rows.
void CpuBackend::clear_counts(Lane& lane) const {
  const auto local = static_cast<std::size_t>(problem_.num_local_experts),
             ranks = static_cast<std::size_t>(shape_.num_ranks);
  if (rank_major_) {
    std::fill_n(lane.buffers.num_tokens_per_rank, ranks, 0);
    fill_padding(lane, 0, num_source_rows());
    return;
  }
  std::fill_n(lane.buffers.num_tokens_per_expert, local, 0);
  std::fill_n(lane.buffers.rank_ranges, local * ranks * 2, 0);
}

void CpuBackend::receive_all(Lane& lane) {
  const Operation& operation = lane.dispatch.operation;
  const std::uint64_t row_bytes = plan_.layout.row.payload_bytes + plan_.layout.row.scale_bytes;
  std::fill(expert_rows_.begin(), expert_rows_.end(), 0);
  for (int i = 0; i < shape_.num_ranks; ++i) {
    // EXPERT_MAJOR rows follow one another by source rank; in RANK_MAJOR each has its own place, so own rows go first.
    const int source = rank_major_ ? (problem_.rank + i) % shape_.num_ranks : i;
    int num_rows = 0;
    if (source == problem_.rank || board_.await(WordKind::DISPATCH, source, operation)) {
      const DispatchBuffer from = dispatch_buffer(source, operation.lane, operation.epoch);
      const i32 told = from.rank_rows[problem_.rank];
      lane.weights_come_late[static_cast<std::size_t>(source)] = (told & kWeightsComeLate) != 0;
      num_rows = std::clamp(told & ~kWeightsComeLate, 0, shape_.max_tokens_per_rank);
      receive_from(source, lane, from, num_rows);
    }
    finish_source(source, lane, num_rows);
    if (source != problem_.rank) stats_.bytes_received += row_bytes * static_cast<std::uint64_t>(num_rows);
  }
  board_.confirm(WordKind::DISPATCH, operation);
}

void CpuBackend::send_dispatch(int lane_idx, const DispatchParams& params, bool in_two_phases) {
  board_.require_available();
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  lane.dispatch = DispatchCall{params, board_.begin("dispatch", lane_idx, lane.dispatch_epoch), in_two_phases};
  DispatchBuffer own = dispatch_buffer(problem_.rank, lane_idx, lane.dispatch.operation.epoch);
  params.topk_ids_are_64_bit ? take_topk_ids(static_cast<const i64*>(params.topk_ids), params.num_tokens, own)
                             : take_topk_ids(static_cast<const i32*>(params.topk_ids), params.num_tokens, own);
  write_routes(lane, params, own);
  write_rows(lane, own);
  try {
    board_.post(WordKind::DISPATCH, lane.dispatch.operation);
  } catch (const Error&) {
    clear_counts(lane);
    throw;
  }
}

void CpuBackend::receive_dispatch(Lane& lane) {
  const Operation& operation = lane.dispatch.operation;
  try {
    if (lane.dispatch.in_two_phases) board_.require_available();
    receive_all(lane);
  } catch (const Error&) {
    clear_counts(lane);
    throw;
  }
  lane.dispatch_epoch = operation.epoch;
  count_dispatch(dispatch_buffer(problem_.rank, operation.lane, operation.epoch));
}

void CpuBackend::dispatch(int lane_idx, const DispatchParams& params) {
  send_dispatch(lane_idx, params, false);
  receive_dispatch(lanes_[static_cast<std::size_t>(lane_idx)]);
}

void CpuBackend::send(int lane_idx, const DispatchParams& params) { send_dispatch(lane_idx, params, true); }

void CpuBackend::count_dispatch(const DispatchBuffer& own) {
  const std::uint64_t row_bytes = plan_.layout.row.payload_bytes + plan_.layout.row.scale_bytes;
  ++stats_.dispatch_calls;
  for (std::size_t expert = 0; expert < expert_rows_.size(); ++expert)
    stats_.expert_tokens[expert] += static_cast<std::uint64_t>(expert_rows_[expert]);
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer != problem_.rank)
      stats_.bytes_sent += row_bytes * static_cast<std::uint64_t>(own.rank_rows[peer] & ~kWeightsComeLate);
  }
}

}  // namespace expertwire::cpu
