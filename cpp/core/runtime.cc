// Order of operations: lanes, handles, per-call checks. Rows are the backend's.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <optional>
#include <utility>

#include "base/env.hpp"
#include "core/config.hpp"
#include "core/placement.hpp"
#include "core/plan.hpp"
#include "expertwire/moe_runtime.hpp"

namespace expertwire {
namespace {

std::uint64_t next_runtime_id() {
  static std::atomic<std::uint64_t> counter{0};
  return ++counter;
}

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::InvalidArgument, text); }

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
        refuse(std::string(in.name) + " overlaps " + out.name + ", which this call writes");
    }
  }
}

}  // namespace

// What a lane is in use for.
struct LaneUse {
  std::uint64_t sequence = 0;  // the dispatch whose output it holds
  bool dispatch_gave_weights = false;
  bool dispatch_is_sent = false, combine_is_sent = false;  // and not received
};

struct MoERuntime::Impl {
  std::uint64_t id = next_runtime_id();
  Problem problem;
  Plan plan;
  std::unique_ptr<Backend> backend;
  std::shared_ptr<Bootstrap> bootstrap;  // with a placement: for its updates
  std::vector<LaneUse> lanes;
  std::uint64_t num_dispatches = 0;
  bool closed = false;

  int next_lane() const { return static_cast<int>(num_dispatches % lanes.size()); }
  LaneUse& lane_of(const DispatchHandle& handle) { return lanes[static_cast<std::size_t>(handle.lane_)]; }
  const LaneUse& lane_of(const DispatchHandle& handle) const { return lanes[static_cast<std::size_t>(handle.lane_)]; }

  void require_open(const char* operation) const {
    if (closed) refuse(std::string(operation) + ": the communicator is closed");
  }
  void require_two_phase(const char* operation) const;
  void require_received(const char* operation, int lane) const;
  void require_own(const DispatchHandle& handle) const;
  void require_fresh(const DispatchHandle& handle) const;
  bool& require_sent(const char* operation, Step step, const DispatchHandle& handle);
  DispatchParams prepare_dispatch(const char* operation, const LatencyDispatchRequest& request) const;
  CombineParams prepare_combine(const char* operation, const LatencyCombineRequest& request) const;
  DispatchHandle take_lane(const LatencyDispatchRequest& request);
  void receive(const char* operation, Step step, const DispatchHandle& handle, void* stream);
  void check_dispatch(const LatencyDispatchRequest& request) const;
  void check_combine(const LatencyCombineRequest& request) const;
  void check_dispatch_apart(const LatencyDispatchRequest& request) const;
  void check_num_tokens(int num_tokens) const;
  void check_stream(const void* stream) const;
  void check_update(const std::vector<int>& placement, void* stream) const;
};

void MoERuntime::Impl::check_num_tokens(int num_tokens) const {
  const int most = problem.config.max_tokens_per_rank;
  if (num_tokens < 0 || num_tokens > most) {
    refuse("num_tokens = " + std::to_string(num_tokens) +
           ": must be between 0 and max_tokens_per_rank = " + std::to_string(most));
  }
}

void MoERuntime::Impl::check_stream(const void* stream) const {
  if (stream != nullptr && problem.config.device.type == DeviceType::CPU)
    refuse("stream: the CPU backend has no streams; leave it null");
}

