// What the parts of the Python module `expertwire._core` add to it.
#pragma once

#include <nanobind/nanobind.h>

namespace expertwire::bindings {

void bind_arrays(nanobind::module_& m);     // addresses of NumPy arrays, import of DLPack objects
void bind_bootstrap(nanobind::module_& m);  // Bootstrap and its makers
void bind_config(nanobind::module_& m);     // enums, RuntimeConfig and its parts
void bind_cuda(nanobind::module_& m);       // compiling kernels; whether CUDA can be used
void bind_runtime(nanobind::module_& m);    // MoERuntime, requests, handles; this machine
void bind_tensors(nanobind::module_& m);    // tensors as arguments, read without Python

}  // namespace expertwire::bindings
