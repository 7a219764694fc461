// MoERuntime with its requests and handles. Arrays arrive as addresses; waiting happens without the GIL.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "core/plan.hpp"
#include "expertwire/moe_runtime.hpp"
#include "released_gil.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

// A runtime serves one thread at a time. Python makes it easy to break that by accident, so it is checked here.
class GuardedRuntime {
 public:
  GuardedRuntime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config)
      : runtime_(std::in_place, std::move(bootstrap), config) {}
  // Waits for its own work on the device, as its memory's release may: other threads' ranks must be able to go on.
  ~GuardedRuntime() {
    const ReleasedGil released;
    runtime_.reset();
  }
  GuardedRuntime(const GuardedRuntime&) = delete;
  GuardedRuntime& operator=(const GuardedRuntime&) = delete;

  // Runs function(runtime), refusing a second thread meanwhile.
  template <typename Function>
  auto enter(Function&& function) {
    if (busy_.test_and_set(std::memory_order_acquire)) refuse_second_thread();
    const Leave leave{busy_};
    return function(*runtime_);
  }

  // Accessors that are const and noexcept in MoERuntime and need no guard.
  const MoERuntime& facts() const { return *runtime_; }

 private:
  struct Leave {
    std::atomic_flag& busy;
    ~Leave() { busy.clear(std::memory_order_release); }
  };

  [[noreturn]] static void refuse_second_thread() {
    const nb::object type = nb::module_::import_("expertwire.errors").attr("Error");
    PyErr_SetString(type.ptr(), "another thread is inside this communicator: use it from one thread at a time");
    throw nb::python_error();
  }

  std::optional<MoERuntime> runtime_;
  std::atomic_flag busy_;
};

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

const void* lane_field(const LaneBuffers& lane, const std::string& field) {
  if (field == "tokens") return lane.tokens;
  if (field == "scales") return lane.scales;
  if (field == "num_tokens_per_expert") return lane.num_tokens_per_expert;
  if (field == "num_tokens_per_rank") return lane.num_tokens_per_rank;
  if (field == "rank_ranges") return lane.rank_ranges;
  if (field == "source_token") return lane.source_token;
  if (field == "topk_ids") return lane.topk_ids;
  if (field == "weights") return lane.weights;
  if (field == "combine_input") return lane.combine_input;
  if (field == "source_wait_ns") return lane.source_wait_ns;
  throw Error(ErrorCode::InvalidArgument, "field = \"" + field + "\": not a member of LaneBuffers");
}

std::uintptr_t lane_address(const GuardedRuntime& self, int lane, const std::string& field) {
  return reinterpret_cast<std::uintptr_t>(lane_field(self.facts().lane_buffers(lane), field));
}

// The bytes of one lane buffer. The array holds the runtime, so that the memory outlives every view of it.
Bytes lane_bytes(nb::pointer_and_handle<GuardedRuntime> self, int lane, const std::string& field,
                 std::size_t num_bytes) {
  const MoERuntime& runtime = self.p->facts();
  if (runtime.config().device.type != DeviceType::CPU)
    throw Error(ErrorCode::InvalidArgument, "lane_bytes: lane buffers of a GPU are not for NumPy; use lane_address");
  const void* address = lane_field(runtime.lane_buffers(lane), field);
  if (address == nullptr && num_bytes > 0) {
    throw Error(ErrorCode::InvalidArgument, "field = \"" + field + "\": unused with this configuration");
  }
  return Bytes(const_cast<void*>(address), {num_bytes}, self.h);
}

template <typename Request, typename Address>
void add_address(nb::class_<Request>& cls, const char* name, Address Request::* member) {
  cls.def_prop_rw(
      name, [member](const Request& request) { return reinterpret_cast<std::uintptr_t>(request.*member); },
      [member](Request& request, std::uintptr_t address) { request.*member = reinterpret_cast<Address>(address); });
}

