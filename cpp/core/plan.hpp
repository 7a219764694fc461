// The plan for a problem on a machine: a pure function, testable anywhere.
#pragma once

#include "backend/backend.hpp"

namespace expertwire {

Plan plan(const Problem& problem, const Machine& machine);

}  // namespace expertwire
