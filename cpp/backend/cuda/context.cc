#include "backend/cuda/context.hpp"

#include <string>

#include "backend/cuda/driver.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {

PrimaryContext::PrimaryContext(int device) {
  int num_devices = 0;
  check(driver().cuDeviceGetCount(&num_devices), "cuDeviceGetCount");
  if (device < 0 || device >= num_devices) {
    throw Error(ErrorCode::InvalidArgument, "device = cuda:" + std::to_string(device) +
                                                ": must be between cuda:0 and cuda:" + std::to_string(num_devices - 1) +
                                                ", the GPUs that this process sees");
  }
  check(driver().cuDeviceGet(&device_, device), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

PrimaryContext::~PrimaryContext() {
  if (!process_.is_inherited()) driver().cuDevicePrimaryCtxRelease(device_);
}

CurrentContext::CurrentContext(const PrimaryContext& context) {
  check(driver().cuCtxPushCurrent(context.get()), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent(&popped);
}

Stream::Stream(const PrimaryContext& context) : current_(context) {
  check(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

Stream::~Stream() { driver().cuStreamDestroy(stream_); }

}  // namespace expertwire::cuda
