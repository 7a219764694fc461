// What programs of tests that need a GPU begin with.
#pragma once

namespace expertwire::test {

// CMakeLists.txt tells ctest that this exit status means skipped.
inline constexpr int kSkipped = 77;

// What main returns. Runs the test cases, or says why they cannot run here. Sets what ranks that share a GPU need:
// nobody may have used CUDA before.
int run_device_tests(int argc, char** argv);

int num_devices();

// Blocks for each of the grids of so many ranks on a device, such that all of them can run at once.
int shared_blocks(int num_ranks_on_device);

}  // namespace expertwire::test
