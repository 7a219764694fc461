#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/driver_types.hpp"
#include "stand_in/stand_in.hpp"

namespace expertwire::test::stand_in {
namespace {

using namespace expertwire::cuda;

constexpr CUresult kInvalidHandle = 400, kCaptureUnsupported = 900, kLaunchFailed = 719;
constexpr std::uint64_t kGraph = 0x900;

struct StreamState {
  int capture = CU_STREAM_CAPTURE_STATUS_NONE;
  std::uint64_t id = 0;
  bool is_destroyed = false, is_foreign = false;
};

class Driver final : public Control {
 public:
  const char* take_log() override {
    const std::lock_guard lock(mutex_);
    told_ = std::move(log_);
    log_.clear();
    return told_.c_str();
  }
  void set_capture(std::uintptr_t stream, int status, std::uint64_t id) override {
    streams_[stream].capture = status;
    streams_[stream].id = id;
  }
  void set_global_capture(bool is_active) override { global_capture_ = is_active; }
  void set_implicit_capture(bool is_active) override { implicit_capture_ = is_active; }
  void destroy_stream(std::uintptr_t stream) override { streams_[stream].is_destroyed = true; }
  void make_foreign(std::uintptr_t stream) override { streams_[stream].is_foreign = true; }
  void fail(const char* call, int times) override { failing_[call] = times; }
  void destroy_graph() override {
    for (const auto& [destroy, object] : held_) destroy(object);
    held_.clear();
  }
  int num_events() const override { return static_cast<int>(num_events_); }
  int num_mistakes() const override { return num_mistakes_; }
  bool is_relaxed() const override { return mode == CU_STREAM_CAPTURE_MODE_RELAXED; }

  void log(const std::string& line) {
    const std::lock_guard lock(mutex_);
    log_ += line + "\n";
  }
  bool fails(const char* call) {
    const auto found = failing_.find(call);
    return found != failing_.end() && found->second > 0 && found->second-- > 0;
  }
  // A query, which does not notice whose the stream is.
  CUresult look(CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph) {
    const StreamState& state = streams_[address(stream)];
    if (state.is_destroyed) return mistake("query of a stream that is gone");
    if (stream == nullptr && implicit_capture_) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = static_cast<CUstreamCaptureStatus>(state.capture);
    if (id != nullptr) *id = state.id;
    if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(kGraph);
    return CUDA_SUCCESS;
  }
  CUresult use(CUstream stream, const std::string& line) {
    const StreamState& state = streams_[address(stream)];
    if (state.is_destroyed) return mistake("use of a stream that is gone: " + line);
    if (state.is_foreign) return kInvalidHandle;
    log(line);
    return CUDA_SUCCESS;
  }
  CUresult record(CUevent event, CUstream stream) {
    recorded_[event] = capture_of(stream);
    return use(stream, "record " + std::to_string(reinterpret_cast<std::uintptr_t>(event)) + " on " +
                           std::to_string(address(stream)));
  }
  CUresult wait(CUstream stream, CUevent event) {
    const std::string line =
        "wait " + std::to_string(address(stream)) + " for " + std::to_string(reinterpret_cast<std::uintptr_t>(event));
    const auto found = recorded_.find(event);
    if (found == recorded_.end()) return mistake("nothing recorded: " + line);
    if (found->second != capture_of(stream)) return mistake("across captures: " + line);
    return use(stream, line);
  }
  // What a capture in global mode forbids.
  CUresult forbidden(const std::string& line) {
    if (global_capture_ && mode != CU_STREAM_CAPTURE_MODE_RELAXED)
      return mistake("invalidates a capture: " + line, true);
    log(line);
    return CUDA_SUCCESS;
  }
  CUresult mistake(const std::string& text, bool in_capture = false) {
    ++num_mistakes_;
    log("MISTAKE " + text);
    return in_capture ? kCaptureUnsupported : kInvalidHandle;
  }
  void hold(CUhostFn destroy, void* object) { held_.emplace_back(destroy, object); }
  std::uintptr_t next_event() { return ++num_events_; }
  static std::uintptr_t address(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream); }

  static thread_local CUstreamCaptureMode mode;

 private:
  std::uint64_t capture_of(CUstream stream) {  // 0: none
    const StreamState& state = streams_[address(stream)];
    return state.capture == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : state.id;
  }

  std::map<CUevent, std::uint64_t> recorded_;  // in which capture
  std::mutex mutex_;
  std::string log_, told_;
  std::map<std::uintptr_t, StreamState> streams_;
  std::map<std::string, int> failing_;
  std::vector<std::pair<CUhostFn, void*>> held_;
  std::uintptr_t num_events_ = 0;
  bool global_capture_ = false, implicit_capture_ = false;
  int num_mistakes_ = 0;
};

thread_local CUstreamCaptureMode Driver::mode = static_cast<CUstreamCaptureMode>(0);

Driver& self() {
  static Driver* const instance = new Driver;  // objects that live as long as the process call it
  return *instance;
}

std::string text(CUstream stream) { return std::to_string(Driver::address(stream)); }
std::string text(CUevent event) { return std::to_string(reinterpret_cast<std::uintptr_t>(event)); }
void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

struct UserObject {
  CUhostFn destroy;
  void* object;
};

}  // namespace
}  // namespace expertwire::test::stand_in

