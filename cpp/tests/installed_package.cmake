# Installs the built library below PLACE, then configures, builds and runs the examples against that alone: by CMake, and one
# by pkg-config.
cmake_minimum_required(VERSION 3.22)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(prefix ${PLACE}/prefix)
file(REMOVE_RECURSE ${PLACE})
run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --component cpp --prefix ${prefix})
if(NOT WITH_MPI)
  set(without_mpi -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
endif()
run(${CMAKE_COMMAND} -S ${EXAMPLES} -B ${PLACE}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${CONFIG}
  -DCMAKE_CXX_COMPILER=${COMPILER} "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wconversion -Werror" -DCMAKE_PREFIX_PATH=${prefix}
  -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF ${without_mpi})
file(STRINGS ${PLACE}/build/CMakeCache.txt found REGEX "^expertwire_DIR:")
if(NOT found MATCHES "=${prefix}/")
  message(FATAL_ERROR "another package was found: ${found}")
endif()
run(${CMAKE_COMMAND} --build ${PLACE}/build --config ${CONFIG})
run(${CMAKE_CTEST_COMMAND} --test-dir ${PLACE}/build -C ${CONFIG} --output-on-failure --no-tests=error)

find_program(pkg_config pkg-config)
if(NOT pkg_config)
  message(STATUS "pkg-config is not here: not tried")
  return()
endif()
file(GLOB_RECURSE description ${prefix}/*/expertwire.pc)
get_filename_component(folder ${description} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${folder})
execute_process(COMMAND ${pkg_config} --cflags --libs expertwire OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY
  OUTPUT_STRIP_TRAILING_WHITESPACE)
separate_arguments(flags UNIX_COMMAND ${flags})
run(${COMPILER} -std=c++20 -pthread ${EXAMPLES}/quickstart.cc ${flags} -o ${PLACE}/quickstart)
execute_process(COMMAND ${pkg_config} --variable=libdir expertwire OUTPUT_VARIABLE libdir COMMAND_ERROR_IS_FATAL ANY
  OUTPUT_STRIP_TRAILING_WHITESPACE)
set(ENV{LD_LIBRARY_PATH} ${libdir})
run(${PLACE}/quickstart)
