#include "base/file_limit.hpp"

#include <sys/resource.h>

#include <limits>

namespace expertwire {

std::uint64_t largest_file_bytes() {
  rlimit limit{};
  const bool is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return is_limited ? std::uint64_t{limit.rlim_cur} : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace expertwire