void MoERuntime::Impl::check_dispatch(const LatencyDispatchRequest& request) const {
  check_num_tokens(request.num_tokens);
  check_stream(request.stream);
  if (request.topk_ids_type != IndexType::INT32 && request.topk_ids_type != IndexType::INT64) {
    refuse("topk_ids_type = " + std::to_string(static_cast<int>(request.topk_ids_type)) +
           ": must be one of INT32 INT64");
  }
  const bool fp8 = problem.shape.fp8;
  if (request.block_scales != nullptr && !fp8)
    refuse("block_scales: only a runtime with quant.format = FP8_E4M3 or MXFP8 takes quantised rows");
  check_present("x", request.x, request.num_tokens);
  check_present("topk_ids", request.topk_ids, request.num_tokens);
  check_aligned("x", request.x, request.block_scales != nullptr ? 1 : 2);
  check_aligned("block_scales", request.block_scales, 4);
  check_aligned("topk_ids", request.topk_ids, request.topk_ids_type == IndexType::INT64 ? 8 : 4);
  check_aligned("weights", request.weights, 4);
  check_aligned("output_buffer", request.output_buffer, fp8 ? 1 : 2);
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
  const void* tokens_out = request.output_buffer != nullptr ? request.output_buffer : lane.tokens;
  check_apart(read, {{"the tokens of this dispatch", tokens_out, plan.outputs.num_rows * row.payload_bytes},
                     {"the scales and counts of this lane", base + plan.outputs.scales,
                      plan.outputs.combine_input - plan.outputs.scales}});
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
  if (request.weights != nullptr && problem.config.output_layout == DispatchLayout::RANK_MAJOR) {
    refuse("weights: RANK_MAJOR rows come to combine already weighted; leave it null");
  }
  check_present("out", request.out, request.num_tokens);
  check_aligned("expert_output", request.expert_output, 2);
  check_aligned("weights", request.weights, 4);
  check_aligned("out", request.out, 2);
  const auto tokens = static_cast<std::uint64_t>(request.num_tokens);
  const auto hidden_bytes = static_cast<std::uint64_t>(problem.config.hidden_size) * 2;
  check_apart({{"expert_output", request.expert_output, plan.outputs.combine_num_rows * hidden_bytes},
               {"weights", request.weights, tokens * static_cast<std::uint64_t>(problem.config.num_topk) * 4}},
              {{"out", request.out, tokens * hidden_bytes}});
  if (request.expert_output == nullptr && problem.num_local_experts > 0)
    refuse("expert_output is null: pass the rows or combine_input_buffer()");
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

MoERuntime::MoERuntime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config) {
  if (bootstrap == nullptr) refuse("bootstrap is null");
  std::optional<Error> failure;  // what ended this rank's part: the others are told before it is thrown
  std::string description;
  try {
    description = describe(config);
    impl_ = std::make_unique<Impl>();
    impl_->problem = make_problem(config, bootstrap->rank(), bootstrap->size());
    impl_->plan = plan(impl_->problem, this_machine());
    impl_->lanes.resize(static_cast<std::size_t>(config.max_in_flight));
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {  // no memory
    failure = Error(ErrorCode::Backend, error.what());
  }
  agree_on_config(*bootstrap, description, failure);
  if (failure) throw *failure;
  if (env().log == "info")
    std::fprintf(stderr, "expertwire rank %d: %s\n", bootstrap->rank(), impl_->plan.to_string().c_str());
  impl_->backend = make_backend(impl_->problem, impl_->plan, *bootstrap);
  if (!config.placement.empty()) impl_->bootstrap = std::move(bootstrap);
}

MoERuntime::~MoERuntime() { close(); }

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
  return params;
}

// After its rows have been sent: from here on the lane's older handle is stale.
DispatchHandle MoERuntime::Impl::take_lane(const LatencyDispatchRequest& request) {
  DispatchHandle handle;
  handle.runtime_id_ = id;
  handle.lane_ = next_lane();
  handle.sequence_ = ++num_dispatches;
  handle.num_tokens_ = request.num_tokens;
  lane_of(handle) = LaneUse{handle.sequence_, request.weights != nullptr, false, false};
  return handle;
}

CombineParams MoERuntime::Impl::prepare_combine(const char* operation, const LatencyCombineRequest& request) const {
  require_open(operation);
  check_combine(request);
  require_received(operation, request.handle.lane_);
  CombineParams params;
  params.expert_output = request.expert_output;
  params.weights = request.weights;
  params.out = request.out;
  params.num_tokens = request.num_tokens;
  params.stream = request.stream;
  return params;
}

void MoERuntime::Impl::receive(const char* operation, Step step, const DispatchHandle& handle, void* stream) {
  require_open(operation);
  bool& is_sent = require_sent(operation, step, handle);
  check_stream(stream);
  is_sent = false;  // however it ends, it is over
  backend->receive(step, handle.lane_, stream);
}

DispatchHandle MoERuntime::dispatch(const LatencyDispatchRequest& request) {
  impl_->backend->dispatch(impl_->next_lane(), impl_->prepare_dispatch("dispatch", request));
  return impl_->take_lane(request);
}

void MoERuntime::combine(const LatencyCombineRequest& request) {
  impl_->backend->combine(request.handle.lane_, impl_->prepare_combine("combine", request));
}

DispatchHandle MoERuntime::dispatch_send(const LatencyDispatchRequest& request) {
  impl_->require_two_phase("dispatch_send");
  impl_->backend->send(impl_->next_lane(), impl_->prepare_dispatch("dispatch_send", request));
  const DispatchHandle handle = impl_->take_lane(request);
  impl_->lane_of(handle).dispatch_is_sent = true;
  return handle;
}

void MoERuntime::dispatch_receive(const DispatchHandle& handle, void* stream) {
  impl_->receive("dispatch_receive", Step::DISPATCH, handle, stream);
}

