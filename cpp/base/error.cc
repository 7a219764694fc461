#include "expertwire/error.hpp"

#include <utility>

namespace expertwire {

Error::Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

Error::Error(const std::string& message, std::vector<int> ranks, std::string operation, std::uint32_t epoch)
    : std::runtime_error(message),
      code_(ErrorCode::PeerLost),
      ranks_(std::move(ranks)),
      operation_(std::move(operation)),
      epoch_(epoch) {}

// Here, and not in the header, so that the type has one home: programs on both sides of the library catch the same.
Error::~Error() = default;

}  // namespace expertwire
