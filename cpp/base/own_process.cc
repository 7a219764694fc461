#include "base/own_process.hpp"

#include <pthread.h>

#include <atomic>

namespace expertwire {
namespace {

std::atomic<unsigned> num_forks{0};

void count_fork() { num_forks.fetch_add(1, std::memory_order_relaxed); }

[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

OwnProcess::OwnProcess() noexcept : num_forks_(num_forks.load(std::memory_order_relaxed)) {}

bool OwnProcess::is_inherited() const noexcept { return num_forks.load(std::memory_order_relaxed) != num_forks_; }

}  // namespace expertwire