void MoERuntime::combine_send(const LatencyCombineRequest& request) {
  impl_->require_two_phase("combine_send");
  const CombineParams params = impl_->prepare_combine("combine_send", request);
  LaneUse& use = impl_->lane_of(request.handle);
  const Shape& shape = impl_->problem.shape;
  if (params.weights != nullptr && use.dispatch_gave_weights && !shape.direct_send) {
    throw Error(ErrorCode::Unsupported,
                "weights: in two phases RANK_LOCAL_REDUCE takes none in place of those given to dispatch; give them to "
                "one of the two only, or combine in one phase, or with DIRECT_SEND");
  }
  impl_->backend->send(request.handle.lane_, params);
  use.combine_is_sent = true;
}

void MoERuntime::combine_receive(const DispatchHandle& handle, void* stream) {
  impl_->receive("combine_receive", Step::COMBINE, handle, stream);
}

bool MoERuntime::dispatch_done(const DispatchHandle& handle) {
  impl_->require_own(handle);
  return impl_->backend->has_arrived(Step::DISPATCH, handle.lane());
}

bool MoERuntime::combine_done(const DispatchHandle& handle) {
  impl_->require_own(handle);
  return impl_->backend->has_arrived(Step::COMBINE, handle.lane());
}

DispatchHandle MoERuntime::dispatch(const ThroughputDispatchRequest&) {
  throw Error(ErrorCode::Unsupported, "ThroughputDispatchRequest: this version implements LATENCY mode only");
}

void MoERuntime::combine(const ThroughputCombineRequest&) {
  throw Error(ErrorCode::Unsupported, "ThroughputCombineRequest: this version implements LATENCY mode only");
}

void MoERuntime::update_placement(const std::vector<int>& placement, void* stream, bool collective) {
  impl_->require_open("update_placement");
  if (impl_->bootstrap == nullptr) refuse("update_placement: only a communicator constructed with a placement has one");
  std::optional<Error> failure;
  try {
    impl_->check_update(placement, stream);
  } catch (const Error& error) {
    failure = error;
  }
  if (collective) agree_on_placement(*impl_->bootstrap, placement, failure);
  if (failure) throw *failure;
  Problem& problem = impl_->problem;
  impl_->backend->update_placement(physical_experts(placement, problem.config.experts_per_rank, problem.rank), stream);
  problem.config.placement = placement;
}

int MoERuntime::rank() const noexcept { return impl_->problem.rank; }
int MoERuntime::num_ranks() const noexcept { return impl_->problem.num_ranks; }
int MoERuntime::num_local_experts() const noexcept { return impl_->problem.num_local_experts; }
int MoERuntime::first_local_expert() const noexcept { return impl_->problem.first_local_expert; }
MoEMode MoERuntime::mode() const noexcept { return impl_->problem.config.mode; }
const RuntimeConfig& MoERuntime::config() const noexcept { return impl_->problem.config; }
bool MoERuntime::is_available() const noexcept { return !impl_->closed && impl_->backend->is_available(); }
int MoERuntime::next_lane() const noexcept { return impl_->next_lane(); }

const LaneBuffers& MoERuntime::lane_buffers(int lane) const {
  if (lane < 0 || lane >= impl_->problem.config.max_in_flight) {
    refuse("lane = " + std::to_string(lane) +
           ": must be between 0 and max_in_flight - 1 = " + std::to_string(impl_->problem.config.max_in_flight - 1));
  }
  return impl_->backend->lane_buffers(lane);
}

void* MoERuntime::dispatch_output_buffer() const { return impl_->backend->lane_buffers(impl_->next_lane()).tokens; }

void* MoERuntime::combine_input_buffer() const {
  const std::uint64_t last = impl_->num_dispatches == 0 ? 0 : impl_->num_dispatches - 1;
  return impl_->backend->lane_buffers(static_cast<int>(last % impl_->lanes.size())).combine_input;
}

RuntimeStats MoERuntime::stats() const { return impl_->backend->stats(); }
MemoryBytes MoERuntime::memory_bytes() const noexcept { return impl_->plan.memory; }
std::vector<int> MoERuntime::lost_ranks() const { return impl_->backend->lost_ranks(); }

void MoERuntime::check() {
  impl_->require_open("check");
  impl_->backend->check();
}

void MoERuntime::close() noexcept {
  if (impl_->closed || impl_->backend == nullptr) return;
  impl_->closed = true;
  impl_->backend->close();
}

}  // namespace expertwire
