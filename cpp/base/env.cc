#include "base/env.hpp"

#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "expertwire/error.hpp"
#include "expertwire/version.hpp"

namespace expertwire {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

// The value of a variable that takes one of a few words; the first is what unset or empty means.
std::string_view choice(const char* name, std::initializer_list<std::string_view> allowed) {
  const std::string_view value = variable(name);
  if (value.empty()) return *allowed.begin();
  std::string words;
  for (const std::string_view word : allowed) {
    if (word == value) return word;
    words += words.empty() ? "" : ", ";
    words += word;
  }
  throw Error(ErrorCode::InvalidArgument,
              std::string(name) + " = \"" + std::string(value) + "\": must be one of " + words);
}

std::string cache_dir() {
  if (const std::string_view given = variable("EXPERTWIRE_CACHE_DIR"); !given.empty()) return std::string(given);
  std::string base(variable("XDG_CACHE_HOME"));
  if (base.empty() || base.front() != '/') {  // the XDG rules: a relative path is to be ignored
    base = variable("HOME");
    if (base.empty()) return base;
    base += "/.cache";
  }
  return base + "/expertwire/" + std::string(kVersion);
}

Env read_env() {
  Env result;
  result.cpu_isa = choice("EXPERTWIRE_CPU_ISA", {"auto", "plain", "avx2", "avx512", "neon"});
  result.validate = choice("EXPERTWIRE_VALIDATE", {"0", "1"}) == "1";
  result.cache_dir = cache_dir();
  result.nvrtc_dir = variable("EXPERTWIRE_NVRTC_DIR");
  result.nvtx = choice("EXPERTWIRE_NVTX", {"0", "1"}) == "1";
  result.log = choice("EXPERTWIRE_LOG", {"off", "info"});
  return result;
}

}  // namespace

const Env& env() {
  static const Env instance = read_env();
  return instance;
}

}  // namespace expertwire
