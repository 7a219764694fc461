// Contexts: whose memory, streams and kernels a call means.
#pragma once

#include <sys/types.h>

#include "backend/cuda/driver_types.hpp"

namespace expertwire::cuda {

// A device's primary context, which is the one that frameworks use too, kept for as long as this object lives.
class PrimaryContext {
 public:
  explicit PrimaryContext(int device);  // ordinal; throws InvalidArgument if this process sees no such device
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  CUcontext get() const { return context_; }
  bool is_inherited() const;  // by a forked child, which has no part in its parent's contexts

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  pid_t process_;
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
