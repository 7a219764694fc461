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
  nb::class_<KernelImage>(m, "KernelImage", "A CUDA source compiled for one architecture.")
      .def_prop_ro("cubin", [](const KernelImage& self) { return nb::bytes(self.cubin.data(), self.cubin.size()); })
      .def_ro("log", &KernelImage::log)
      .def_ro("resources", &KernelImage::resources)
      .def_ro("from_cache", &KernelImage::from_cache)
      .def_ro("is_kept", &KernelImage::is_kept);
  m.def("compile_source", &compile_cuda_source, nb::arg("source"), nb::arg("architecture"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Compiles a source that may include the kernel headers, or takes the result from the cache. Needs no GPU; "
        "`architecture` is such as sm_90a.");
  m.def(
      "precompile_kernels",
      [](const RuntimeConfig& config, int num_ranks, const std::string& architecture, int num_sms) {
        return precompile_cuda_kernels(make_problem(config, 0, num_ranks), architecture, num_sms);
      },
      nb::arg("config"), nb::arg("num_ranks"), nb::arg("architecture"), nb::arg("num_sms") = 0,
      nb::call_guard<nb::gil_scoped_release>(),
      "Compiles all kernels of a communicator on a GPU of which each rank has `num_sms` multiprocessors, 0 for any "
      "GPU, "
      "or takes them from the cache. Needs no GPU; raises what making the communicator would.");
  m.def("set_nvrtc_search_path", &set_nvrtc_search_path, nb::arg("folders"),
        "Names folders to look for the CUDA compiler library in, after the places that need no telling.");
  m.def("nvtx_state", &nvtx_state, nb::call_guard<nb::gil_scoped_release>(),
        "Ranges for a profiler: off, on, or why there are none although EXPERTWIRE_NVTX is 1.");
  m.def(
      "is_stream_capturing", [](std::uintptr_t stream) { return is_stream_capturing(reinterpret_cast<void*>(stream)); },
      nb::arg("stream"), "Whether the CUDA stream at an address is being captured into a graph.");
  m.def("cuda_why_unusable", &cuda_why_unusable, nb::call_guard<nb::gil_scoped_release>(),
        "Why this machine cannot run the CUDA backend, and what to do; None if it can.");
}

}  // namespace expertwire::bindings
