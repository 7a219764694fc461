// The bounded waits of the bootstraps.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "base/rank_list.hpp"
#include "expertwire/error.hpp"

namespace expertwire {

inline std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

inline void check_bootstrap_arguments(int size, double timeout_s) {
  if (size < 1 || size > kMaxRanks) {
    throw Error(ErrorCode::InvalidArgument,
                "size = " + std::to_string(size) + ": must be between 1 and " + std::to_string(kMaxRanks));
  }
  if (!(timeout_s > 0.0 && timeout_s <= 1e6)) {
    throw Error(ErrorCode::InvalidArgument,
                "timeout_s = " + std::to_string(timeout_s) + ": must be above 0 and at most 1000000");
  }
}

// A point in time after which a wait gives up.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(double seconds)
      : time_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

  Clock::time_point time() const { return time_; }
  bool passed() const { return Clock::now() >= time_; }

  // For poll: rounded up, so that a wait never ends just before the deadline and spins.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(time_ - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 60'000));
  }

 private:
  Clock::time_point time_;
};

}  // namespace expertwire
