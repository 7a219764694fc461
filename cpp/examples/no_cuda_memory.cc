#include "memory.hpp"

std::unique_ptr<Memory> make_cuda_memory(int) { return nullptr; }
