/// @file
/// The one exception type of the library.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] expertwire {

/// What kind of error it is, and what that means for the runtime.
enum class ErrorCode {
  /// An argument is wrong; the text names it, what was given and what is allowed. The runtime is as before.
  InvalidArgument,
  /// The handle is empty, stale, or of another runtime. The runtime is as before.
  InvalidHandle,
  /// Well formed, but not done by this version, build or machine. The runtime is as before.
  Unsupported,
  /// Error::ranks() did not take part in time, exited, or closed. Under PeerLossPolicy::RAISE the runtime has ended.
  PeerLost,
  /// The operating system or the driver refused something, or memory ran out; carries the text of what refused.
  Backend,
};

/// Every error that the library raises on purpose. what() names the argument, what was given and what is allowed, or
/// who is missing and for how long. Only PeerLost fills in ranks(), operation() and epoch().
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);

  /// A PeerLost error.
  /// @param message    the whole text
  /// @param ranks      who is lost
  /// @param operation  "dispatch", "combine" or "construct"
  /// @param epoch      number of the operation of its kind on its lane, from 1; 0 outside an operation
  Error(const std::string& message, std::vector<int> ranks, std::string operation, std::uint32_t epoch);

  Error(const Error&) = default;
  Error& operator=(const Error&) = default;
  ~Error() override;

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
