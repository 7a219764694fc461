// Order of operations: lanes and handles. Rows are the backend's.
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <utility>

#include "base/env.hpp"
#include "core/config.hpp"
#include "core/placement.hpp"
#include "core/plan.hpp"
#include "core/runtime_state.hpp"
#include "expertwire/moe_runtime.hpp"

namespace expertwire {
namespace {

std::uint64_t next_runtime_id() {
  static std::atomic<std::uint64_t> counter{0};
  return ++counter;
}

}  // namespace

MoERuntime::MoERuntime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config) {
  if (bootstrap == nullptr) refuse("bootstrap is null");
  std::optional<Error> failure;  // what ended this rank's part: the others are told before it is thrown
  std::string description;
  try {
    description = describe(config, bootstrap->size());
    impl_ = std::make_unique<Impl>();
    impl_->id = next_runtime_id();
    impl_->pid = ::getpid();
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
  if (env().log == "info" && config.device.type == DeviceType::CPU)
    std::fprintf(stderr, "expertwire rank %d: %s\n", bootstrap->rank(), impl_->plan.to_string().c_str());
  impl_->backend = make_backend(impl_->problem, impl_->plan, *bootstrap);
  if (!config.placement.empty()) impl_->bootstrap = std::move(bootstrap);
}

MoERuntime::~MoERuntime() { close(); }

// After its rows have been sent: from here on the lane's older handle is stale.
DispatchHandle MoERuntime::Impl::take_lane(const LatencyDispatchRequest& request) {
  DispatchHandle handle;
  handle.runtime_id_ = id;
  handle.lane_ = next_lane();
  handle.sequence_ = ++num_dispatches;
  handle.num_tokens_ = request.num_tokens;
  lane_of(handle) = LaneUse{handle.sequence_, request.weights != nullptr};
  return handle;
}

void MoERuntime::Impl::receive(const char* operation, Step step, const DispatchHandle& handle, void* stream) {
  require_open(operation);
  bool& is_sent = require_sent(operation, step, handle);
  check_stream(stream);
  backend->check_stream(stream);
  is_sent = false;  // it is over however it ends, unless the driver does not let it begin
  try {
    backend->receive(step, handle.lane_, stream);
  } catch (const Error& error) {
    is_sent = error.code() == ErrorCode::Backend;
    throw;
  }
}

DispatchHandle MoERuntime::dispatch(const LatencyDispatchRequest& request) {
  impl_->backend->dispatch(impl_->next_lane(), impl_->prepare_dispatch("dispatch", request));
  return impl_->take_lane(request);
}

void MoERuntime::combine(const LatencyCombineRequest& request) {
  impl_->backend->combine(request.handle.lane_, impl_->prepare_combine("combine", request));
  impl_->lane_of(request.handle).has_combine = true;
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
  use.combine_is_sent = use.has_combine = true;
}

void MoERuntime::combine_receive(const DispatchHandle& handle, void* stream) {
  impl_->receive("combine_receive", Step::COMBINE, handle, stream);
}

bool MoERuntime::dispatch_done(const DispatchHandle& handle) {
  impl_->require_own_process("dispatch_done");
  impl_->require_own(handle);
  return impl_->backend->has_arrived(Step::DISPATCH, handle.lane());
}

bool MoERuntime::combine_done(const DispatchHandle& handle) {
  impl_->require_own_process("combine_done");
  impl_->require_own(handle);
  const LaneUse& use = impl_->lane_of(handle);
  if (use.sequence == handle.sequence_ && !use.has_combine) return false;
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
  Problem& problem = impl_->problem;
  std::vector<i32> physical_of_logical;
  std::vector<int> taken;
  std::optional<Error> failure;
  try {
    impl_->check_update(placement, stream);
    physical_of_logical = physical_experts(placement, problem.config.experts_per_rank, problem.rank);
    taken = placement;
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure = Error(ErrorCode::Backend, error.what());
  }
  if (collective) agree_on_placement(*impl_->bootstrap, placement, failure);
  if (failure) throw *failure;
  impl_->backend->update_placement(std::move(physical_of_logical), stream);
  problem.config.placement = std::move(taken);
}

int MoERuntime::rank() const noexcept { return impl_->problem.rank; }
int MoERuntime::num_ranks() const noexcept { return impl_->problem.num_ranks; }
int MoERuntime::num_local_experts() const noexcept { return impl_->problem.num_local_experts; }
int MoERuntime::first_local_expert() const noexcept { return impl_->problem.first_local_expert; }
MoEMode MoERuntime::mode() const noexcept { return impl_->problem.config.mode; }
const RuntimeConfig& MoERuntime::config() const noexcept { return impl_->problem.config; }
bool MoERuntime::is_available() const noexcept {
  return !impl_->closed && !impl_->process.is_inherited() && impl_->backend->is_available();
}
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

RuntimeStats MoERuntime::stats() const {
  impl_->require_own_process("stats");
  return impl_->backend->stats();
}
MemoryBytes MoERuntime::memory_bytes() const noexcept { return impl_->plan.memory; }

std::vector<int> MoERuntime::lost_ranks() const {
  impl_->require_own_process("lost_ranks");
  return impl_->backend->lost_ranks();
}

void MoERuntime::check() {
  impl_->require_open("check");
  impl_->backend->check();
}

void MoERuntime::close() noexcept {
  if (impl_->closed || impl_->backend == nullptr) return;
  impl_->closed = true;
  if (!impl_->process.is_inherited()) impl_->backend->close();
}

}  // namespace expertwire
