#include "released_gil.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace expertwire::bindings {
namespace {

std::atomic<bool> interpreter_ends{false};

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace

ReleasedGil::~ReleasedGil() {
  while (interpreter_ends.load() && !is_main_thread()) pause();
  PyEval_RestoreThread(state_);
}

void watch_interpreter() {
  const nanobind::object note = nanobind::cpp_function([] { interpreter_ends.store(true); });
  nanobind::module_::import_("atexit").attr("register")(note);
}

}  // namespace expertwire::bindings
