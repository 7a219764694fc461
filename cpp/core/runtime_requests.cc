// Per-call checks: whatever the host can see of a request is refused here, before anything is sent.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/placement.hpp"
#include "core/runtime_state.hpp"

namespace expertwire {
namespace {

void check_aligned(const char* name, const void* pointer, std::uintptr_t alignment) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0) return;
  refuse(std::string(name) + " is misaligned: its address must be a multiple of " + std::to_string(alignment));
}

void check_present(const char* name, const void* pointer, int num_tokens) {
  if (pointer == nullptr && num_tokens > 0) {
    refuse(std::string(name) + " is null: num_tokens = " + std::to_string(num_tokens) + " needs an array");
  }
}

struct Range {
  const char* name;
  const void* data;
  std::uint64_t bytes;
};

// What an operation writes may not be what it still reads: rows are placed while later ones are read.
void check_apart(std::initializer_list<Range> read, std::initializer_list<Range> written) {
  for (const Range& in : read) {
    for (const Range& out : written) {
      if (in.data == nullptr || out.data == nullptr || in.bytes == 0 || out.bytes == 0) continue;
      const auto first = reinterpret_cast<std::uintptr_t>(in.data), second = reinterpret_cast<std::uintptr_t>(out.data);
      if (first < second + out.bytes && second < first + in.bytes)
        refuse(std::string(in.name) + " overlaps " + out.name +
               ", which this call writes: each needs memory of its own");
    }
  }
}

}  // namespace

void refuse(const std::string& text) { throw Error(ErrorCode::InvalidArgument, text); }

void MoERuntime::Impl::check_num_tokens(int num_tokens) const {
  const int most = problem.config.max_tokens_per_rank;
  if (num_tokens < 0 || num_tokens > most) {
    refuse("num_tokens = " + std::to_string(num_tokens) +
           ": must be between 0 and max_tokens_per_rank = " + std::to_string(most));
  }
}

// Kernels move rows in words of 16 bytes.
std::uintptr_t MoERuntime::Impl::row_alignment(std::uintptr_t element_bytes) const {
  return problem.config.device.type == DeviceType::CPU ? element_bytes : 16;
}

void MoERuntime::Impl::check_stream(const void* stream) const {
  if (stream != nullptr && problem.config.device.type == DeviceType::CPU)
    refuse("stream: the CPU backend has no streams; leave it null");
}

void MoERuntime::Impl::check_overlap(const void* wait_event, int max_num_blocks) const {
  if (wait_event != nullptr && problem.config.device.type == DeviceType::CPU)
    refuse("wait_event: the CPU backend has no events; leave it null");
  if (max_num_blocks < 0) refuse("max_num_blocks = " + std::to_string(max_num_blocks) + ": must be >= 0");
}

void MoERuntime::Impl::check_ready(const ReadySignal& ready) const {
  if (ready.words == nullptr) return;
  if (problem.config.device.type != DeviceType::CPU && !problem.config.block_overlap)
    throw Error(ErrorCode::Unsupported,
                "ready_signal: on CUDA only for a communicator made with block_overlap = true, which loads the kernels "
                "that this needs");
  check_aligned("ready_signal", ready.words, 4);
  if (ready.block_size_m < 1) refuse("block_size_m = " + std::to_string(ready.block_size_m) + ": must be >= 1");
}

void MoERuntime::Impl::check_dispatch(const LatencyDispatchRequest& request) const {
  check_num_tokens(request.num_tokens);
  check_stream(request.stream);
  check_overlap(request.wait_event, request.max_num_blocks);
  if (request.topk_ids_type != IndexType::INT32 && request.topk_ids_type != IndexType::INT64) {
    refuse("topk_ids_type = " + std::to_string(static_cast<int>(request.topk_ids_type)) +
           ": must be one of INT32 INT64");
  }
  const bool fp8 = problem.shape.fp8;
  if (request.block_scales != nullptr && !fp8)
    refuse("block_scales: only a runtime with quant.format = FP8_E4M3 or MXFP8 takes quantised rows");
  check_present("x", request.x, request.num_tokens);
  check_present("topk_ids", request.topk_ids, request.num_tokens);
  check_aligned("x", request.x, row_alignment(request.block_scales != nullptr ? 1 : 2));
  check_aligned("block_scales", request.block_scales, 4);
  check_aligned("topk_ids", request.topk_ids, request.topk_ids_type == IndexType::INT64 ? 8 : 4);
  check_aligned("weights", request.weights, 4);
  check_aligned("output_buffer", request.output_buffer, row_alignment(fp8 ? 1 : 2));
}

