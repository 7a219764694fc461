// The environment is read once per process, so each case runs in a process of its own.
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

#include "base/env.hpp"
#include "expertwire/version.hpp"
#include "process.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

void clear() {
  for (const char* name : {"EXPERTWIRE_CPU_ISA", "EXPERTWIRE_VALIDATE", "EXPERTWIRE_CACHE_DIR", "EXPERTWIRE_NVRTC_DIR",
                           "EXPERTWIRE_LOG", "EXPERTWIRE_NVTX"}) {
    unsetenv(name);
  }
}

TEST_CASE("defaults") {
  check_process([] {
    clear();
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    REQUIRE_EQ(env().cpu_isa, "auto");
    REQUIRE(!env().validate);
    REQUIRE(!env().nvtx);
    REQUIRE_EQ(env().log, "off");
    REQUIRE_EQ(env().nvrtc_dir, "");
    REQUIRE_EQ(env().cache_dir, "/xdg/expertwire/" + std::string(kVersion));
  });
  check_process([] {
    clear();
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "/home/somebody", 1);
    REQUIRE_EQ(env().cache_dir, "/home/somebody/.cache/expertwire/" + std::string(kVersion));
  });
}

TEST_CASE("given values") {
  check_process([] {
    setenv("EXPERTWIRE_CPU_ISA", "plain", 1);
    setenv("EXPERTWIRE_VALIDATE", "1", 1);
    setenv("EXPERTWIRE_NVTX", "1", 1);
    setenv("EXPERTWIRE_CACHE_DIR", "/kernels", 1);
    setenv("EXPERTWIRE_NVRTC_DIR", "/compiler", 1);
    setenv("EXPERTWIRE_LOG", "info", 1);
    REQUIRE_EQ(env().cpu_isa, "plain");
    REQUIRE(env().validate);
    REQUIRE(env().nvtx);
    REQUIRE_EQ(env().cache_dir, "/kernels");
    REQUIRE_EQ(env().nvrtc_dir, "/compiler");
    REQUIRE_EQ(env().log, "info");
    setenv("EXPERTWIRE_LOG", "off", 1);
    REQUIRE_EQ(env().log, "info");  // read once
  });
}

TEST_CASE("unknown values name the variable") {
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
