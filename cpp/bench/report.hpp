// How a result is shown: a table, and JSON, which `expertwire bench` reads as it reads its own.
#pragma once

#include <string>

#include "figures.hpp"

namespace expertwire::bench {

std::string table(const Result& result);
std::string json(const Result& result);

}  // namespace expertwire::bench
