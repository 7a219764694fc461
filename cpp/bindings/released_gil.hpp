// Gives up the interpreter lock for a scope that waits.
#pragma once

#include <nanobind/nanobind.h>

namespace expertwire::bindings {

// A daemon thread may still wait when the interpreter ends. It must not ask for the lock then: the interpreter would end the
// thread in the middle of C++ frames, which ends the process. It sleeps until the process goes instead.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// Called at import: notes when the interpreter begins to end.
void watch_interpreter();

}  // namespace expertwire::bindings