void MoERuntime::Impl::check_dispatch_apart(const LatencyDispatchRequest& request) const {
  const RowLayout& row = plan.layout.row;
  const auto tokens = static_cast<std::uint64_t>(request.num_tokens),
             entries = tokens * static_cast<std::uint64_t>(problem.config.num_topk);
  const std::uint64_t element = problem.shape.fp8 && request.block_scales != nullptr ? 1 : 2;
  const LaneBuffers& lane = backend->lane_buffers(next_lane());
  const std::initializer_list<Range> read = {
      {"x", request.x, tokens * static_cast<std::uint64_t>(problem.config.hidden_size) * element},
      {"block_scales", request.block_scales, tokens * row.scale_bytes},
      {"topk_ids", request.topk_ids, entries * (request.topk_ids_type == IndexType::INT64 ? 8 : 4)},
      {"weights", request.weights, entries * 4},
  };
  // The lane's outputs lie one behind the other: tokens, the rest, the combine input.
  const auto* base = static_cast<const std::byte*>(lane.tokens);
  const std::uint64_t token_bytes = plan.outputs.num_rows * row.payload_bytes;
  const Range tokens_out = request.output_buffer != nullptr
                               ? Range{"output_buffer", request.output_buffer, token_bytes}
                               : Range{"the tokens of this lane", lane.tokens, token_bytes};
  const Range facts = {"the scales and counts of this lane", base + plan.outputs.scales,
                       plan.outputs.combine_input - plan.outputs.scales};
  check_apart(read, {tokens_out, facts});
  check_apart({{"output_buffer", request.output_buffer, token_bytes}}, {facts});
}

std::uint64_t MoERuntime::Impl::ready_bytes(const ReadySignal& ready) const {
  if (ready.words == nullptr) return 0;
  const auto group = static_cast<std::uint64_t>(problem.num_ranks) *
                     static_cast<std::uint64_t>(problem.config.max_tokens_per_rank),
             block = static_cast<std::uint64_t>(ready.block_size_m);
  const bool rank_major = problem.config.output_layout == DispatchLayout::RANK_MAJOR;
  return (group + block - 1) / block * 4 * (rank_major ? 1 : static_cast<std::uint64_t>(problem.num_local_experts));
}

void MoERuntime::Impl::require_own_process(const char* operation) const {
  if (process.is_inherited()) {
    refuse(std::string(operation) + ": the communicator was made by process " + std::to_string(pid) +
           ": a forked child makes its own");
  }
}

void MoERuntime::Impl::require_open(const char* operation) const {
  require_own_process(operation);
  if (closed) refuse(std::string(operation) + ": the communicator is closed");
}

void MoERuntime::Impl::require_own(const DispatchHandle& handle) const {
  if (handle.empty()) throw Error(ErrorCode::InvalidHandle, "handle is empty: pass the one that dispatch returned");
  if (handle.runtime_id_ != id) throw Error(ErrorCode::InvalidHandle, "handle belongs to another communicator");
}

void MoERuntime::Impl::require_fresh(const DispatchHandle& handle) const {
  require_own(handle);
  if (lane_of(handle).sequence == handle.sequence_) return;
  throw Error(ErrorCode::InvalidHandle, "handle is stale: of dispatch " + std::to_string(handle.sequence_) +
                                            " in lane " + std::to_string(handle.lane_) + ", which dispatch " +
                                            std::to_string(lane_of(handle).sequence) +
                                            " has used since; max_in_flight = " + std::to_string(lanes.size()));
}

void MoERuntime::Impl::require_two_phase(const char* operation) const {
  if (problem.config.device.type == DeviceType::CPU || problem.config.two_phase) return;
  throw Error(ErrorCode::Unsupported, std::string(operation) +
                                          ": on CUDA only for a communicator made with two_phase = true, which loads "
                                          "the kernels that this needs");
}

// Of what is under way on a lane, a next operation would overwrite the buffers and facts.
void MoERuntime::Impl::require_received(const char* operation, int lane) const {
  const LaneUse& use = lanes[static_cast<std::size_t>(lane)];
  if (!use.dispatch_is_sent && !use.combine_is_sent) return;
  throw Error(
      ErrorCode::InvalidHandle,
      std::string(operation) + ": the " + (use.dispatch_is_sent ? "dispatch " : "combine of dispatch ") +
          std::to_string(use.sequence) + " in lane " + std::to_string(lane) +
          " has been sent and not received: wait for it first; max_in_flight = " + std::to_string(lanes.size()));
}

