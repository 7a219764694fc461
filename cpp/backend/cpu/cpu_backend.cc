#include "backend/cpu/cpu_backend.hpp"

#include <algorithm>
#include <utility>

#include "base/collective.hpp"

namespace expertwire::cpu {
namespace {

template <typename T>
T* at(std::byte* base, u64 offset) {
  return reinterpret_cast<T*>(base + offset);
}

LaneBuffers make_lane_buffers(std::byte* base, const OutputLayout& layout, const Problem& problem) {
  const bool rank_major = problem.config.output_layout == DispatchLayout::RANK_MAJOR;
  LaneBuffers buffers;
  buffers.tokens = base + layout.tokens;
  if (problem.shape.fp8) buffers.scales = base + layout.scales;
  buffers.combine_input = base + layout.combine_input;
  if (rank_major) {
    buffers.num_tokens_per_rank = at<i32>(base, layout.num_tokens_per_rank);
    buffers.topk_ids = at<i32>(base, layout.topk_ids);
    buffers.weights = at<float>(base, layout.weights);
  } else {
    buffers.num_tokens_per_expert = at<i32>(base, layout.num_tokens_per_expert);
    buffers.rank_ranges = at<i32>(base, layout.rank_ranges);
    buffers.source_token = at<i32>(base, layout.source_token);
  }
  return buffers;
}

}  // namespace

DispatchBuffer::DispatchBuffer(std::byte* base, const SegmentLayout& layout)
    : rank_rows(at<i32>(base, layout.dispatch.rank_rows)),
      row_lists(at<i32>(base, layout.dispatch.row_lists)),
      topk_ids(at<i32>(base, layout.dispatch.topk_ids)),
      weights(at<float>(base, layout.dispatch.weights)),
      rows(base + layout.dispatch.rows),
      row_bytes_(layout.row.row_bytes) {}

CombineBuffer::CombineBuffer(std::byte* base, const SegmentLayout& layout)
    : packet(at<CombinePacket>(base, layout.combine.packet)),
      weights(at<float>(base, layout.combine.weights)),
      rows(base + layout.combine.rows),
      row_slots_(static_cast<std::size_t>(layout.combine_row_slots)),
      row_bytes_(layout.combine_row_bytes) {}

Routes::Routes(std::byte* base, const RouteLayout& layout)
    : num_destinations(at<i32>(base, layout.num_destinations)),
      destination_rank(at<i32>(base, layout.destination_rank)),
      destination_slot(at<i32>(base, layout.destination_slot)),
      rank_rows(at<i32>(base, layout.rank_rows)),
      token(at<i32>(base, layout.token)),
      num_selections(at<i32>(base, layout.num_selections)),
      selection_row(at<i32>(base, layout.selection_row)),
      selection_k(at<i32>(base, layout.selection_k)),
      selection_weight(at<float>(base, layout.selection_weight)),
      destinations_(static_cast<std::size_t>(layout.destinations)),
      selections_(static_cast<std::size_t>(layout.selections)) {}

Lane::Lane(const Problem& problem, const Plan& plan)
    : outputs(map_private(plan.outputs.bytes)),
      route_memory(map_private(plan.routes.bytes)),
      buffers(make_lane_buffers(outputs.data(), plan.outputs, problem)),
      routes(route_memory.data(), plan.routes),
      weights_come_late(static_cast<std::size_t>(problem.num_ranks), 0) {
  const auto ranks = static_cast<std::size_t>(problem.num_ranks);
  combine.new_weights.assign(ranks, nullptr);
  combine.absent.assign(ranks, 0);
  combine.kept_weights.assign(ranks, 0);
  combine.other_dispatch.assign(ranks, 0);
}

CpuBackend::CpuBackend(const Problem& problem, const Plan& plan, std::vector<Lane> lanes, std::vector<Peer> peers)
    : problem_(problem),
      plan_(plan),
      shape_(problem.shape),
      rank_major_(problem.config.output_layout == DispatchLayout::RANK_MAJOR),
      sums_here_(!rank_major_ && !shape_.direct_send),
      ops_(row_ops()),
      lanes_(std::move(lanes)),
      board_(problem, plan, std::move(peers)),
      last_token_(static_cast<std::size_t>(shape_.num_experts), 0),
      expert_rows_(static_cast<std::size_t>(problem.num_local_experts), 0),
      partial_row_(static_cast<std::size_t>(shape_.hidden_size), 0),
      is_written_(source_row(shape_.num_ranks, 0), 0) {
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    rank_of_expert_.insert(rank_of_expert_.end(),
                           static_cast<std::size_t>(problem.config.experts_per_rank[static_cast<std::size_t>(rank)]),
                           rank);
  }
  stats_.expert_tokens.assign(static_cast<std::size_t>(problem.num_local_experts), 0);
}

DispatchBuffer CpuBackend::dispatch_buffer(int rank, int lane, std::uint32_t epoch) const {
  return DispatchBuffer(board_.segment(rank) + plan_.layout.dispatch_buffer(lane, epoch), plan_.layout);
}

CombineBuffer CpuBackend::combine_buffer(int rank, int lane, std::uint32_t epoch) const {
  return CombineBuffer(board_.segment(rank) + plan_.layout.combine_buffer(lane, epoch), plan_.layout);
}

void CpuBackend::receive(Step step, int lane_idx, void*) {
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  PeerBoard::resume(step == Step::DISPATCH ? lane.dispatch.operation : lane.combine.operation);
  step == Step::DISPATCH ? receive_dispatch(lane) : receive_combine(lane);
}

bool CpuBackend::has_arrived(Step step, int lane_idx) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  return step == Step::DISPATCH ? board_.has_arrived(WordKind::DISPATCH, lane.dispatch.operation)
                                : board_.has_arrived(WordKind::COMBINE, lane.combine.operation);
}

RuntimeStats CpuBackend::stats() const {
  RuntimeStats stats = stats_;
  stats.timeouts = board_.num_timeouts();
  for (int rank = 0; rank < problem_.num_ranks; ++rank) stats.source_wait_seconds.push_back(board_.wait_seconds(rank));
  return stats;
}

std::unique_ptr<Backend> make_cpu_backend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap) {
  std::vector<Lane> lanes;
  std::shared_ptr<Segment> own;
  succeed_together(bootstrap, [&] {
    row_ops();
    for (int lane = 0; lane < problem.config.max_in_flight; ++lane) lanes.emplace_back(problem, plan);
    own = create_segment(plan.layout.bytes);
  });
  std::vector<Peer> peers = exchange_segments(bootstrap, std::move(own));
  std::unique_ptr<Backend> backend;
  succeed_together(bootstrap,
                   [&] { backend = std::make_unique<CpuBackend>(problem, plan, std::move(lanes), std::move(peers)); });
  return backend;
}

}  // namespace expertwire::cpu