void bind_requests(nb::module_& m) {
  nb::class_<DispatchHandle>(m, "DispatchHandle", "Names one dispatch of one communicator; combine takes it.")
      .def_prop_ro("lane", &DispatchHandle::lane)
      .def_prop_ro("num_tokens", &DispatchHandle::num_tokens)
      .def("__repr__", [](const DispatchHandle& handle) {
        return "DispatchHandle(lane=" + std::to_string(handle.lane()) +
               ", num_tokens=" + std::to_string(handle.num_tokens()) + ")";
      });

  nb::class_<LatencyDispatchRequest> dispatch(m, "LatencyDispatchRequest", "Inputs of one dispatch, as addresses.");
  dispatch.def(nb::init<>())
      .def_rw("topk_ids_type", &LatencyDispatchRequest::topk_ids_type)
      .def_rw("num_tokens", &LatencyDispatchRequest::num_tokens);
  add_address(dispatch, "x", &LatencyDispatchRequest::x);
  add_address(dispatch, "block_scales", &LatencyDispatchRequest::block_scales);
  add_address(dispatch, "topk_ids", &LatencyDispatchRequest::topk_ids);
  add_address(dispatch, "weights", &LatencyDispatchRequest::weights);
  add_address(dispatch, "output_buffer", &LatencyDispatchRequest::output_buffer);
  add_address(dispatch, "stream", &LatencyDispatchRequest::stream);
  add_address(dispatch, "wait_event", &LatencyDispatchRequest::wait_event);
  dispatch.def_rw("max_num_blocks", &LatencyDispatchRequest::max_num_blocks);

  nb::class_<LatencyCombineRequest> combine(m, "LatencyCombineRequest",
                                            "Inputs and output of one combine, as addresses.");
  combine.def(nb::init<>())
      .def_rw("handle", &LatencyCombineRequest::handle)
      .def_rw("num_tokens", &LatencyCombineRequest::num_tokens);
  add_address(combine, "expert_output", &LatencyCombineRequest::expert_output);
  add_address(combine, "weights", &LatencyCombineRequest::weights);
  add_address(combine, "out", &LatencyCombineRequest::out);
  add_address(combine, "stream", &LatencyCombineRequest::stream);
  add_address(combine, "wait_event", &LatencyCombineRequest::wait_event);
  combine.def_rw("max_num_blocks", &LatencyCombineRequest::max_num_blocks);
  combine.def(
      "set_ready",
      [](LatencyCombineRequest& request, std::uintptr_t words, int block_size_m, std::int32_t value) {
        request.ready = ReadySignal{reinterpret_cast<const std::int32_t*>(words), block_size_m, value};
      },
      nb::arg("words"), nb::arg("block_size_m"), nb::arg("value"));
}

void bind_accounts(nb::module_& m) {
  nb::class_<MemoryBytes>(m, "MemoryBytes")
      .def_ro("shared", &MemoryBytes::shared)
      .def_ro("outputs", &MemoryBytes::outputs)
      .def_ro("private", &MemoryBytes::private_);
  nb::class_<RuntimeStats>(m, "RuntimeStats")
      .def_ro("dispatch_calls", &RuntimeStats::dispatch_calls)
      .def_ro("combine_calls", &RuntimeStats::combine_calls)
      .def_ro("bytes_sent", &RuntimeStats::bytes_sent)
      .def_ro("bytes_received", &RuntimeStats::bytes_received)
      .def_ro("timeouts", &RuntimeStats::timeouts)
      .def_ro("expert_tokens", &RuntimeStats::expert_tokens)
      .def_ro("source_wait_seconds", &RuntimeStats::source_wait_seconds);
}

void bind_machine(nb::module_& m) {
  nb::class_<Machine>(m, "Machine", "What a plan depends on besides the problem.")
      .def_ro("num_cores", &Machine::num_cores)
      .def_ro("cpu_isa", &Machine::cpu_isa)
      .def_ro("cpu_isas", &Machine::cpu_isas);
  m.def("this_machine", &this_machine, "Describes the machine this process runs on.");
  m.def("cpu_isa", [] { return this_machine().cpu_isa; }, "The instruction set in use: plain, avx2, avx512 or neon.");
  m.def("cpu_isas", [] { return this_machine().cpu_isas; }, "Every instruction set this build and processor can run.");
}

GuardedRuntime* make_runtime(std::shared_ptr<Bootstrap> bootstrap, const RuntimeConfig& config) {
  const ReleasedGil released;
  return new GuardedRuntime(std::move(bootstrap), config);
}

DispatchHandle dispatch(GuardedRuntime& self, const LatencyDispatchRequest& request) {
  return self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    return runtime.dispatch(request);
  });
}

void combine(GuardedRuntime& self, const LatencyCombineRequest& request) {
  self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    runtime.combine(request);
  });
}

