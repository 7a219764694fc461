# Writes the kernel headers into a C++ file:
#   cmake -D KERNELS=<folder> -D HEADERS=<paths below it> -D OUTPUT=<file> -P embed_kernels.cmake
#
# NVRTC looks a header up by the very words of the include, not relative to the file that includes it. So includes are
# rewritten to paths below the folder, and every header has one name.
cmake_minimum_required(VERSION 3.22)

list(SORT HEADERS)
list(LENGTH HEADERS count)
set(entries "")
foreach(name IN LISTS HEADERS)
  file(READ ${KERNELS}/${name} text)
  cmake_path(GET name PARENT_PATH folder)
  string(REGEX MATCHALL "#include \"[^\"]+\"" includes "${text}")
  list(REMOVE_DUPLICATES includes)
  foreach(include IN LISTS includes)
    string(REGEX REPLACE "#include \"([^\"]+)\"" "\\1" target "${include}")
    cmake_path(ABSOLUTE_PATH target BASE_DIRECTORY "/${folder}" NORMALIZE)
    string(REGEX REPLACE "^/" "" target "${target}")
    string(REPLACE "${include}" "#include \"${target}\"" text "${text}")
  endforeach()
  string(APPEND entries "    {\"${name}\", R\"cuh(${text})cuh\"},\n")
endforeach()

file(WRITE ${OUTPUT} "// Made by embed_kernels.cmake; change the kernel headers instead.
#include \"backend/cuda/embedded_kernels.hpp\"

#include <array>

namespace expertwire::cuda {
namespace {

constexpr std::array<EmbeddedHeader, ${count}> kHeaders{{
${entries}}};

}  // namespace

std::span<const EmbeddedHeader> embedded_headers() { return kHeaders; }

}  // namespace expertwire::cuda
")
