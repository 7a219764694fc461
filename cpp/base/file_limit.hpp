// How large a file this process may make.
#pragma once

#include <cstdint>

namespace expertwire {

// The limit of the process (ulimit -f), the largest number if there is none. It holds for shared memory, too. Who goes
// beyond is ended by a signal unless the program takes care of that: ask first.
std::uint64_t largest_file_bytes();

}  // namespace expertwire
