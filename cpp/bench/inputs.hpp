// What the ranks bring: drawn from the seed, or read from files.
#pragma once

#include <vector>

#include "options.hpp"
#include "reference.hpp"

namespace expertwire::bench {

// Inputs of all ranks; the same for the same options, in every process. Throws UsageError.
std::vector<RankInput> make_inputs(const Options& options);

}  // namespace expertwire::bench
