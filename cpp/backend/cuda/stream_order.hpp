// The order of one communicator's operations: one after another, whichever streams and graphs they are put on.
#pragma once

#include <cstdint>
#include <optional>

#include "backend/cuda/driver_types.hpp"

namespace expertwire::cuda {

// The capture that a stream is in, if it is in one.
struct Capture {
  bool is_active = false;
  std::uint64_t id = 0;
  CUgraph graph = nullptr;
};

// As far as the driver says, if there is one, which does not of the default stream beside the capture of one that waits for it.
bool is_stream_capturing(void* stream);

// A place for work: on a stream, behind all work before it.
struct Turn {
  CUstream stream = nullptr;
  Capture capture;
};

// Lets this thread do, while it lives, what a capture in progress forbids and would be invalidated by, such as waiting for
// an event that has nothing to do with it.
class BesideCaptures {
 public:
  BesideCaptures() noexcept;
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  CUstreamCaptureMode before_;
};

// A call asks follow(), puts its work on the stream, and then note()s it: a call that fails in between changes nothing.
// A context must be current, of which all streams are.
class StreamOrder {
 public:
  StreamOrder() = default;
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  void create();
  void destroy() noexcept;

  // Throws InvalidArgument if what is put on the stream cannot be ordered behind the work before it.
  Capture capture_of(CUstream stream) const;
  // Orders what is put on the stream next behind the work before it. In a graph, behind what is in the graph: the graph is
  // ordered behind work outside of it by whoever launches it.
  Turn follow(CUstream stream);
  bool is_new(const Capture& capture) const { return capture.id != capture_; }
  void note(const Turn& turn) noexcept;

  // From here on the caller's streams are not touched any more: they may be gone.
  void let_go() noexcept;
  // Waits for the work that was noted, after let_go(). False if that cannot be waited for.
  bool wait() noexcept;

 private:
  void record_last_work();
  bool try_to_record() noexcept;

  // Work outside of graphs. The last of it is on last_stream_ and, if there is none, in last_work_ once has_work_ is set.
  std::optional<CUstream> last_stream_;
  CUevent last_work_ = nullptr;
  bool has_work_ = false;
  bool is_lost_ = false;  // could not be recorded when the stream was let go
  // Work in a graph: the capture that was last used, and which of its streams. Not touched once the capture has ended.
  std::optional<std::uint64_t> capture_;
  CUevent last_captured_work_ = nullptr;
  CUstream last_captured_stream_ = nullptr;
};

}  // namespace expertwire::cuda