using namespace expertwire::cuda;
using expertwire::test::stand_in::at;
using expertwire::test::stand_in::Control;
using expertwire::test::stand_in::self;
using expertwire::test::stand_in::text;
using expertwire::test::stand_in::UserObject;

extern "C" {

Control* expertwire_stand_in_control() { return &self(); }

CUresult cuGetErrorName(CUresult, const char** name) { return *name = "CUDA_ERROR_STAND_IN", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** words) { return *words = "as the test asked for", CUDA_SUCCESS; }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::strncpy(name, "stand-in", static_cast<std::size_t>(bytes));
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) { return *uuid = {}, CUDA_SUCCESS; }
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) { return *can = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(0x100), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext*) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = reinterpret_cast<CUmodule>(0x200), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return *function = reinterpret_cast<CUfunction>(0x300), CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, int, int) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
  return *blocks = 1, CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  if (self().fails("cuLaunchKernelEx")) return expertwire::test::stand_in::kLaunchFailed;
  return self().use(config->hStream, "launch " + text(config->hStream));
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  return *stream = reinterpret_cast<CUstream>(0x1000), CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) {
  if (self().fails("cuStreamSynchronize")) return expertwire::test::stand_in::kLaunchFailed;
  return self().forbidden("sync stream " + text(stream));
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return self().look(stream, status, nullptr, nullptr);
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph,
                                   const CUgraphNode**, std::size_t*) {
  return self().look(stream, status, id, graph);
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return std::swap(*mode, self().mode), CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) { return self().wait(stream, event); }
CUresult cuEventCreate(CUevent* event, unsigned) {
  return *event = reinterpret_cast<CUevent>(self().next_event()), CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) { return self().log("destroy " + text(event)), CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (self().fails("cuEventRecord")) return expertwire::test::stand_in::kInvalidHandle;
  return self().record(event, stream);
}
CUresult cuEventSynchronize(CUevent event) {
  if (self().fails("cuEventSynchronize")) return expertwire::test::stand_in::kLaunchFailed;
  return self().forbidden("sync " + text(event));
}
CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) { return *milliseconds = 0, CUDA_SUCCESS; }

CUresult cuStreamBeginCapture_v2(CUstream, int) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuStreamEndCapture(CUstream, CUgraph*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphUpload(CUgraphExec, CUstream) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphLaunch(CUgraphExec, CUstream) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphExecDestroy(CUgraphExec) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphDestroy(CUgraph) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuUserObjectCreate(CUuserObject* made, void* object, CUhostFn destroy, unsigned, unsigned) {
  return *made = reinterpret_cast<CUuserObject>(new UserObject{destroy, object}), CUDA_SUCCESS;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned) {
  delete reinterpret_cast<UserObject*>(object);
  return CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(CUgraph, CUuserObject object, unsigned, unsigned) {
  auto* const held = reinterpret_cast<UserObject*>(object);
  self().hold(held->destroy, held->object);
  delete held;
  self().log("graph keeps");
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr*, std::size_t) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemFree_v2(CUdeviceptr) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return *memory = std::calloc(1, bytes), CUDA_SUCCESS;  // kept as long as the process lives
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* memory, unsigned) {
  return *device = reinterpret_cast<CUdeviceptr>(memory), CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count, CUstream) {
  return std::memset(at(to), value, count), CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count, CUstream) {
  for (std::size_t i = 0; i < count; ++i) static_cast<unsigned*>(at(to))[i] = value;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, CUstream) {
  return std::memcpy(at(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return std::memcpy(to, at(from), bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  if (self().fails("cuMemcpyDtoDAsync")) return expertwire::test::stand_in::kLaunchFailed;
  return std::memcpy(at(to), at(from), bytes), CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*, int) {
  return *bytes = 4096, CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t, const CUmemAllocationProp*,
                     unsigned long long) {
  return *handle = 1, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
CUresult cuMemExportToShareableHandle(void* handle, CUmemGenericAllocationHandle, int, unsigned long long) {
  return *static_cast<int*>(handle) = open("/dev/null", O_RDWR | O_CLOEXEC), CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, int) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *address = reinterpret_cast<CUdeviceptr>(memory), CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) { return munmap(at(address), bytes), CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr, std::size_t) { return self().forbidden("unmap"); }
CUresult cuMemSetAccess(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }

}  // extern "C"
