// The Python module `expertwire._core`: conversions, errors and the GIL. Argument checks that need arrays are in Python
// (communicator.py); all others are core's.
#include <exception>

#include "bindings.hpp"
#include "expertwire/error.hpp"
#include "expertwire/version.hpp"
#include "released_gil.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument: return "InvalidArgumentError";
    case ErrorCode::InvalidHandle: return "HandleError";
    case ErrorCode::Unsupported: return "UnsupportedError";
    case ErrorCode::PeerLost: return "PeerLostError";
    case ErrorCode::Backend: return "BackendError";
  }
  return "Error";
}

// The Python exception that stands for a C++ one. Looked up when needed, so that importing the module does no work.
nb::object python_error(const Error& error) {
  const nb::object type = nb::module_::import_("expertwire.errors").attr(class_name(error.code()));
  if (error.code() != ErrorCode::PeerLost) return type(error.what());
  nb::list ranks;
  for (const int rank : error.ranks()) ranks.append(rank);
  return type(error.what(), ranks, error.operation().c_str(), error.epoch());
}

void translate(const std::exception_ptr& thrown, void* /*unused*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const nb::object value = python_error(error);
    PyErr_SetObject(value.type().ptr(), value.ptr());
  }
}

}  // namespace
}  // namespace expertwire::bindings

NB_MODULE(_core, m) {
  using namespace expertwire::bindings;
  m.doc() = "C++ core of expertwire. An implementation detail of the package: use the names of expertwire itself.";
  // A communicator that lives until the interpreter ends is no fault of the user's.
  nb::set_leak_warnings(false);
  m.def("version", [] { return nb::str(expertwire::kVersion.data(), expertwire::kVersion.size()); });
  nb::register_exception_translator(translate);
  watch_interpreter();
  bind_arrays(m);
  bind_bootstrap(m);
  bind_config(m);
  bind_cuda(m);
  bind_runtime(m);
  bind_tensors(m);
}
