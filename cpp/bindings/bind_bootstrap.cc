// Bootstrap and its makers. Waiting happens without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"
#include "released_gil.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Carries what torch.distributed or mpi4py do. The core calls it without the GIL, possibly from its last owner's
// destructor, so that every touch of Python takes the GIL. A Python exception passes through the core as it is.
class CallableBootstrap final : public Bootstrap {
 public:
  CallableBootstrap(int rank, int size, nb::callable gather) : rank_(rank), size_(size), gather_(std::move(gather)) {
    if (size < 1 || rank < 0 || rank >= size) {
      throw Error(ErrorCode::InvalidArgument,
                  "rank = " + std::to_string(rank) + ": must be between 0 and size - 1 = " + std::to_string(size - 1));
    }
  }
  ~CallableBootstrap() override {
    if (!nb::is_alive()) {
      gather_.release();  // the interpreter has gone, and its objects with it
      return;
    }
    const nb::gil_scoped_acquire held;
    gather_.reset();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& mine) override {
    const nb::gil_scoped_acquire held;
    const nb::object gathered = gather_(to_bytes(mine));
    std::vector<std::string> all;
    for (const nb::handle one : gathered) {
      if (!nb::isinstance<nb::bytes>(one)) refuse("an entry is no bytes object");
      const auto bytes = nb::borrow<nb::bytes>(one);
      all.emplace_back(bytes.c_str(), bytes.size());
    }
    if (all.size() != static_cast<std::size_t>(size_)) refuse(std::to_string(all.size()) + " entries");
    return all;
  }

 private:
  [[noreturn]] void refuse(const std::string& given) const {
    throw Error(ErrorCode::InvalidArgument, "all_gather returned " + given + ": must be one bytes object for each of " +
                                                std::to_string(size_) + " ranks");
  }

  const int rank_;
  const int size_;
  nb::callable gather_;
};

nb::list all_gather(Bootstrap& self, const nb::bytes& mine) {
  const std::string contribution(mine.c_str(), mine.size());
  std::vector<std::string> all;
  {
    const ReleasedGil released;
    all = self.all_gather(contribution);
  }
  nb::list result;
  for (const std::string& one : all) result.append(to_bytes(one));
  return result;
}

void barrier(Bootstrap& self) {
  const ReleasedGil released;
  self.barrier();
}

std::shared_ptr<Bootstrap> host_bootstrap(int rank, int size, const std::string& key, double timeout_s) {
  const ReleasedGil released;
  return make_host_bootstrap(rank, size, key, timeout_s);
}

std::shared_ptr<Bootstrap> callable_bootstrap(int rank, int size, nb::callable gather) {
  return std::make_shared<CallableBootstrap>(rank, size, std::move(gather));
}

}  // namespace

void bind_bootstrap(nb::module_& m) {
  nb::class_<Bootstrap>(m, "Bootstrap", "One rank's end of the exchange at set-up.")
      .def_prop_ro("rank", &Bootstrap::rank)
      .def_prop_ro("size", &Bootstrap::size)
      .def("all_gather", &all_gather, nb::arg("mine"), nb::sig("def all_gather(self, mine: bytes) -> list[bytes]"),
           "Collective. Returns the contributions of all ranks by rank.")
      .def("barrier", &barrier, "Collective. Returns once every rank has called.");
  m.def("make_local_bootstraps", &make_local_bootstraps, nb::arg("size"), nb::arg("timeout_s") = 300.0,
        "Makes one bootstrap for each of `size` threads of this process.");
  m.def("make_host_bootstrap", &host_bootstrap, nb::arg("rank"), nb::arg("size"), nb::arg("key"),
        nb::arg("timeout_s") = 300.0, "Meets the other processes of this host and user that pass the same key.");
  m.def("make_callable_bootstrap", &callable_bootstrap, nb::arg("rank"), nb::arg("size"), nb::arg("all_gather"),
        nb::sig("def make_callable_bootstrap(rank: int, size: int, "
                "all_gather: collections.abc.Callable[[bytes], list[bytes]]) -> Bootstrap"),
        "Makes a bootstrap whose collective is a Python function from bytes to a list of bytes.");
}

}  // namespace expertwire::bindings
