#include "backend/cuda/cuda_backend.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/jit.hpp"
#include "backend/cuda/kept.hpp"
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

struct CommonWords {  // of all lanes, in memory of the GPU
  u32 abort;
  LossState losses;
};

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

LoadedKernel::LoadedKernel(int device, const KernelImage& image, const Variant& variant, std::size_t shared_bytes)
    : num_threads_(variant.block_threads()) {
  const Driver& cuda = driver();
  const std::string entry = std::string(name(variant.kernel)) + "_kernel";
  cuda::check(cuda.cuModuleGetFunction(&function_, loaded_module(device, image.cubin), entry.c_str()),
              "cuModuleGetFunction");
  // Setting or asking an attribute loads a function, also where loading is lazy: no launch waits for another rank's.
  cuda::check(cuda.cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      static_cast<int>(shared_bytes)),
              "cuFuncSetAttribute");
  int blocks = 0;
  cuda::check(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function_, num_threads_, shared_bytes),
              "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (blocks < 1)
    throw Error(ErrorCode::Backend, "a block of " + std::to_string(num_threads_) + " threads does not fit on an SM");
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
  release_what_graphs_dropped();
  succeed_together(bootstrap, [&] { memory_ = std::make_shared<KernelMemory>(problem_.config.device.index); });
  prepare(bootstrap);
  memory_->inboxes.emplace(bootstrap, problem_.config.device.index, plan_.memory.shared);
  // Ends with all ranks in step: no peer's first packet can meet memory that is still being filled.
  succeed_together(bootstrap, [&] {
    const CurrentContext current(memory_->context);
    make_lanes();
    fill_memory();
    launch_nothing();
  });
}

void CudaBackend::prepare(Bootstrap& bootstrap) {
  const int device = problem_.config.device.index;
  RankDevice mine;
  succeed_together(bootstrap, [&] { mine = describe_device(device); });
  const std::vector<RankDevice> devices = gather_values(bootstrap, mine);
  const CUuuid& own = devices[static_cast<std::size_t>(problem_.rank)].uuid;
  succeed_together(bootstrap, [&] {
    const CurrentContext current(memory_->context);
    DeviceFacts facts = describe(device);
    facts.num_ranks_here = static_cast<int>(std::count_if(devices.begin(), devices.end(), [&](const RankDevice& other) {
      return std::equal(std::begin(own.bytes), std::end(own.bytes), std::begin(other.uuid.bytes));
    }));
    cuda_plan_ = make_cuda_plan(problem_, facts);
    if (env().log == "info")
      std::fprintf(stderr,
                   "expertwire rank %d: %s, inbox %llu B, outputs %llu B, private %llu B, profiler ranges: %s\n",
                   problem_.rank, cuda_plan_.to_string().c_str(), u64{plan_.memory.shared}, u64{plan_.memory.outputs},
                   u64{plan_.memory.private_}, nvtx_state().c_str());
    load_kernels();
  });
}

void CudaBackend::load_kernels() {
  const std::vector<KernelImage> images =
      compile_sources(program_sources(problem_, cuda_plan_), cuda_plan_.architecture);
  const int device = problem_.config.device.index;
  auto image = images.begin();
  for (const Variant& variant : programs(cuda_plan_)) {
    const bool is_dispatch = variant.kernel == Kernel::DISPATCH;
    Kernels& kernels = is_dispatch ? dispatch_ : variant.by_blocks ? combine_by_blocks_ : combine_;
    kernels[static_cast<std::size_t>(variant.phase)].emplace_back(device, *image++, variant,
                                                                  is_dispatch ? cuda_plan_.dispatch_shared_bytes : 0);
  }
}

// Not by cuMemAlloc, whose counterpart waits for the whole device.
CUdeviceptr CudaBackend::allocate(std::size_t bytes) {
  const int device = problem_.config.device.index;
  memory_->own.emplace_back(Allocation(device, std::max<std::size_t>(bytes, 1), CU_MEM_HANDLE_TYPE_NONE), device);
  return memory_->own.back().address();
}