// The mark of what has been sent for the handle.
bool& MoERuntime::Impl::require_sent(const char* operation, Step step, const DispatchHandle& handle) {
  require_fresh(handle);
  LaneUse& use = lane_of(handle);
  bool& is_sent = step == Step::DISPATCH ? use.dispatch_is_sent : use.combine_is_sent;
  if (is_sent) return is_sent;
  throw Error(ErrorCode::InvalidHandle, std::string(operation) + ": nothing to receive for dispatch " +
                                            std::to_string(handle.sequence_) + " in lane " +
                                            std::to_string(handle.lane_) + ": not sent, or received before");
}

void MoERuntime::Impl::check_combine(const LatencyCombineRequest& request) const {
  const DispatchHandle& handle = request.handle;
  require_fresh(handle);
  check_num_tokens(request.num_tokens);
  if (request.num_tokens != handle.num_tokens_) {
    refuse("num_tokens = " + std::to_string(request.num_tokens) + ": the dispatch of this handle had " +
           std::to_string(handle.num_tokens_));
  }
  check_stream(request.stream);
  check_overlap(request.wait_event, request.max_num_blocks);
  check_ready(request.ready);
  if (request.weights != nullptr && problem.config.output_layout == DispatchLayout::RANK_MAJOR) {
    refuse("weights: RANK_MAJOR rows come to combine already weighted; leave it null");
  }
  check_present("out", request.out, request.num_tokens);
  check_aligned("expert_output", request.expert_output, row_alignment(2));
  check_aligned("weights", request.weights, 4);
  check_aligned("out", request.out, row_alignment(2));
  const auto tokens = static_cast<std::uint64_t>(request.num_tokens);
  const auto hidden_bytes = static_cast<std::uint64_t>(problem.config.hidden_size) * 2;
  check_apart({{"expert_output", request.expert_output, plan.outputs.combine_num_rows * hidden_bytes},
               {"weights", request.weights, tokens * static_cast<std::uint64_t>(problem.config.num_topk) * 4},
               {"ready_signal", request.ready.words, ready_bytes(request.ready)}},
              {{"out", request.out, tokens * hidden_bytes}});
  if (request.expert_output == nullptr && problem.num_local_experts > 0)
    refuse("expert_output is null: pass the rows or combine_input_buffer()");
}

DispatchParams MoERuntime::Impl::prepare_dispatch(const char* operation, const LatencyDispatchRequest& request) const {
  require_open(operation);
  check_dispatch(request);
  check_dispatch_apart(request);
  require_received(operation, next_lane());
  DispatchParams params;
  params.x = request.x;
  params.block_scales = request.block_scales;
  params.topk_ids = request.topk_ids;
  params.weights = request.weights;
  params.num_tokens = request.num_tokens;
  params.topk_ids_are_64_bit = request.topk_ids_type == IndexType::INT64;
  params.tokens = request.output_buffer != nullptr ? request.output_buffer : backend->lane_buffers(next_lane()).tokens;
  params.stream = request.stream;
  params.wait_event = request.wait_event;
  params.max_num_blocks = request.max_num_blocks;
  return params;
}

CombineParams MoERuntime::Impl::prepare_combine(const char* operation, const LatencyCombineRequest& request) const {
  require_open(operation);
  check_combine(request);
  require_received(operation, request.handle.lane_);
  CombineParams params;
  // Null without experts of this rank's. Kernels may load a row before they know that nobody sent it.
  params.expert_output = request.expert_output != nullptr ? request.expert_output
                                                          : backend->lane_buffers(request.handle.lane_).combine_input;
  params.weights = request.weights;
  params.out = request.out;
  params.ready_words = request.ready.words;
  params.ready_block_size = request.ready.block_size_m;
  params.ready_value = request.ready.value;
  params.num_tokens = request.num_tokens;
  params.stream = request.stream;
  params.wait_event = request.wait_event;
  params.max_num_blocks = request.max_num_blocks;
  return params;
}

void MoERuntime::Impl::check_update(const std::vector<int>& placement, void* stream) const {
  check_stream(stream);
  const int num_logical = check_placement(placement, problem.config.num_experts);
  if (num_logical != problem.num_logical_experts) {
    refuse("placement holds " + std::to_string(num_logical) + " logical experts: must hold " +
           std::to_string(problem.num_logical_experts) + ", as at construction");
  }
  backend->check_update(stream);
}

}  // namespace expertwire