void update_placement(GuardedRuntime& self, const std::vector<int>& placement, std::uintptr_t stream, bool collective) {
  self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    runtime.update_placement(placement, reinterpret_cast<void*>(stream), collective);
  });
}

DispatchHandle dispatch_send(GuardedRuntime& self, const LatencyDispatchRequest& request) {
  return self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    return runtime.dispatch_send(request);
  });
}

void combine_send(GuardedRuntime& self, const LatencyCombineRequest& request) {
  self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    runtime.combine_send(request);
  });
}

void dispatch_receive(GuardedRuntime& self, const DispatchHandle& handle, std::uintptr_t stream) {
  self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    runtime.dispatch_receive(handle, reinterpret_cast<void*>(stream));
  });
}

void combine_receive(GuardedRuntime& self, const DispatchHandle& handle, std::uintptr_t stream) {
  self.enter([&](MoERuntime& runtime) {
    const ReleasedGil released;
    runtime.combine_receive(handle, reinterpret_cast<void*>(stream));
  });
}

bool dispatch_done(GuardedRuntime& self, const DispatchHandle& handle) {
  return self.enter([&](MoERuntime& runtime) { return runtime.dispatch_done(handle); });
}

bool combine_done(GuardedRuntime& self, const DispatchHandle& handle) {
  return self.enter([&](MoERuntime& runtime) { return runtime.combine_done(handle); });
}

}  // namespace

void bind_runtime(nb::module_& m) {
  bind_requests(m);
  bind_accounts(m);
  bind_machine(m);
  nb::class_<GuardedRuntime>(m, "MoERuntime", "One rank's end of a group.")
      .def(nb::new_(&make_runtime), nb::arg("bootstrap"), nb::arg("config"))
      .def("dispatch", &dispatch, nb::arg("request"))
      .def("combine", &combine, nb::arg("request"))
      .def("update_placement", &update_placement, nb::arg("placement"), nb::arg("stream"), nb::arg("collective"))
      .def("dispatch_send", &dispatch_send, nb::arg("request"))
      .def("dispatch_receive", &dispatch_receive, nb::arg("handle"), nb::arg("stream") = 0)
      .def("dispatch_done", &dispatch_done, nb::arg("handle"))
      .def("combine_send", &combine_send, nb::arg("request"))
      .def("combine_receive", &combine_receive, nb::arg("handle"), nb::arg("stream") = 0)
      .def("combine_done", &combine_done, nb::arg("handle"))
      .def_prop_ro("rank", [](const GuardedRuntime& self) { return self.facts().rank(); })
      .def_prop_ro("num_ranks", [](const GuardedRuntime& self) { return self.facts().num_ranks(); })
      .def_prop_ro("num_local_experts", [](const GuardedRuntime& self) { return self.facts().num_local_experts(); })
      .def_prop_ro("first_local_expert", [](const GuardedRuntime& self) { return self.facts().first_local_expert(); })
      .def_prop_ro("config", [](const GuardedRuntime& self) { return self.facts().config(); })
      .def_prop_ro("is_available", [](const GuardedRuntime& self) { return self.facts().is_available(); })
      .def_prop_ro("next_lane", [](const GuardedRuntime& self) { return self.facts().next_lane(); })
      .def("lane_bytes", &lane_bytes, nb::arg("lane"), nb::arg("field"), nb::arg("num_bytes"),
           nb::sig("def lane_bytes(self, lane: int, field: str, num_bytes: int) -> numpy.typing.NDArray[numpy.uint8]"),
           "The bytes of one lane buffer on the CPU, as an array that keeps the runtime alive.")
      .def("lane_address", &lane_address, nb::arg("lane"), nb::arg("field"),
           "Where a lane buffer lies, in the memory of the runtime's device; 0 if the configuration has none.")
      .def("memory_bytes", [](const GuardedRuntime& self) { return self.facts().memory_bytes(); })
      .def("stats",
           [](GuardedRuntime& self) {
             return self.enter([](MoERuntime& runtime) {
               const ReleasedGil released;
               return runtime.stats();
             });
           })
      .def("lost_ranks",
           [](GuardedRuntime& self) { return self.enter([](MoERuntime& runtime) { return runtime.lost_ranks(); }); })
      .def("check", [](GuardedRuntime& self) { self.enter([](MoERuntime& runtime) { runtime.check(); }); })
      .def("close", [](GuardedRuntime& self) { self.enter([](MoERuntime& runtime) { runtime.close(); }); });
}

}  // namespace expertwire::bindings
