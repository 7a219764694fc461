#include "device_test.hpp"

#include <stdlib.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/context.hpp"
#include "bench/cuda_place.hpp"
#include "support.hpp"

namespace expertwire::test {

int run_device_tests(int argc, char** argv) {
  // As many hardware queues as there can be: kernels of ranks that wait for each other must not stand in one line.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (const std::optional<std::string> why = cuda_why_unusable()) {
    std::cout << "skipped: no CUDA device: " << *why << std::endl;
    return kSkipped;
  }
  std::vector<std::unique_ptr<cuda::PrimaryContext>> kept;  // or each test would make the contexts anew
  for (int device = 0; device < num_devices(); ++device) kept.push_back(std::make_unique<cuda::PrimaryContext>(device));
  return run_test_cases(argc, argv);
}

int num_devices() { return bench::num_cuda_devices(); }

int shared_blocks(int num_ranks_on_device) {
  return std::max(1, bench::CudaPlace(0).num_sms() / num_ranks_on_device / 2);
}

}  // namespace expertwire::test
