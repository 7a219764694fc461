// The CUDA driver and the NVRTC compiler, loaded when first needed: the library links with neither, and one build runs on
// machines with and without them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/cuda/driver_types.hpp"

namespace expertwire::cuda {

// Entry points of libcuda.so.1, under their own names.
struct Driver {
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuGetErrorString)(CUresult, const char**);

  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);  // 1000 * major + 10 * minor of CUDA
  CUresult (*cuDeviceGetCount)(int*);
  CUresult (*cuDeviceGet)(CUdevice*, int ordinal);
  CUresult (*cuDeviceGetName)(char*, int bytes, CUdevice);
  CUresult (*cuDeviceGetAttribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*cuDeviceGetUuid)(CUuuid*, CUdevice);
  CUresult (*cuDeviceCanAccessPeer)(int* can, CUdevice, CUdevice peer);

  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice);
  CUresult (*cuCtxPushCurrent)(CUcontext);
  CUresult (*cuCtxPopCurrent)(CUcontext*);

  CUresult (*cuModuleLoadData)(CUmodule*, const void* image);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char* name);
  CUresult (*cuFuncSetAttribute)(CUfunction, CUfunction_attribute, int);
  CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int*, CUfunction, int block_size, std::size_t shared_bytes);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** params, void** extra);

  CUresult (*cuMemAlloc)(CUdeviceptr*, std::size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr);
  CUresult (*cuMemHostAlloc)(void**, std::size_t bytes, unsigned flags);
  CUresult (*cuMemHostGetDevicePointer)(CUdeviceptr*, void*, unsigned flags);
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char value, std::size_t count, CUstream);
  CUresult (*cuMemsetD32Async)(CUdeviceptr, unsigned value, std::size_t count, CUstream);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr, const void*, std::size_t bytes, CUstream);
  CUresult (*cuMemcpyDtoHAsync)(void*, CUdeviceptr, std::size_t bytes, CUstream);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream);

  CUresult (*cuStreamCreate)(CUstream*, unsigned flags);
  CUresult (*cuStreamDestroy)(CUstream);
  CUresult (*cuStreamSynchronize)(CUstream);
  CUresult (*cuStreamIsCapturing)(CUstream, CUstreamCaptureStatus*);
  CUresult (*cuStreamGetCaptureInfo)(CUstream, CUstreamCaptureStatus*, std::uint64_t* id, CUgraph*,
                                     const CUgraphNode** dependencies, std::size_t* num_dependencies);
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*);
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned flags);
  CUresult (*cuEventCreate)(CUevent*, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent);
  CUresult (*cuEventRecord)(CUevent, CUstream);
  CUresult (*cuEventSynchronize)(CUevent);
  CUresult (*cuEventQuery)(CUevent);
  CUresult (*cuEventElapsedTime)(float* milliseconds, CUevent from, CUevent to);

  CUresult (*cuStreamBeginCapture)(CUstream, CUstreamCaptureMode);
  CUresult (*cuStreamEndCapture)(CUstream, CUgraph*);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec*, CUgraph, unsigned long long flags);
  CUresult (*cuGraphUpload)(CUgraphExec, CUstream);
  CUresult (*cuGraphLaunch)(CUgraphExec, CUstream);
  CUresult (*cuGraphExecDestroy)(CUgraphExec);
  CUresult (*cuGraphDestroy)(CUgraph);
  CUresult (*cuUserObjectCreate)(CUuserObject*, void* object, CUhostFn destroy, unsigned count, unsigned flags);
  CUresult (*cuUserObjectRelease)(CUuserObject, unsigned count);
  CUresult (*cuGraphRetainUserObject)(CUgraph, CUuserObject, unsigned count, unsigned flags);

  CUresult (*cuMemGetAllocationGranularity)(std::size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags);
  CUresult (*cuMemCreate)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,
                          unsigned long long flags);
  CUresult (*cuMemRelease)(CUmemGenericAllocationHandle);
  CUresult (*cuMemExportToShareableHandle)(void* handle, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                           unsigned long long flags);
  // For a POSIX descriptor, `handle` is the descriptor itself cast to a pointer; for a fabric handle, its address.
  CUresult (*cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle*, void* handle, CUmemAllocationHandleType);
  CUresult (*cuMemAddressReserve)(CUdeviceptr*, std::size_t bytes, std::size_t alignment, CUdeviceptr wanted,
                                  unsigned long long flags);
  CUresult (*cuMemAddressFree)(CUdeviceptr, std::size_t);
  CUresult (*cuMemMap)(CUdeviceptr, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle,
                       unsigned long long flags);
  CUresult (*cuMemUnmap)(CUdeviceptr, std::size_t);
  CUresult (*cuMemSetAccess)(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t count);
};

// The driver, initialised. Throws Unsupported, with what to do, where there is none, it is too old, or it shows no GPU.
const Driver& driver();

// Whether driver() does not throw.
bool has_driver();

// Throws Backend, "call: NAME: the driver's text", unless `result` is CUDA_SUCCESS.
void check(CUresult result, const char* call);

// Entry points of libnvrtc.so, under their own names.
struct Nvrtc {
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int*);
  nvrtcResult (*nvrtcGetSupportedArchs)(int*);  // 90 for sm_90
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram*, const char* source, const char* name, int num_headers,
                                    const char* const* header_texts, const char* const* header_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram*);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram, int num_options, const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram, std::size_t*);  // with the terminating zero
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram, char*);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram, std::size_t*);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram, char*);
};

// Folders to look for libnvrtc in, after EXPERTWIRE_NVRTC_DIR and the system's. Counts until a compiler has been loaded.
void set_nvrtc_search_path(const std::vector<std::string>& folders);

// The compiler, of CUDA 13 or 12 and not of a newer major version than the driver, if there is one. Throws Unsupported,
// with what to do and where it was looked for.
const Nvrtc& nvrtc();

// The profiler's ranges, which the library exports under these names.
struct Nvtx {
  int (*nvtxRangePushA)(const char* name);
  int (*nvtxRangePop)();
};

// Null unless EXPERTWIRE_NVTX asks for ranges and the library is found.
const Nvtx* nvtx();
// "off", "on", or why there are none although they were asked for.
std::string nvtx_state();

// Why no communicator can be made on a GPU of this machine, as far as can be told without one; nullopt if it can.
std::optional<std::string> why_unusable();

}  // namespace expertwire::cuda