void CudaBackend::make_lanes() {
  const Driver& cuda = driver();
  cuda::check(cuda.cuStreamCreate(&own_stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  order_.create();
  memory_->report.emplace();
  const u64 state_bytes = make_lane_state_layout(problem_.shape).bytes,
            inbox_bytes = make_inbox_layout(problem_.shape).lane_bytes;
  for (int lane = 0; lane < problem_.config.max_in_flight; ++lane) {
    const CUdeviceptr outputs = allocate(plan_.outputs.bytes);
    Lane& made = lanes_.emplace_back();
    made.buffers = make_buffers(outputs, plan_.outputs, problem_);
    for (int rank = 0; rank < problem_.num_ranks; ++rank) {
      made.params.inboxes[rank] = at<u8>(memory_->inboxes->address(rank), inbox_bytes * static_cast<u64>(lane));
    }
    for (CUevent& event : made.received) {
      if (problem_.config.two_phase) cuda::check(cuda.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
    made.params.state = at<u8>(allocate(state_bytes), 0);
    made.buffers.source_wait_ns =
        reinterpret_cast<const std::uint64_t*>(made.params.state + make_lane_state_layout(problem_.shape).waited_ns);
    made.params.rank = problem_.rank;
    made.params.lane = lane;
  }
  if (const auto& table = problem_.physical_of_logical; !table.empty())
    placement_ = at<i32>(allocate(table.size() * sizeof(i32)), 0);
  auto* common = at<CommonWords>(allocate(sizeof(CommonWords)), 0);
  for (Lane& lane : lanes_) {
    lane.params.wait.abort = &common->abort;
    lane.params.wait.report = &memory_->report->device_pointer()->loss;
    lane.params.fault = &memory_->report->device_pointer()->fault;
    lane.params.mask.state = &common->losses;
    lane.params.mask.host = memory_->report->device_pointer()->lost;
    lane.params.mask.notices = inbox_bytes * (lanes_.size() - static_cast<std::size_t>(lane.params.lane));
    lane.params.wait.timeout_ns = static_cast<u64>(problem_.config.timeout_s * 1e9);
  }
}

void CudaBackend::fill_memory() {
  const Driver& cuda = driver();
  const InboxLayout layout = make_inbox_layout(problem_.shape);
  const LaneStateLayout state_layout = make_lane_state_layout(problem_.shape);
  for (const Lane& lane : lanes_) {
    const auto inbox = reinterpret_cast<CUdeviceptr>(lane.params.inboxes[problem_.rank]);
    cuda::check(cuda.cuMemsetD8Async(inbox, 0, layout.sentinel_begin, own_stream_), "cuMemsetD8Async");
    cuda::check(cuda.cuMemsetD32Async(inbox + layout.sentinel_begin, kSentinel,
                                      (layout.lane_bytes - layout.sentinel_begin) / 4, own_stream_),
                "cuMemsetD32Async");
    const auto state = reinterpret_cast<CUdeviceptr>(lane.params.state);
    cuda::check(cuda.cuMemsetD8Async(state, 0, state_layout.bytes, own_stream_), "cuMemsetD8Async");
    for (const u64 epochs : {state_layout.dispatch_epochs, state_layout.combine_epochs})
      cuda::check(cuda.cuMemsetD32Async(state + epochs, kPacketEpochs.before_first(), kMaxBlocks, own_stream_),
                  "cuMemsetD32Async");
  }
  if (const u64 bytes = make_notice_layout(problem_.shape).bytes; bytes > 0) {
    const u64 notices = layout.lane_bytes * lanes_.size();
    cuda::check(cuda.cuMemsetD8Async(memory_->inboxes->address(problem_.rank) + notices, 0, bytes, own_stream_),
                "cuMemsetD8Async");
  }
  cuda::check(cuda.cuMemsetD8Async(memory_->own.back().address(), 0, sizeof(CommonWords), own_stream_),
              "cuMemsetD8Async");
  write_placement(problem_.physical_of_logical, own_stream_);
  cuda::check(cuda.cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
}

// Every kernel, and the copy of epochs, once without work: the driver may stop the device to find room for a kernel's
// local memory, and must not do so while another rank's kernel waits for this one.
void CudaBackend::launch_nothing() {
  DispatchKernelParams dispatch{};
  CombineKernelParams combine{};
  dispatch.num_tokens = combine.num_tokens = -1;
  for (const auto& kernels : dispatch_)
    for (const LoadedKernel& kernel : kernels)
      launch(kernel, cuda_plan_.dispatch_blocks, cuda_plan_.dispatch_shared_bytes, &dispatch, own_stream_);
  for (const Kernels* of_combine : {&combine_, &combine_by_blocks_})
    for (const auto& kernels : *of_combine)
      for (const LoadedKernel& kernel : kernels) launch(kernel, cuda_plan_.combine_blocks, 0, &combine, own_stream_);
  raise_epochs(reinterpret_cast<CUdeviceptr>(lanes_.front().params.state), 1, 2, own_stream_);
  cuda::check(driver().cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
}

CudaBackend::~CudaBackend() { release(); }

// The caller's stream is not touched after this, for it may be gone before the buffers are.
void CudaBackend::close() noexcept {
  if (driver().cuCtxPushCurrent(memory_->context.get()) != CUDA_SUCCESS)
    return;  // the driver has shut down, with all it held
  order_.let_go();
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent(&popped);
}

void CudaBackend::release() noexcept {
  if (memory_ == nullptr || memory_->context.process().is_inherited()) return;
  close();
  const BesideCaptures beside;
  const Driver& cuda = driver();
  if (cuda.cuCtxPushCurrent(memory_->context.get()) != CUDA_SUCCESS)
    return;  // the driver has shut down, with all it held
  // Only this rank's own work is waited for. Waits in it are bounded, also after a peer was lost.
  const bool has_ended = order_.wait();
  order_.destroy();
  for (const Lane& lane : lanes_)
    for (const CUevent event : lane.received)
      if (event != nullptr) cuda.cuEventDestroy(event);
  if (own_stream_ != nullptr) cuda.cuStreamDestroy(own_stream_);
  CUcontext popped = nullptr;
  cuda.cuCtxPopCurrent(&popped);
  if (!has_ended) keep_for_good(memory_);  // rather than take it from a kernel
  memory_.reset();
  release_what_graphs_dropped();
}

RuntimeStats CudaBackend::stats() const {
  const CurrentContext current(memory_->context);
  const BesideCaptures beside;
  RuntimeStats stats = stats_;
  stats.timeouts = memory_->report->num_timeouts();
  stats.expert_tokens.assign(static_cast<std::size_t>(problem_.num_local_experts), 0);
  stats.source_wait_seconds.assign(static_cast<std::size_t>(problem_.num_ranks), 0.0);
  for (const Lane& lane : lanes_) add_device_counts(lane, stats);
  return stats;
}

void CudaBackend::add_device_counts(const Lane& lane, RuntimeStats& stats) const {
  const LaneStateLayout layout = make_lane_state_layout(problem_.shape);
  const auto state = reinterpret_cast<CUdeviceptr>(lane.params.state);
  std::vector<std::uint64_t> totals(stats.expert_tokens.size());
  std::vector<std::uint64_t> waited_ns(stats.source_wait_seconds.size());
  Traffic traffic{};
  if (!totals.empty()) {
    cuda::check(driver().cuMemcpyDtoHAsync(totals.data(), state + layout.expert_totals,
                                           totals.size() * sizeof(std::uint64_t), own_stream_),
                "cuMemcpyDtoHAsync");
  }
  cuda::check(driver().cuMemcpyDtoHAsync(&traffic, state + layout.traffic, sizeof traffic, own_stream_),
              "cuMemcpyDtoHAsync");
  cuda::check(driver().cuMemcpyDtoHAsync(waited_ns.data(), state + layout.waited_ns,
                                         waited_ns.size() * sizeof(std::uint64_t), own_stream_),
              "cuMemcpyDtoHAsync");
  cuda::check(driver().cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
  for (std::size_t expert = 0; expert < totals.size(); ++expert) stats.expert_tokens[expert] += totals[expert];
  for (std::size_t rank = 0; rank < waited_ns.size(); ++rank)
    stats.source_wait_seconds[rank] += static_cast<double>(waited_ns[rank]) * 1e-9;
  const RowLayout row = dispatch_row_layout(problem_.shape);
  const std::uint64_t dispatch_bytes = row.payload_bytes + row.scale_bytes,
                      combine_bytes = static_cast<std::uint64_t>(problem_.shape.hidden_size) * 2;
  stats.bytes_sent += traffic.dispatch_sent * dispatch_bytes + traffic.combine_sent * combine_bytes;
  stats.bytes_received += traffic.dispatch_received * dispatch_bytes + traffic.combine_received * combine_bytes;
}

std::vector<int> CudaBackend::lost_ranks() const { return memory_->report->lost_ranks(); }

void CudaBackend::check() {
  memory_->report->raise_fault(problem_);
  memory_->report->raise_loss(problem_);
}

}  // namespace expertwire::cuda
