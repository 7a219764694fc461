// From what the user asked to a validated problem, and the agreement of all ranks on it.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.hpp"

namespace expertwire {

// Checks every field against every other and against the number of ranks, and fills in the defaults. Throws
// InvalidArgument or Unsupported with the field, the value and what is allowed.
Problem make_problem(const RuntimeConfig& config, int rank, int num_ranks);

// Collective. `local_error` is this rank's failure so far (empty: none): with one, it only
// tells the others and returns. Throws if another rank failed, or if ranks differ in a field that must be equal, naming
// the field and each rank's value.
void agree_on_config(Bootstrap& bootstrap, const RuntimeConfig& config, const std::string& local_error);

const char* to_string(DispatchLayout layout);
const char* to_string(CombineMode mode);
const char* to_string(DispatchDataType format);
const char* to_string(PeerLossPolicy policy);

}  // namespace expertwire
