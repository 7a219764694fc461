# Installs the built library below PLACE, then configures, builds and runs the example consumer against that alone.
cmake_minimum_required(VERSION 3.22)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${PLACE})
run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --component cpp --prefix ${PLACE}/prefix)
set(flags)
if(SANITIZE)
  set(flags -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})  # a library built for a sanitizer needs its run time
endif()
run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${PLACE}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${CONFIG}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${PLACE}/prefix -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF ${flags})
file(STRINGS ${PLACE}/build/CMakeCache.txt found REGEX "^expertwire_DIR:")
if(NOT found MATCHES "=${PLACE}/prefix/")
  message(FATAL_ERROR "another package was found: ${found}")
endif()
run(${CMAKE_COMMAND} --build ${PLACE}/build --config ${CONFIG})
run(${CMAKE_COMMAND} --build ${PLACE}/build --config ${CONFIG} --target run)
