// Operations of the CUDA backend: the kernel parameters of a call, and its launches.
#include <algorithm>
#include <string>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/driver.hpp"
#include "expertwire/error.hpp"
#include "shared/inbox.cuh"

namespace expertwire::cuda {
namespace {

// What a combine by blocks leaves, of the blocks of its grid, to the producer that it waits for, unless it is told.
constexpr int kShareOfBlocks = 2;

// A range for a profiler, while an object of it lives.
class Range {
 public:
  explicit Range(const char* name) : nvtx_(nvtx()) {
    if (nvtx_ != nullptr) nvtx_->nvtxRangePushA(name);
  }
  ~Range() {
    if (nvtx_ != nullptr) nvtx_->nvtxRangePop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const Nvtx* nvtx_;
};

}  // namespace

void CudaBackend::launch(const LoadedKernel& kernel, const DispatchKernelParams& params, const Turn& turn,
                         int max_blocks) {
  const int all = cuda_plan_.dispatch_blocks, run = max_blocks > 0 ? std::min(max_blocks, all) : all;
  launch(kernel, run, cuda_plan_.dispatch_shared_bytes, const_cast<DispatchKernelParams*>(&params), turn.stream);
  order_.note(turn);
  if (run < all)
    raise_epochs(
        reinterpret_cast<CUdeviceptr>(params.lane.state) + make_lane_state_layout(problem_.shape).dispatch_epochs, run,
        all, turn.stream);
}

void CudaBackend::launch(const LoadedKernel& kernel, const CombineKernelParams& params, const Turn& turn,
                         int max_blocks) {
  const int all = cuda_plan_.combine_blocks, run = max_blocks > 0 ? std::min(max_blocks, all) : all;
  launch(kernel, run, 0, const_cast<CombineKernelParams*>(&params), turn.stream);
  order_.note(turn);
  if (run < all)
    raise_epochs(
        reinterpret_cast<CUdeviceptr>(params.lane.state) + make_lane_state_layout(problem_.shape).combine_epochs, run,
        all, turn.stream);
}

void CudaBackend::launch(Phase phase, const CombineKernelParams& params, const Turn& turn, int max_blocks) {
  const bool by_blocks = params.ready_words != nullptr;
  if (by_blocks && max_blocks == 0) max_blocks = std::max(1, cuda_plan_.combine_blocks / kShareOfBlocks);
  launch(choose(by_blocks ? combine_by_blocks_ : combine_, phase, params.num_tokens), params, turn, max_blocks);
}

// Each block keeps its own epoch: those that an operation has not run take over that of those that it has.
void CudaBackend::raise_epochs(CUdeviceptr epochs, int num_run, int num_all, CUstream stream) {
  for (int done = num_run; done < num_all;) {
    const int count = std::min(done, num_all - done);
    cuda::check(driver().cuMemcpyDtoDAsync(epochs + static_cast<CUdeviceptr>(done) * sizeof(u32), epochs,
                                           static_cast<std::size_t>(count) * sizeof(u32), stream),
                "cuMemcpyDtoDAsync");
    done += count;
  }
}

void CudaBackend::launch(const LoadedKernel& kernel, int num_blocks, std::size_t shared_bytes, void* params,
                         CUstream stream) {
  CUlaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (cuda_plan_.dependent_launch) {
    CUlaunchAttribute& dependent = attributes[num_attributes++];
    dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    dependent.value.programmaticStreamSerializationAllowed = 1;
  }
  if (num_blocks <= cuda_plan_.most_paired_blocks && num_blocks % 2 == 0) {
    CUlaunchAttribute& pairs = attributes[num_attributes++];
    pairs.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    pairs.value.clusterDim = {2, 1, 1};
  }
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(num_blocks);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.num_threads());
  config.sharedMemBytes = static_cast<unsigned>(shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* arguments[] = {params};
  cuda::check(driver().cuLaunchKernelEx(&config, kernel.function(), arguments, nullptr), "cuLaunchKernelEx");
}

void CudaBackend::check_stream(void* stream) {
  const CurrentContext current(memory_->context);
  order_.capture_of(static_cast<CUstream>(stream));
}

Turn CudaBackend::follow(CUstream stream, void* wait_event) {
  const Turn turn = order_.follow(stream);
  if (turn.capture.is_active && order_.is_new(turn.capture)) keep_for_graph(turn.capture.graph, memory_);
  if (wait_event != nullptr)
    cuda::check(driver().cuStreamWaitEvent(stream, static_cast<CUevent>(wait_event), 0), "cuStreamWaitEvent");
  return turn;
}

const LoadedKernel& CudaBackend::choose(const Kernels& kernels, Phase phase, int num_tokens) const {
  const auto& of_phase = kernels[static_cast<std::size_t>(phase)];
  return num_tokens <= cuda_plan_.small_work_tokens ? of_phase.front() : of_phase.back();
}

DispatchKernelParams CudaBackend::prepare(int lane_idx, const DispatchParams& params) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  DispatchKernelParams kernel{};
  kernel.lane = lane.params;
  kernel.x = params.x;
  kernel.block_scales = params.block_scales;
  kernel.topk_ids = params.topk_ids;
  kernel.physical_of_logical = placement_;
  kernel.weights = params.weights;
  kernel.num_tokens = params.num_tokens;
  kernel.call = static_cast<u32>(stats_.dispatch_calls + 1);
  kernel.topk_ids_are_64_bit = params.topk_ids_are_64_bit ? 1 : 0;
  kernel.tokens = params.tokens;
  kernel.scales = lane.buffers.scales;
  kernel.num_tokens_per_expert = lane.buffers.num_tokens_per_expert;
  kernel.num_tokens_per_rank = lane.buffers.num_tokens_per_rank;
  kernel.rank_ranges = lane.buffers.rank_ranges;
  kernel.source_token = lane.buffers.source_token;
  kernel.out_topk_ids = lane.buffers.topk_ids;
  kernel.out_weights = lane.buffers.weights;
  return kernel;
}

CombineKernelParams CudaBackend::prepare(int lane_idx, const CombineParams& params) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  CombineKernelParams kernel{};
  kernel.lane = lane.params;
  kernel.expert_output = params.expert_output;
  kernel.weights = params.weights;
  kernel.out = params.out;
  kernel.num_tokens = params.num_tokens;
  kernel.call = lane.call;
  kernel.ready_words = reinterpret_cast<const u32*>(params.ready_words);
  kernel.ready_block_size = params.ready_block_size;
  kernel.ready_value = static_cast<u32>(params.ready_value);
  return kernel;
}

