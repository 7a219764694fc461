// The contract between core and a backend, on one screen. A backend moves rows; validation of configurations, handles,
// lanes and the order of operations are core's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/types.hpp"
#include "shared/layout.cuh"
#include "shared/params.cuh"

namespace expertwire {

// A configuration that has been validated, with every default resolved, seen from one rank.
struct Problem {
  RuntimeConfig config;  // experts_per_rank is filled in
  int rank = 0;
  int num_ranks = 0;
  int first_local_expert = 0;
  int num_local_experts = 0;
  int num_logical_experts = 0;           // ids that tokens may choose: E without a placement
  std::vector<i32> physical_of_logical;  // with a placement: where this rank sends them, [num_logical_experts]
  Shape shape;
  std::string id_bound() const;  // for errors: what ids must be below
};

// What matters of the machine for a plan.
struct Machine {
  int num_cores = 1;                  // that this process may run on
  std::string cpu_isa;                // instruction set chosen for rows
  std::vector<std::string> cpu_isas;  // those that could be chosen
};
Machine this_machine();

// What will be done for a problem on a machine: a pure function of both (core/plan.hpp).
struct Plan {
  SegmentLayout layout;
  OutputLayout outputs;
  RouteLayout routes;
  MemoryBytes memory;
  std::string cpu_isa;
  int spin_iterations = 0;  // CPU: polls of a word before sleeping; few when ranks outnumber cores
  std::string to_string() const;
};

enum class Step { DISPATCH, COMBINE };

// All members but close() and the accessors are collective over ranks and throw Error. After a peer was lost under
// PeerLossPolicy::RAISE, dispatch and combine throw PeerLost.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const LaneBuffers& lane_buffers(int lane) const = 0;
  virtual void dispatch(int lane, const DispatchParams& params) = 0;
  virtual void combine(int lane, const CombineParams& params) = 0;
  // The same in two phases: after `send` its inputs may change, and `receive` writes its outputs. Core sees to it that they
  // alternate, and that a lane's dispatch and combine do not overlap.
  virtual void send(int lane, const DispatchParams& params) = 0;
  virtual void send(int lane, const CombineParams& params) = 0;
  // Throws Backend if it has not begun.
  virtual void receive(Step step, int lane, void* stream) = 0;
  // Throws InvalidArgument for a stream that `receive` cannot take now, before anything is received.
  virtual void check_stream(void*) {}
  // Before `receive`: whether it would wait for nobody, if that can be told. After it: whether the outputs are there.
  virtual bool has_arrived(Step step, int lane) = 0;
  virtual RuntimeStats stats() const = 0;
  virtual std::vector<int> lost_ranks() const = 0;
  virtual bool is_available() const noexcept = 0;
  virtual void check() = 0;
  // Concerns this rank alone, as the next: throws what would keep update_placement from being done.
  virtual void check_update(void* stream) = 0;
  // For dispatches after it in the order of the stream. Only called if the problem has a placement.
  virtual void update_placement(std::vector<i32> physical_of_logical, void* stream) = 0;
  virtual void close() noexcept = 0;
};

// Collective: returns on every rank or throws on every rank. The only place that knows the backends by name.
std::unique_ptr<Backend> make_backend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap);

// What a CUDA kernel takes of a thread.
struct KernelResources {
  int registers = 0;
  int stack_bytes = 0;
  int spill_bytes = 0;  // stored and loaded
};

struct KernelImage {
  std::string cubin;
  std::string log;                                   // the compiler's
  std::map<std::string, KernelResources> resources;  // by kernel
  bool from_cache = false;
  bool is_kept = false;  // in the cache, for the next that asks
};

// Compiles a CUDA source, which may include the kernel headers, for an architecture such as "sm_90a", or takes the result
// from the cache. Needs neither GPU nor driver.
KernelImage compile_cuda_source(const std::string& source, const std::string& architecture);
// The same for all kernels that a communicator of this problem loads on a GPU of this architecture, such as "sm_90", of
// which it has `num_sms` to itself; 0: on any.
std::vector<KernelImage> precompile_cuda_kernels(const Problem& problem, const std::string& architecture, int num_sms);
// Folders to look for the CUDA compiler library in, after the places that need no telling.
void set_nvrtc_search_path(const std::vector<std::string>& folders);
// Ranges for a profiler: "off", "on", or why there are none although EXPERTWIRE_NVTX is 1.
std::string nvtx_state();
// Whether a CUDA stream is being captured into a graph; false without a driver.
bool is_stream_capturing(void* stream);
// Why this machine cannot run the CUDA backend, and what to do; nullopt if it can.
std::optional<std::string> cuda_why_unusable();

}  // namespace expertwire
