// A driver of CUDA and a compiler in the place of NVIDIA's, for tests of what the host asks of them and in which order. No
// kernel runs: memory is the host's, and launches, events and waits are written down.
#pragma once

#include <cstdint>

namespace expertwire::test::stand_in {

// What a test makes of the driver; the library that is loaded as libcuda.so.1 exports it by this name.
class Control {
 public:
  virtual ~Control() = default;
  // Lines such as "launch 16", "record 1 on 16", "wait 32 for 1", "sync 1", "unmap": streams are addresses, events are
  // numbered as they are made. Since the last call.
  virtual const char* take_log() = 0;
  // The stream's capture: none, active or invalidated, as cuda.h numbers them.
  virtual void set_capture(std::uintptr_t stream, int status, std::uint64_t id) = 0;
  // A capture in global mode: what it forbids fails and invalidates it, unless the thread's mode is relaxed.
  virtual void set_global_capture(bool is_active) = 0;
  // A stream that waits for the default stream is being captured, or not.
  virtual void set_implicit_capture(bool is_active) = 0;
  // Using the stream is a mistake from here on: it was destroyed, or belongs to another device, which only a launch and an
  // event notice.
  virtual void destroy_stream(std::uintptr_t stream) = 0;
  virtual void make_foreign(std::uintptr_t stream) = 0;
  // The next `times` calls of an entry point fail.
  virtual void fail(const char* call, int times) = 0;
  virtual void destroy_graph() = 0;    // every graph that holds something
  virtual int num_events() const = 0;  // that were made so far
  // What a real driver or a caller would not forgive, among others: waiting in a capture for what was recorded outside of it,
  // and the other way round; asking after a stream that is gone.
  virtual int num_mistakes() const = 0;
  virtual bool is_relaxed() const = 0;  // this thread's capture mode
};

using GetControl = Control*();
inline constexpr const char* kGetControl = "expertwire_stand_in_control";

}  // namespace expertwire::test::stand_in
