#include "backend/cuda/cuda_backend.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/jit.hpp"
#include "base/collective.hpp"
#include "base/env.hpp"
#include "expertwire/error.hpp"
#include "shared/inbox.cuh"

namespace expertwire::cuda {
namespace {

int attribute(CUdevice_attribute which, int device) {
  int value = 0;
  cuda::check(driver().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

DeviceFacts describe(int device) {
  DeviceFacts facts;
  facts.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  facts.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  facts.num_sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  facts.max_shared_bytes =
      static_cast<std::size_t>(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device));
  return facts;
}

template <typename T>
T* at(CUdeviceptr base, u64 offset) {
  return reinterpret_cast<T*>(base + offset);
}

LaneBuffers make_buffers(CUdeviceptr base, const OutputLayout& layout, const Problem& problem) {
  LaneBuffers buffers;
  buffers.tokens = at<void>(base, layout.tokens);
  if (problem.shape.fp8) buffers.scales = at<void>(base, layout.scales);
  buffers.combine_input = at<void>(base, layout.combine_input);
  if (problem.config.output_layout == DispatchLayout::RANK_MAJOR) {
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

KernelModule::KernelModule(const Problem& problem, const CudaPlan& plan, const Variant& variant)
    : num_threads_(variant.num_threads) {
  const KernelImage image = compile_kernels(config_source(problem, variant), plan.architecture);
  const Driver& cuda = driver();
  cuda::check(cuda.cuModuleLoadData(&module_, image.cubin.data()), "cuModuleLoadData");
  cuda::check(cuda.cuModuleGetFunction(&dispatch_, module_, "dispatch_kernel"), "cuModuleGetFunction");
  cuda::check(cuda.cuModuleGetFunction(&combine_, module_, "combine_kernel"), "cuModuleGetFunction");
  // Setting or asking an attribute loads a function, also where loading is lazy: no launch waits for another rank's.
  cuda::check(cuda.cuFuncSetAttribute(dispatch_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      static_cast<int>(plan.dispatch_shared_bytes)),
              "cuFuncSetAttribute");
  int blocks = 0;
  for (const auto& [function, shared] :
       {std::pair{dispatch_, plan.dispatch_shared_bytes}, std::pair{combine_, std::size_t{0}}}) {
    cuda::check(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, variant.num_threads, shared),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    if (blocks < 1)
      throw Error(ErrorCode::Backend,
                  "a block of " + std::to_string(variant.num_threads) + " threads does not fit on an SM");
  }
}

KernelModule::~KernelModule() {
  if (module_ != nullptr) driver().cuModuleUnload(module_);
}

KernelModule::KernelModule(KernelModule&& other) noexcept
    : module_(std::exchange(other.module_, nullptr)),
      dispatch_(other.dispatch_),
      combine_(other.combine_),
      num_threads_(other.num_threads_) {}

DeviceMemory::DeviceMemory(std::size_t bytes) {
  cuda::check(driver().cuMemAlloc(&address_, std::max<std::size_t>(bytes, 16)), "cuMemAlloc");
}

DeviceMemory::~DeviceMemory() {
  if (address_ != 0) driver().cuMemFree(address_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept : address_(std::exchange(other.address_, 0)) {}

HostReport::HostReport() {
  void* memory = nullptr;
  cuda::check(
      driver().cuMemHostAlloc(&memory, sizeof(LossReport), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
      "cuMemHostAlloc");
  report_ = static_cast<LossReport*>(memory);
  *report_ = LossReport{};
  CUdeviceptr device = 0;
  cuda::check(driver().cuMemHostGetDevicePointer(&device, memory, 0), "cuMemHostGetDevicePointer");
  device_ = reinterpret_cast<LossReport*>(device);
}

HostReport::~HostReport() {
  if (report_ != nullptr) driver().cuMemFreeHost(report_);
}

template <typename Params>
void CudaBackend::launch(CUfunction function, int num_threads, int num_blocks, std::size_t shared_bytes,
                         const Params& params, CUstream stream) {
  CUlaunchAttribute dependent{};
  dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  dependent.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(num_blocks);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = static_cast<unsigned>(num_threads);
  config.sharedMemBytes = static_cast<unsigned>(shared_bytes);
  config.hStream = stream;
  config.attrs = &dependent;
  config.numAttrs = cuda_plan_.dependent_launch ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  cuda::check(driver().cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

CudaBackend::CudaBackend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap)
    : problem_(problem), plan_(plan) {
  try {
    build(bootstrap);
  } catch (...) {
    release();
    throw;
  }
}

void CudaBackend::build(Bootstrap& bootstrap) {
  succeed_together(bootstrap, [&] { context_.emplace(problem_.config.device.index); });
  prepare(bootstrap);
  inboxes_.emplace(bootstrap, problem_.config.device.index, plan_.memory.shared);
  // Ends with all ranks in step: no peer's first packet can meet memory that is still being filled.
  succeed_together(bootstrap, [&] {
    const CurrentContext current(*context_);
    make_lanes();
    fill_memory();
    launch_nothing();
  });
}

void CudaBackend::prepare(Bootstrap& bootstrap) {
  const int device = problem_.config.device.index;
  const std::vector<RankDevice> devices = gather_values(bootstrap, describe_device(device));
  const CUuuid& own = devices[static_cast<std::size_t>(problem_.rank)].uuid;
  succeed_together(bootstrap, [&] {
    const CurrentContext current(*context_);
    DeviceFacts facts = describe(device);
    facts.num_ranks_here = static_cast<int>(std::count_if(devices.begin(), devices.end(), [&](const RankDevice& other) {
      return std::equal(std::begin(own.bytes), std::end(own.bytes), std::begin(other.uuid.bytes));
    }));
    cuda_plan_ = make_cuda_plan(problem_, facts);
    if (env().log == "info")
      std::fprintf(stderr, "expertwire rank %d: %s\n", problem_.rank, cuda_plan_.to_string().c_str());
    for (const Variant& variant : {cuda_plan_.small_work, cuda_plan_.large_dispatch, cuda_plan_.large_combine}) {
      modules_.emplace_back(problem_, cuda_plan_, variant);
    }
  });
}

void CudaBackend::make_lanes() {
  const Driver& cuda = driver();
  cuda::check(cuda.cuStreamCreate(&own_stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  cuda::check(cuda.cuEventCreate(&last_work_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  report_.emplace();
  const u64 state_bytes = make_lane_state_layout(problem_.shape).bytes,
            inbox_bytes = make_inbox_layout(problem_.shape).lane_bytes;
  for (int lane = 0; lane < problem_.config.max_in_flight; ++lane) {
    memory_.emplace_back(plan_.outputs.bytes);
    const CUdeviceptr outputs = memory_.back().address();
    memory_.emplace_back(state_bytes);
    Lane& made = lanes_.emplace_back();
    made.buffers = make_buffers(outputs, plan_.outputs, problem_);
    for (int rank = 0; rank < problem_.num_ranks; ++rank) {
      made.params.inboxes[rank] = at<u8>(inboxes_->address(rank), inbox_bytes * static_cast<u64>(lane));
    }
    made.params.state = at<u8>(memory_.back().address(), 0);
    made.params.rank = problem_.rank;
  }
  memory_.emplace_back(sizeof(u32));
  for (Lane& lane : lanes_) {
    lane.params.wait.abort = at<u32>(memory_.back().address(), 0);
    lane.params.wait.report = report_->device_pointer();
    lane.params.wait.timeout_ns = static_cast<u64>(problem_.config.timeout_s * 1e9);
  }
}

void CudaBackend::fill_memory() {
  const Driver& cuda = driver();
  const InboxLayout layout = make_inbox_layout(problem_.shape);
  const u64 state_bytes = make_lane_state_layout(problem_.shape).bytes;
  for (const Lane& lane : lanes_) {
    const auto inbox = reinterpret_cast<CUdeviceptr>(lane.params.inboxes[problem_.rank]);
    cuda::check(cuda.cuMemsetD8Async(inbox, 0, layout.sentinel_begin, own_stream_), "cuMemsetD8Async");
    cuda::check(cuda.cuMemsetD32Async(inbox + layout.sentinel_begin, kSentinel,
                                      (layout.lane_bytes - layout.sentinel_begin) / 4, own_stream_),
                "cuMemsetD32Async");
    cuda::check(cuda.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(lane.params.state), 0, state_bytes, own_stream_),
                "cuMemsetD8Async");
  }
  cuda::check(cuda.cuMemsetD8Async(memory_.back().address(), 0, sizeof(u32), own_stream_), "cuMemsetD8Async");
  cuda::check(cuda.cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
}

// Every kernel once, without work: the driver may stop the device to find room for a kernel's local memory, and must not
// do so while another rank's kernel waits for this one.
void CudaBackend::launch_nothing() {
  DispatchKernelParams dispatch{};
  CombineKernelParams combine{};
  dispatch.num_tokens = combine.num_tokens = -1;
  for (const KernelModule& module : modules_) {
    launch(module.dispatch(), module.num_threads(), cuda_plan_.dispatch_blocks, cuda_plan_.dispatch_shared_bytes,
           dispatch, own_stream_);
    launch(module.combine(), module.num_threads(), cuda_plan_.combine_blocks, 0, combine, own_stream_);
  }
  cuda::check(driver().cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
}

CudaBackend::~CudaBackend() { release(); }

void CudaBackend::release() noexcept {
  if (!context_) return;
  const CurrentContext current(*context_);
  const Driver& cuda = driver();
  // Only this rank's own work is waited for. Waits in it are bounded, also after a peer was lost.
  if (last_stream_ && cuda.cuEventRecord(last_work_, *last_stream_) == CUDA_SUCCESS)
    cuda.cuEventSynchronize(last_work_);
  if (last_work_ != nullptr) cuda.cuEventDestroy(last_work_);
  if (own_stream_ != nullptr) cuda.cuStreamDestroy(own_stream_);
  modules_.clear();
  memory_.clear();
  report_.reset();
}

// Operations of one communicator run one after the other, also on different streams.
void CudaBackend::follow(CUstream stream) {
  if (last_stream_ && *last_stream_ != stream) {
    const Driver& cuda = driver();
    CUstreamCaptureStatus before = CU_STREAM_CAPTURE_STATUS_NONE, now = CU_STREAM_CAPTURE_STATUS_NONE;
    cuda::check(cuda.cuStreamIsCapturing(*last_stream_, &before), "cuStreamIsCapturing");
    cuda::check(cuda.cuStreamIsCapturing(stream, &now), "cuStreamIsCapturing");
    if (before == now) {  // work outside a capture is ordered by whoever launches the graph
      cuda::check(cuda.cuEventRecord(last_work_, *last_stream_), "cuEventRecord");
      cuda::check(cuda.cuStreamWaitEvent(stream, last_work_, 0), "cuStreamWaitEvent");
    }
  }
  last_stream_ = stream;
}

bool CudaBackend::is_small(int num_tokens) const {
  return static_cast<std::int64_t>(num_tokens) * ((problem_.shape.hidden_size + 255) / 256) <=
         cuda_plan_.small_work_pieces;
}

void CudaBackend::dispatch(int lane_idx, const DispatchParams& params) {
  check();
  const CurrentContext current(*context_);
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  const auto stream = static_cast<CUstream>(params.stream);
  follow(stream);
  DispatchKernelParams kernel{};
  kernel.lane = lane.params;
  kernel.x = params.x;
  kernel.block_scales = params.block_scales;
  kernel.topk_ids = params.topk_ids;
  kernel.weights = params.weights;
  kernel.num_tokens = params.num_tokens;
  kernel.topk_ids_are_64_bit = params.topk_ids_are_64_bit ? 1 : 0;
  kernel.tokens = params.tokens;
  kernel.scales = lane.buffers.scales;
  kernel.num_tokens_per_expert = lane.buffers.num_tokens_per_expert;
  kernel.num_tokens_per_rank = lane.buffers.num_tokens_per_rank;
  kernel.rank_ranges = lane.buffers.rank_ranges;
  kernel.source_token = lane.buffers.source_token;
  kernel.out_topk_ids = lane.buffers.topk_ids;
  kernel.out_weights = lane.buffers.weights;
  const KernelModule& module = modules_[is_small(params.num_tokens) ? 0 : 1];
  launch(module.dispatch(), module.num_threads(), cuda_plan_.dispatch_blocks, cuda_plan_.dispatch_shared_bytes, kernel,
         stream);
  lane.dispatched_with_weights = params.weights != nullptr;
  ++stats_.dispatch_calls;
}

void CudaBackend::combine(int lane_idx, const CombineParams& params) {
  check();
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  if (params.weights != nullptr && lane.dispatched_with_weights && !problem_.shape.direct_send) {
    // Their partial sums are on their way before a peer could hear of new weights.
    throw Error(ErrorCode::Unsupported,
                "weights: on CUDA with RANK_LOCAL_REDUCE, combine takes weights only if dispatch was given none");
  }
  const CurrentContext current(*context_);
  const auto stream = static_cast<CUstream>(params.stream);
  follow(stream);
  CombineKernelParams kernel{};
  kernel.lane = lane.params;
  kernel.expert_output = params.expert_output;
  kernel.weights = params.weights;
  kernel.out = params.out;
  kernel.num_tokens = params.num_tokens;
  const KernelModule& module = modules_[is_small(params.num_tokens) ? 0 : 2];
  launch(module.combine(), module.num_threads(), cuda_plan_.combine_blocks, 0, kernel, stream);
  ++stats_.combine_calls;
}

RuntimeStats CudaBackend::stats() const {
  const CurrentContext current(*context_);
  const LaneStateLayout layout = make_lane_state_layout(problem_.shape);
  RuntimeStats stats = stats_;
  stats.timeouts = report_->is_set() ? 1 : 0;
  stats.expert_tokens.assign(static_cast<std::size_t>(problem_.num_local_experts), 0);
  stats.source_wait_seconds.assign(static_cast<std::size_t>(problem_.num_ranks), 0.0);
  std::vector<std::uint64_t> totals(stats.expert_tokens.size());
  for (const Lane& lane : lanes_) {
    if (totals.empty()) break;
    const auto from = reinterpret_cast<CUdeviceptr>(lane.params.state) + layout.expert_totals;
    cuda::check(driver().cuMemcpyDtoHAsync(totals.data(), from, totals.size() * sizeof(std::uint64_t), own_stream_),
                "cuMemcpyDtoHAsync");
    cuda::check(driver().cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
    for (std::size_t expert = 0; expert < totals.size(); ++expert) stats.expert_tokens[expert] += totals[expert];
  }
  return stats;
}

std::vector<int> CudaBackend::lost_ranks() const {
  if (!report_->is_set()) return {};
  return {report_->get().peer};
}

void CudaBackend::check() {
  if (!report_->is_set()) return;
  const LossReport& report = report_->get();
  const std::string operation = report.operation == 0 ? "dispatch" : "combine";
  throw Error("peer lost, the communicator has ended; " + operation + " " + std::to_string(report.epoch) + ": rank " +
                  std::to_string(report.peer) +
                  " did not arrive within timeout_s = " + std::to_string(problem_.config.timeout_s) + " s",
              {report.peer}, operation, report.epoch);
}

}  // namespace expertwire::cuda
