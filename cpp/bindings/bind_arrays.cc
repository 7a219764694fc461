// Where arrays lie in memory: NumPy arrays through the buffer protocol, any other framework's through DLPack.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "bindings.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

// ml_dtypes arrays refuse the buffer protocol only when a format is asked for; the address needs none.
std::uintptr_t buffer_address(nb::handle array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_STRIDES) != 0) throw nb::python_error();
  const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

std::string scalar_name(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const std::string bits = std::to_string(dtype.bits);
  switch (static_cast<Code>(dtype.code)) {
    case Code::Int: return "int" + bits;
    case Code::UInt: return "uint" + bits;
    case Code::Float: return "float" + bits;
    case Code::Bfloat: return "bfloat" + bits;
    case Code::Bool: return "bool";
    case Code::Complex: return "complex" + bits;
    case Code::Float8_E4M3FN: return "float8_e4m3fn";
    default: return "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
}

std::string dtype_name(nb::dlpack::dtype dtype) {
  std::string name = scalar_name(dtype);
  if (dtype.lanes != 1) name.append(" in vectors of ").append(std::to_string(dtype.lanes));
  return name;
}

// Holds what another framework exported, so that its memory stays while a call uses the address.
class DlpackArray {
 public:
  // None if the object exports nothing that nanobind can take. For reading: many exporters of memory that may not be
  // written have no way to say so, or do not.
  static std::optional<DlpackArray> open(nb::handle object) {
    nb::ndarray<nb::ro> array;
    if (!nb::try_cast(object, array)) return std::nullopt;
    return DlpackArray(std::move(array));
  }

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(array_.data()); }
  std::string dtype() const { return dtype_name(array_.dtype()); }

  nb::tuple shape() const {
    nb::list sizes;
    for (std::size_t i = 0; i < array_.ndim(); ++i) sizes.append(array_.shape(i));
    return nb::tuple(sizes);
  }

  bool contiguous() const {
    if (array_.size() == 0) return true;
    std::int64_t expected = 1;
    for (std::size_t i = array_.ndim(); i-- > 0;) {
      if (array_.shape(i) != 1 && array_.stride(i) != expected) return false;
      expected *= static_cast<std::int64_t>(array_.shape(i));
    }
    return true;
  }

 private:
  explicit DlpackArray(nb::ndarray<nb::ro> array) : array_(std::move(array)) {}

  nb::ndarray<nb::ro> array_;
};

}  // namespace

void bind_arrays(nb::module_& m) {
  m.def("buffer_address", &buffer_address, nb::arg("array"), "Address of the first element of a NumPy array.");
  nb::class_<DlpackArray>(m, "DlpackArray", "An array of another framework, held through DLPack.")
      .def_static("open", &DlpackArray::open, nb::arg("array"),
                  "Takes an array's memory for reading; None if it exports none.")
      .def_prop_ro("address", &DlpackArray::address)
      .def_prop_ro("dtype", &DlpackArray::dtype)
      .def_prop_ro("shape", &DlpackArray::shape, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("contiguous", &DlpackArray::contiguous);
}

}  // namespace expertwire::bindings
