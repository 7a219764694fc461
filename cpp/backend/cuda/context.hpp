// Contexts: whose memory, streams and kernels a call means.
#pragma once

#include "backend/cuda/driver_types.hpp"
#include "base/own_process.hpp"

namespace expertwire::cuda {

// A device's primary context, which is the one that frameworks use too, kept for as long as this object lives.
class PrimaryContext {
 public:
  explicit PrimaryContext(int device);  // ordinal; throws InvalidArgument if this process sees no such device
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  CUcontext get() const { return context_; }
  const OwnProcess& process() const { return process_; }

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  OwnProcess process_;
};

// Makes a context current on this thread, and what was current before again at the end.
class CurrentContext {
 public:
  explicit CurrentContext(const PrimaryContext& context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

// A stream of a context that waits for nothing but itself. The context is current while this object lives, on the thread
// that made it.
class Stream {
 public:
  explicit Stream(const PrimaryContext& context);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream get() const { return stream_; }

 private:
  CurrentContext current_;
  CUstream stream_ = nullptr;
};

}  // namespace expertwire::cuda
