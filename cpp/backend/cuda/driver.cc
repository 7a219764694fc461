#include "backend/cuda/driver.hpp"

#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <mutex>
#include <system_error>

#include "base/env.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {
namespace {

constexpr int kOldestDriver = 12000;  // as cuDriverGetVersion writes CUDA 12.0
constexpr int kOldestComputeMajor = 8;
constexpr std::array kNvrtcMajors{13, 12};
constexpr const char* kCudaFolder = "/usr/local/cuda/lib64";
constexpr std::array kNvtxNames{"libnvtx3interop.so.1", "libnvToolsExt.so.1"};  // of CUDA 13, and of those before

// Libraries stay open for good: objects that live as long as the process call them.
void* open_library(const std::string& name) { return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); }

std::string last_load_error() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <typename Function>
  void find(Function*& entry, const char* name) {
    entry = reinterpret_cast<Function*>(dlsym(library_, name));
    if (entry == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }  // the first that was not found

 private:
  void* library_;
  std::string missing_;
};

void find_basics(Driver& d, Symbols& symbols) {
  symbols.find(d.cuGetErrorName, "cuGetErrorName");
  symbols.find(d.cuGetErrorString, "cuGetErrorString");
  symbols.find(d.cuInit, "cuInit");
  symbols.find(d.cuDriverGetVersion, "cuDriverGetVersion");
  symbols.find(d.cuDeviceGetCount, "cuDeviceGetCount");
  symbols.find(d.cuDeviceGet, "cuDeviceGet");
  symbols.find(d.cuDeviceGetName, "cuDeviceGetName");
  symbols.find(d.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  symbols.find(d.cuDeviceGetUuid, "cuDeviceGetUuid_v2");
  symbols.find(d.cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer");
  symbols.find(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  symbols.find(d.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  symbols.find(d.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  symbols.find(d.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
}

void find_execution(Driver& d, Symbols& symbols) {
  symbols.find(d.cuModuleLoadData, "cuModuleLoadData");
  symbols.find(d.cuModuleGetFunction, "cuModuleGetFunction");
  symbols.find(d.cuFuncSetAttribute, "cuFuncSetAttribute");
  symbols.find(d.cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  symbols.find(d.cuLaunchKernelEx, "cuLaunchKernelEx");
  symbols.find(d.cuStreamCreate, "cuStreamCreate");
  symbols.find(d.cuStreamDestroy, "cuStreamDestroy_v2");
  symbols.find(d.cuStreamSynchronize, "cuStreamSynchronize");
  symbols.find(d.cuStreamIsCapturing, "cuStreamIsCapturing");
  symbols.find(d.cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2");
  symbols.find(d.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  symbols.find(d.cuStreamWaitEvent, "cuStreamWaitEvent");
  symbols.find(d.cuEventCreate, "cuEventCreate");
  symbols.find(d.cuEventDestroy, "cuEventDestroy_v2");
  symbols.find(d.cuEventRecord, "cuEventRecord");
  symbols.find(d.cuEventSynchronize, "cuEventSynchronize");
  symbols.find(d.cuEventQuery, "cuEventQuery");
  symbols.find(d.cuEventElapsedTime, "cuEventElapsedTime");
  symbols.find(d.cuStreamBeginCapture, "cuStreamBeginCapture_v2");
  symbols.find(d.cuStreamEndCapture, "cuStreamEndCapture");
  symbols.find(d.cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
  symbols.find(d.cuGraphUpload, "cuGraphUpload");
  symbols.find(d.cuGraphLaunch, "cuGraphLaunch");
  symbols.find(d.cuGraphExecDestroy, "cuGraphExecDestroy");
  symbols.find(d.cuGraphDestroy, "cuGraphDestroy");
  symbols.find(d.cuUserObjectCreate, "cuUserObjectCreate");
  symbols.find(d.cuUserObjectRelease, "cuUserObjectRelease");
  symbols.find(d.cuGraphRetainUserObject, "cuGraphRetainUserObject");
}

void find_memory(Driver& d, Symbols& symbols) {
  symbols.find(d.cuMemAlloc, "cuMemAlloc_v2");
  symbols.find(d.cuMemFree, "cuMemFree_v2");
  symbols.find(d.cuMemHostAlloc, "cuMemHostAlloc");
  symbols.find(d.cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2");
  symbols.find(d.cuMemsetD8Async, "cuMemsetD8Async");
  symbols.find(d.cuMemsetD32Async, "cuMemsetD32Async");
  symbols.find(d.cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  symbols.find(d.cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  symbols.find(d.cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  symbols.find(d.cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity");
  symbols.find(d.cuMemCreate, "cuMemCreate");
  symbols.find(d.cuMemRelease, "cuMemRelease");
  symbols.find(d.cuMemExportToShareableHandle, "cuMemExportToShareableHandle");
  symbols.find(d.cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle");
  symbols.find(d.cuMemAddressReserve, "cuMemAddressReserve");
  symbols.find(d.cuMemAddressFree, "cuMemAddressFree");
  symbols.find(d.cuMemMap, "cuMemMap");
  symbols.find(d.cuMemUnmap, "cuMemUnmap");
  symbols.find(d.cuMemSetAccess, "cuMemSetAccess");
}

std::string describe(const Driver& d, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (d.cuGetErrorName(result, &name) != CUDA_SUCCESS) return "error " + std::to_string(result);
  d.cuGetErrorString(result, &text);
  return std::string(name) + ": " + (text == nullptr ? "no text" : text);
}

struct LoadedDriver {
  Driver driver{};
  int version = 0;  // as cuDriverGetVersion writes it; 0 without a driver
  int num_devices = 0;
  std::string problem;  // why it cannot be used; empty if it can
};

LoadedDriver load_driver() {
  LoadedDriver result;
  Driver& d = result.driver;
  void* library = open_library("libcuda.so.1");
  if (library == nullptr) {
    result.problem = "there is no NVIDIA driver (" + last_load_error() +
                     "); install it, or start the container with access to its GPUs";
    return result;
  }
  Symbols symbols(library);
  find_basics(d, symbols);
  find_execution(d, symbols);
  find_memory(d, symbols);
  if (d.cuDriverGetVersion != nullptr) d.cuDriverGetVersion(&result.version);
  if (!symbols.missing().empty() || result.version < kOldestDriver) {
    result.problem = "the NVIDIA driver is too old: it offers CUDA " + std::to_string(result.version / 1000) + "." +
                     std::to_string(result.version % 1000 / 10) + "; install one that offers 12.0 or newer";
    if (!symbols.missing().empty()) result.problem += " (" + symbols.missing() + " is missing)";
    return result;
  }
  CUresult status = d.cuInit(0);
  if (status == CUDA_SUCCESS) status = d.cuDeviceGetCount(&result.num_devices);
  if (status == CUDA_ERROR_NO_DEVICE || (status == CUDA_SUCCESS && result.num_devices == 0)) {
    result.problem = "the NVIDIA driver shows no GPU to this process; look at CUDA_VISIBLE_DEVICES and the container's";
  } else if (status != CUDA_SUCCESS) {
    result.problem = "the NVIDIA driver cannot be initialised: cuInit: " + describe(d, status);
  }
  return result;
}

const LoadedDriver& loaded_driver() {
  static const LoadedDriver instance = load_driver();
  return instance;
}

struct Compiler {
  std::mutex mutex;  // guards what follows
  std::vector<std::string> folders;
  bool is_loaded = false;
  Nvrtc nvrtc{};
};

Compiler& compiler() {
  static Compiler instance;
  return instance;
}

bool find_nvrtc(Nvrtc& n, void* library) {
  Symbols symbols(library);
  symbols.find(n.nvrtcVersion, "nvrtcVersion");
  symbols.find(n.nvrtcGetErrorString, "nvrtcGetErrorString");
  symbols.find(n.nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs");
  symbols.find(n.nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs");
  symbols.find(n.nvrtcCreateProgram, "nvrtcCreateProgram");
  symbols.find(n.nvrtcDestroyProgram, "nvrtcDestroyProgram");
  symbols.find(n.nvrtcCompileProgram, "nvrtcCompileProgram");
  symbols.find(n.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
  symbols.find(n.nvrtcGetProgramLog, "nvrtcGetProgramLog");
  symbols.find(n.nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
  symbols.find(n.nvrtcGetCUBIN, "nvrtcGetCUBIN");
  return symbols.missing().empty();
}

// Folders in the order of the search; empty: wherever the dynamic loader looks.
std::vector<std::string> search_places(const std::vector<std::string>& folders) {
  if (!env().nvrtc_dir.empty()) return {env().nvrtc_dir};
  std::vector<std::string> places{"", kCudaFolder};
  places.insert(places.end(), folders.begin(), folders.end());
  return places;
}

// NVRTC asks the dynamic loader for its builtins by name alone when it compiles, and gets them from any folder if they are
// open by then. They belong to the library that was loaded, which a framework may have done from a folder of its own.
void open_builtins(const Nvrtc& n, int major) {
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(n.nvrtcVersion), &library) == 0) return;
  const std::string prefix = "libnvrtc-builtins.so." + std::to_string(major);
  std::error_code ignored;  // a folder that cannot be read has no builtins to open
  std::filesystem::directory_iterator entry(std::filesystem::path(library.dli_fname).parent_path(), ignored);
  for (const std::filesystem::directory_iterator end; !ignored && entry != end; entry.increment(ignored)) {
    if (entry->path().filename().string().starts_with(prefix)) open_library(entry->path());
  }
}

void* open_nvrtc(const std::string& place, int major, std::string& reasons) {
  const std::string name = "libnvrtc.so." + std::to_string(major);
  if (place.empty()) return open_library(name);
  const std::filesystem::path path = std::filesystem::path(place) / name;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return nullptr;
  void* library = open_library(path);
  if (library == nullptr) reasons += "; " + last_load_error();
  return library;
}

struct LoadedNvtx {
  Nvtx nvtx{};
  std::string state = "off";
};

LoadedNvtx load_nvtx() {
  LoadedNvtx result;
  if (!env().nvtx) return result;
  for (const char* name : kNvtxNames) {
    void* library = open_library(name);
    if (library == nullptr) library = open_library(std::string(kCudaFolder) + "/" + name);
    if (library == nullptr) continue;
    Symbols symbols(library);
    symbols.find(result.nvtx.nvtxRangePushA, "nvtxRangePushA");
    symbols.find(result.nvtx.nvtxRangePop, "nvtxRangePop");
    if (!symbols.missing().empty()) continue;
    result.state = "on";
    return result;
  }
  result.state = std::string("EXPERTWIRE_NVTX is 1, but neither ") + kNvtxNames[0] + " nor " + kNvtxNames[1] +
                 " is in the system's library folders or in " + kCudaFolder + ": there are no ranges";
  return result;
}

const LoadedNvtx& loaded_nvtx() {
  static const LoadedNvtx instance = load_nvtx();
  return instance;
}

[[noreturn]] void refuse_without_nvrtc(const std::vector<std::string>& places, const std::string& reasons) {
  const int version = loaded_driver().version;
  const bool old_driver = version != 0 && version / 1000 < kNvrtcMajors.front();
  std::string where;
  for (const std::string& place : places) {
    where += where.empty() ? "" : ", ";
    where += place.empty() ? "the system's library folders" : place;
  }
  throw Error(ErrorCode::Unsupported,
              "NVRTC, the CUDA compiler library, is nowhere to be found: looked for libnvrtc.so." +
                  std::string(old_driver ? "12" : "13 and .12") + " in " + where + reasons + "; pip install " +
                  (old_driver ? "nvidia-cuda-nvrtc-cu12" : "'expertwire[cuda]'") +
                  ", or name its folder in EXPERTWIRE_NVRTC_DIR");
}

}  // namespace

const Driver& driver() {
  const LoadedDriver& loaded = loaded_driver();
  if (!loaded.problem.empty()) throw Error(ErrorCode::Unsupported, "device = cuda: " + loaded.problem);
  return loaded.driver;
}

bool has_driver() { return loaded_driver().problem.empty(); }

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  std::string text = std::string(call) + ": " + describe(loaded_driver().driver, result);
  if (result == CUDA_ERROR_NOT_INITIALIZED) {
    text += " (a process that was forked after its parent had used CUDA cannot use it: start ranks with spawn)";
  }
  throw Error(ErrorCode::Backend, text);
}

void set_nvrtc_search_path(const std::vector<std::string>& folders) {
  Compiler& c = compiler();
  const std::lock_guard lock(c.mutex);
  c.folders = folders;
}

const Nvrtc& nvrtc() {
  Compiler& c = compiler();
  const std::lock_guard lock(c.mutex);
  if (c.is_loaded) return c.nvrtc;
  const std::vector<std::string> places = search_places(c.folders);
  const int driver_version = loaded_driver().version;
  std::string reasons;
  for (const int major : kNvrtcMajors) {
    if (driver_version != 0 && major > driver_version / 1000) continue;  // it would not load what this compiles
    for (const std::string& place : places) {
      void* library = open_nvrtc(place, major, reasons);
      if (library == nullptr || !find_nvrtc(c.nvrtc, library)) continue;
      open_builtins(c.nvrtc, major);
      c.is_loaded = true;
      return c.nvrtc;
    }
  }
  refuse_without_nvrtc(places, reasons);
}

const Nvtx* nvtx() { return loaded_nvtx().state == "on" ? &loaded_nvtx().nvtx : nullptr; }

std::string nvtx_state() { return loaded_nvtx().state; }

std::optional<std::string> why_unusable() {
  const LoadedDriver& loaded = loaded_driver();
  if (!loaded.problem.empty()) return loaded.problem;
  bool has_new_enough = false;
  for (int ordinal = 0; ordinal < loaded.num_devices; ++ordinal) {
    CUdevice device = 0;
    int major = 0;
    check(loaded.driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(loaded.driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
          "cuDeviceGetAttribute");
    has_new_enough = has_new_enough || major >= kOldestComputeMajor;
  }
  if (!has_new_enough) return "no GPU here has compute capability 8.0 or newer";
  try {
    nvrtc();
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

}  // namespace expertwire::cuda
