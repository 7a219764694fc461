// From what the user asked to a validated problem, and the agreement of all ranks on it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "expertwire/error.hpp"

namespace expertwire {

// Checks every field against every other and against the number of ranks, and fills in the defaults. Throws
// InvalidArgument or Unsupported with the field, the value and what is allowed.
Problem make_problem(const RuntimeConfig& config, int rank, int num_ranks);

// What all ranks must agree on, a value on each line.
std::string describe(const RuntimeConfig& config, int num_ranks);

// Collective. `failure` is what ended this rank's part so far: with one, it only tells the others and returns. Throws if
// another rank failed, or if ranks differ in a field, naming the field and each rank's value.
void agree_on_config(Bootstrap& bootstrap, const std::string& description, const std::optional<Error>& failure);
// The same for a placement that is to replace another.
void agree_on_placement(Bootstrap& bootstrap, const std::vector<int>& placement, const std::optional<Error>& failure);

}  // namespace expertwire
