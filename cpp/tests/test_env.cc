// The environment is read once per process, so each case runs in a process of its own.
#include <cstdlib>

#include "base/env.hpp"
#include "check.hpp"
#include "expertwire/version.hpp"
#include "process.hpp"

namespace expertwire::test {
namespace {

void clear() {
  for (const char* name : {"EXPERTWIRE_CPU_ISA", "EXPERTWIRE_VALIDATE", "EXPERTWIRE_CACHE_DIR", "EXPERTWIRE_NVRTC_DIR",
                           "EXPERTWIRE_LOG", "EXPERTWIRE_NVTX"}) {
    unsetenv(name);
  }
}

void defaults() {
  check_process([] {
    clear();
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    check_equal(env().cpu_isa, "auto");
    check(!env().validate);
    check(!env().nvtx);
    check_equal(env().log, "off");
    check_equal(env().nvrtc_dir, "");
    check_equal(env().cache_dir, "/xdg/expertwire/" + std::string(kVersion));
  });
  check_process([] {
    clear();
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "/home/somebody", 1);
    check_equal(env().cache_dir, "/home/somebody/.cache/expertwire/" + std::string(kVersion));
  });
}

void given_values() {
  check_process([] {
    setenv("EXPERTWIRE_CPU_ISA", "plain", 1);
    setenv("EXPERTWIRE_VALIDATE", "1", 1);
    setenv("EXPERTWIRE_NVTX", "1", 1);
    setenv("EXPERTWIRE_CACHE_DIR", "/kernels", 1);
    setenv("EXPERTWIRE_NVRTC_DIR", "/compiler", 1);
    setenv("EXPERTWIRE_LOG", "info", 1);
    check_equal(env().cpu_isa, "plain");
    check(env().validate);
    check(env().nvtx);
    check_equal(env().cache_dir, "/kernels");
    check_equal(env().nvrtc_dir, "/compiler");
    check_equal(env().log, "info");
    setenv("EXPERTWIRE_LOG", "off", 1);
    check_equal(env().log, "info");  // read once
  });
}

void unknown_values_name_the_variable() {
  check_process([] {
    clear();
    setenv("EXPERTWIRE_CPU_ISA", "sse9", 1);
    check_throws(ErrorCode::InvalidArgument,
                 "EXPERTWIRE_CPU_ISA = \"sse9\": must be one of auto, plain, avx2, avx512, neon", [] { env(); });
  });
  check_process([] {
    clear();
    setenv("EXPERTWIRE_VALIDATE", "yes", 1);
    check_throws(ErrorCode::InvalidArgument, "EXPERTWIRE_VALIDATE = \"yes\": must be one of 0, 1", [] { env(); });
  });
}

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) {
  using namespace expertwire::test;
  return run_tests(argc, argv,
                   {{"defaults", defaults},
                    {"given_values", given_values},
                    {"unknown_values_name_the_variable", unknown_values_name_the_variable}});
}
