// The kernel headers as text. Made by embed_kernels.cmake from src/expertwire/kernels.
#pragma once

#include <span>

namespace expertwire::cuda {

struct EmbeddedHeader {
  const char* name;  // path below the kernels' folder
  const char* text;  // its includes name other headers in the same way
};

std::span<const EmbeddedHeader> embedded_headers();  // by name, ascending

}  // namespace expertwire::cuda
