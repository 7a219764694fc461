// What MoERuntime knows between its calls. runtime_requests.cc checks requests against it, runtime.cc does the operations.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "base/own_process.hpp"
#include "expertwire/moe_runtime.hpp"

namespace expertwire {

[[noreturn]] void refuse(const std::string& text);

// What a lane is in use for.
struct LaneUse {
  std::uint64_t sequence = 0;  // the dispatch whose output it holds
  bool dispatch_gave_weights = false;
  bool dispatch_is_sent = false, combine_is_sent = false;  // and not received
  bool has_combine = false;                                // of that dispatch
};

struct MoERuntime::Impl {
  std::uint64_t id;  // of the process's runtimes, from 1
  OwnProcess process;
  pid_t pid;  // of that process
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

  void require_own_process(const char* operation) const;
  void require_open(const char* operation) const;
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
  std::uintptr_t row_alignment(std::uintptr_t element_bytes) const;
  void check_stream(const void* stream) const;
  void check_overlap(const void* wait_event, int max_num_blocks) const;
  void check_ready(const ReadySignal& ready) const;
  std::uint64_t ready_bytes(const ReadySignal& ready) const;
  void check_update(const std::vector<int>& placement, void* stream) const;
};

}  // namespace expertwire
