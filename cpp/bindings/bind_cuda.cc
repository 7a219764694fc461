// Compiling CUDA kernels, and whether CUDA can be used here.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "core/config.hpp"
#include "core/plan.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {

void bind_cuda(nb::module_& m) {
  nb::class_<KernelResources>(m, "KernelResources", "What a CUDA kernel takes of a thread.")
      .def_ro("registers", &KernelResources::registers)
      .def_ro("stack_bytes", &KernelResources::stack_bytes)
      .def_ro("spill_bytes", &KernelResources::spill_bytes);
  nb::class_<KernelImage>(m, "KernelImage", "CUDA kernels compiled for one configuration and architecture.")
      .def_prop_ro("cubin", [](const KernelImage& self) { return nb::bytes(self.cubin.data(), self.cubin.size()); })
      .def_ro("log", &KernelImage::log)
      .def_ro("resources", &KernelImage::resources)
      .def_ro("from_cache", &KernelImage::from_cache);
  m.def("compile_kernels", &compile_cuda_kernels, nb::arg("config_source"), nb::arg("architecture"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Compiles the kernels, or takes them from the cache. Needs no GPU; `architecture` is such as sm_90a.");
  m.def(
      "precompile_kernels",
      [](const RuntimeConfig& config, int num_ranks, const std::string& architecture) {
        return precompile_cuda_kernels(make_problem(config, 0, num_ranks), architecture);
      },
      nb::arg("config"), nb::arg("num_ranks"), nb::arg("architecture"), nb::call_guard<nb::gil_scoped_release>(),
      "Compiles all kernels of a communicator, or takes them from the cache. Needs no GPU; raises what making the "
      "communicator would.");
  m.def("set_nvrtc_search_path", &set_nvrtc_search_path, nb::arg("folders"),
        "Names folders to look for the CUDA compiler library in, after the places that need no telling.");
  m.def("cuda_why_unusable", &cuda_why_unusable, nb::call_guard<nb::gil_scoped_release>(),
        "Why this machine cannot run the CUDA backend, and what to do; None if it can.");
}

}  // namespace expertwire::bindings
