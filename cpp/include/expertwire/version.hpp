/// @file
/// The version, in the one place that states it: the Python package and the CMake project read this line.
#pragma once

#include <string_view>

namespace [[gnu::visibility("default")]] expertwire {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace expertwire
