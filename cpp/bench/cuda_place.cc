#include "cuda_place.hpp"

#include <algorithm>
#include <utility>

#include "backend/cuda/driver.hpp"

namespace expertwire::bench {
namespace {

using cuda::check;
using cuda::CUdeviceptr;
using cuda::driver;

CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

int num_cuda_devices() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

CudaPlace::CudaPlace(int device) : device_(device), context_(device), stream_(context_) {}

CudaPlace::~CudaPlace() {
  driver().cuStreamSynchronize(stream_.get());
  for (const CUdeviceptr memory : memory_) driver().cuMemFree(memory);
}

void* CudaPlace::allocate(std::size_t bytes) {
  CUdeviceptr memory = 0;
  check(driver().cuMemAlloc(&memory, std::max<std::size_t>(bytes, 16)), "cuMemAlloc");
  memory_.push_back(memory);
  return reinterpret_cast<void*>(memory);
}

void CudaPlace::write(void* device, const void* host, std::size_t bytes) {
  if (bytes == 0) return;
  wait();  // a copy behind a kernel that waits for another rank would hold up the copies of that rank
  check(driver().cuMemcpyHtoDAsync(address(device), host, bytes, stream_.get()), "cuMemcpyHtoDAsync");
  wait();
}

void CudaPlace::read(void* host, const void* device, std::size_t bytes) {
  if (bytes == 0) return;
  wait();
  check(driver().cuMemcpyDtoHAsync(host, address(device), bytes, stream_.get()), "cuMemcpyDtoHAsync");
  wait();
}

void CudaPlace::wait() { check(driver().cuStreamSynchronize(stream_.get()), "cuStreamSynchronize"); }

int CudaPlace::num_sms() const {
  int count = 0;
  check(driver().cuDeviceGetAttribute(&count, cuda::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
        "cuDeviceGetAttribute");
  return count;
}

Graph::Graph(const CudaPlace& place, const std::function<void()>& work)
    : stream_(static_cast<cuda::CUstream>(place.stream())) {
  // Other threads may use the driver as they like meanwhile.
  check(driver().cuStreamBeginCapture(stream_, cuda::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  cuda::CUgraph captured = nullptr;
  try {
    work();
  } catch (...) {
    driver().cuStreamEndCapture(stream_, &captured);
    if (captured != nullptr) driver().cuGraphDestroy(captured);
    throw;
  }
  check(driver().cuStreamEndCapture(stream_, &captured), "cuStreamEndCapture");
  const cuda::CUresult made = driver().cuGraphInstantiateWithFlags(&graph_, captured, 0);
  driver().cuGraphDestroy(captured);
  check(made, "cuGraphInstantiateWithFlags");
  check(driver().cuGraphUpload(graph_, stream_), "cuGraphUpload");
  check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

Graph::~Graph() { driver().cuGraphExecDestroy(graph_); }

void Graph::launch() const { check(driver().cuGraphLaunch(graph_, stream_), "cuGraphLaunch"); }

Event::Event(const CudaPlace& place) : stream_(static_cast<cuda::CUstream>(place.stream())) {
  check(driver().cuEventCreate(&event_, cuda::CU_EVENT_DEFAULT), "cuEventCreate");
}

Event::~Event() {
  if (event_ != nullptr) driver().cuEventDestroy(event_);
}

Event::Event(Event&& other) noexcept : stream_(other.stream_), event_(std::exchange(other.event_, nullptr)) {}

void Event::record() const { check(driver().cuEventRecord(event_, stream_), "cuEventRecord"); }

double Event::microseconds_since(const Event& earlier) const {
  float milliseconds = 0.0f;
  check(driver().cuEventElapsedTime(&milliseconds, earlier.event_, event_), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e3;
}

}  // namespace expertwire::bench
