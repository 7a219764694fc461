// The one exception type of the library.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace expertwire {

enum class ErrorCode {
  InvalidArgument,  // an argument is wrong; the text names it, what was given and what is allowed
  InvalidHandle,    // empty, stale, or of another runtime
  Unsupported,      // well formed, but not done by this version, build or machine
  PeerLost,         // ranks() did not take part in time, exited, or closed
  Backend,          // the operating system or the driver refused something; carries its text
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  // PeerLost: which ranks, in which operation ("dispatch", "combine", "construct"), and its epoch (0 outside one).
  Error(const std::string& message, std::vector<int> ranks, std::string operation, std::uint32_t epoch)
      : std::runtime_error(message),
        code_(ErrorCode::PeerLost),
        ranks_(std::move(ranks)),
        operation_(std::move(operation)),
        epoch_(epoch) {}

  ErrorCode code() const noexcept { return code_; }
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  const std::string& operation() const noexcept { return operation_; }
  std::uint32_t epoch() const noexcept { return epoch_; }

 private:
  ErrorCode code_;
  std::vector<int> ranks_;
  std::string operation_;
  std::uint32_t epoch_ = 0;
};

}  // namespace expertwire
