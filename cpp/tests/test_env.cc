// The environment is read once per process, so each case runs in a process of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "base/env.hpp"
#include "check.hpp"
#include "expertwire/version.hpp"

namespace expertwire::test {
namespace {

void in_child(const std::function<void()>& body, const Location& where = Location::current()) {
  std::cout.flush();
  const pid_t child = fork();
  check(child >= 0, "fork failed", where);
  if (child == 0) {
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      status = 1;
    }
    _exit(status);
  }
  int status = 0;
  check_equal(waitpid(child, &status, 0), child, where);
  check_equal(status, 0, where);
}

void clear() {
  for (const char* name : {"EXPERTWIRE_CPU_ISA", "EXPERTWIRE_VALIDATE", "EXPERTWIRE_CACHE_DIR", "EXPERTWIRE_LOG"}) {
    unsetenv(name);
  }
}

void defaults() {
  in_child([] {
    clear();
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    check_equal(env().cpu_isa, "auto");
    check(!env().validate);
    check_equal(env().log, "off");
    check_equal(env().cache_dir, "/xdg/expertwire/" + std::string(kVersion));
  });
  in_child([] {
    clear();
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "/home/somebody", 1);
    check_equal(env().cache_dir, "/home/somebody/.cache/expertwire/" + std::string(kVersion));
  });
}

void given_values() {
  in_child([] {
    setenv("EXPERTWIRE_CPU_ISA", "plain", 1);
    setenv("EXPERTWIRE_VALIDATE", "1", 1);
    setenv("EXPERTWIRE_CACHE_DIR", "/kernels", 1);
    setenv("EXPERTWIRE_LOG", "info", 1);
    check_equal(env().cpu_isa, "plain");
    check(env().validate);
    check_equal(env().cache_dir, "/kernels");
    check_equal(env().log, "info");
    setenv("EXPERTWIRE_LOG", "off", 1);
    check_equal(env().log, "info");  // read once
  });
}

void unknown_values_name_the_variable() {
  in_child([] {
    clear();
    setenv("EXPERTWIRE_CPU_ISA", "sse9", 1);
    check_throws(ErrorCode::InvalidArgument,
                 "EXPERTWIRE_CPU_ISA = \"sse9\": must be one of auto, plain, avx2, avx512, neon", [] { env(); });
  });
  in_child([] {
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