// Once the kernel has been launched: a launch that fails leaves the handles of the lane as they were.
void CudaBackend::note_dispatched(Lane& lane) {
  lane.call = static_cast<u32>(++stats_.dispatch_calls);
  lane.is_received[static_cast<int>(Step::DISPATCH)] = false;
}

void CudaBackend::dispatch(int lane, const DispatchParams& params) {
  const Range range("expertwire dispatch");
  check();
  const CurrentContext current(memory_->context);
  const Turn turn = follow(static_cast<CUstream>(params.stream), params.wait_event);
  launch(choose(dispatch_, Phase::WHOLE, params.num_tokens), prepare(lane, params), turn, params.max_num_blocks);
  note_dispatched(lanes_[static_cast<std::size_t>(lane)]);
}

void CudaBackend::combine(int lane, const CombineParams& params) {
  const Range range("expertwire combine");
  check();
  const CurrentContext current(memory_->context);
  const Turn turn = follow(static_cast<CUstream>(params.stream), params.wait_event);
  launch(Phase::WHOLE, prepare(lane, params), turn, params.max_num_blocks);
  lanes_[static_cast<std::size_t>(lane)].is_received[static_cast<int>(Step::COMBINE)] = false;
  ++stats_.combine_calls;
}

void CudaBackend::send(int lane_idx, const DispatchParams& params) {
  const Range range("expertwire dispatch send");
  check();
  const CurrentContext current(memory_->context);
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  const Turn turn = follow(static_cast<CUstream>(params.stream), params.wait_event);
  lane.dispatch = prepare(lane_idx, params);
  launch(choose(dispatch_, Phase::SEND, params.num_tokens), lane.dispatch, turn, params.max_num_blocks);
  lane.dispatch_max_blocks = params.max_num_blocks;
  note_dispatched(lane);
}

void CudaBackend::send(int lane_idx, const CombineParams& params) {
  const Range range("expertwire combine send");
  check();
  const CurrentContext current(memory_->context);
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  const Turn turn = follow(static_cast<CUstream>(params.stream), params.wait_event);
  lane.combine = prepare(lane_idx, params);
  launch(Phase::SEND, lane.combine, turn, params.max_num_blocks);
  lane.combine_max_blocks = params.max_num_blocks;
  lane.is_received[static_cast<int>(Step::COMBINE)] = false;
  ++stats_.combine_calls;
}

// Faults of callers are left for the next call that can be refused without loss: what was sent must be received. After a
// loss the kernel is launched all the same: it ends at once, and shows no rows.
void CudaBackend::receive(Step step, int lane_idx, void* stream_address) {
  const Range range(step == Step::DISPATCH ? "expertwire dispatch receive" : "expertwire combine receive");
  const CurrentContext current(memory_->context);
  Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  const Turn turn = follow(static_cast<CUstream>(stream_address), nullptr);
  if (step == Step::DISPATCH)
    launch(choose(dispatch_, Phase::RECEIVE, lane.dispatch.num_tokens), lane.dispatch, turn, lane.dispatch_max_blocks);
  else
    launch(choose(combine_, Phase::RECEIVE, lane.combine.num_tokens), lane.combine, turn, lane.combine_max_blocks);
  // Whether it can be asked after or not, it is received.
  lane.is_received[static_cast<int>(step)] =
      driver().cuEventRecord(lane.received[static_cast<int>(step)], turn.stream) == CUDA_SUCCESS;
  memory_->report->raise_loss(problem_);
}

bool CudaBackend::has_arrived(Step step, int lane_idx) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_idx)];
  if (!lane.is_received[static_cast<int>(step)]) return false;  // to look would be to wait for the GPU
  const CurrentContext current(memory_->context);
  const CUresult result = driver().cuEventQuery(lane.received[static_cast<int>(step)]);
  if (result == CUDA_ERROR_NOT_READY) return false;
  cuda::check(result, "cuEventQuery");
  return true;
}

}  // namespace expertwire::cuda
