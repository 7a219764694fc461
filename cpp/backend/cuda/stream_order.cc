#include "backend/cuda/stream_order.hpp"

#include <string>

#include "backend/cuda/driver.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {
namespace {

constexpr const char* kNoOrder =
    ", so that this one cannot be ordered behind it; end that capture first, or use that stream";

// Asked about the legacy default stream, the driver refuses to answer while a stream that waits for it is being captured.
void require_no_implicit_capture(CUresult result) {
  if (result != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return;
  throw Error(ErrorCode::InvalidArgument,
              "stream: the default stream cannot be used while a stream that waits for it is being captured; end that "
              "capture first");
}

// The default stream of whichever thread names it.
CUstream per_thread_stream() { return reinterpret_cast<CUstream>(std::uintptr_t{2}); }

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  require_no_implicit_capture(result);
  check(result, "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

bool is_stream_capturing(void* stream) {
  if (!has_driver()) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return driver().cuStreamIsCapturing(static_cast<CUstream>(stream), &status) == CUDA_SUCCESS &&
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

BesideCaptures::BesideCaptures() noexcept : before_(CU_STREAM_CAPTURE_MODE_RELAXED) {
  driver().cuThreadExchangeStreamCaptureMode(&before_);
}

BesideCaptures::~BesideCaptures() { driver().cuThreadExchangeStreamCaptureMode(&before_); }

void StreamOrder::create() {
  check(driver().cuEventCreate(&last_work_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(driver().cuEventCreate(&last_captured_work_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

void StreamOrder::destroy() noexcept {
  for (CUevent* const event : {&last_work_, &last_captured_work_}) {
    if (*event != nullptr) driver().cuEventDestroy(*event);
    *event = nullptr;
  }
}

Capture StreamOrder::capture_of(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Capture capture;
  const CUresult result =
      driver().cuStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph, nullptr, nullptr);
  require_no_implicit_capture(result);
  check(result, "cuStreamGetCaptureInfo");
  if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    throw Error(ErrorCode::InvalidArgument, "stream: its capture has been invalidated by what was done before; end it");
  capture.is_active = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (!capture.is_active && last_stream_ && *last_stream_ != stream && is_capturing(*last_stream_)) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string("stream: the call before was made on another stream, which is being captured now") + kNoOrder);
  }
  return capture;
}

Turn StreamOrder::follow(CUstream stream) {
  const Driver& cuda = driver();
  const Turn turn{stream, capture_of(stream)};
  if (turn.capture.is_active) {
    if (!is_new(turn.capture) && last_captured_stream_ != stream) {
      check(cuda.cuEventRecord(last_captured_work_, last_captured_stream_), "cuEventRecord");
      check(cuda.cuStreamWaitEvent(stream, last_captured_work_, 0), "cuStreamWaitEvent");
    }
    return turn;
  }
  if (last_stream_ == stream) return turn;
  if (last_stream_) record_last_work();
  if (has_work_) check(cuda.cuStreamWaitEvent(stream, last_work_, 0), "cuStreamWaitEvent");
  return turn;
}

void StreamOrder::note(const Turn& turn) noexcept {
  if (turn.capture.is_active) {
    // A caller keeps the stream of the last call alive, and for him that is this one. (It cannot be recorded if it is.)
    if (last_stream_ && try_to_record()) last_stream_.reset();
    capture_ = turn.capture.id;
    last_captured_stream_ = turn.stream;
    return;
  }
  last_stream_ = turn.stream;
  // Another thread's next call would mean a stream of its own by the same name.
  if (turn.stream == per_thread_stream() && try_to_record()) last_stream_.reset();
}

void StreamOrder::record_last_work() {
  check(driver().cuEventRecord(last_work_, *last_stream_), "cuEventRecord");
  has_work_ = true;
}

bool StreamOrder::try_to_record() noexcept {
  const BesideCaptures beside;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const bool is_recorded = driver().cuStreamIsCapturing(*last_stream_, &status) == CUDA_SUCCESS &&
                           status == CU_STREAM_CAPTURE_STATUS_NONE &&
                           driver().cuEventRecord(last_work_, *last_stream_) == CUDA_SUCCESS;
  has_work_ = has_work_ || is_recorded;
  return is_recorded;
}

void StreamOrder::let_go() noexcept {
  if (!last_stream_) return;
  is_lost_ = !try_to_record();
  last_stream_.reset();
}

bool StreamOrder::wait() noexcept {
  if (is_lost_) return false;
  return !has_work_ || driver().cuEventSynchronize(last_work_) == CUDA_SUCCESS;
}

}  // namespace expertwire::cuda
