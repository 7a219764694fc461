#include "base/descriptor.hpp"

#include <unistd.h>

#include <system_error>
#include <utility>

namespace expertwire {

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() { return std::exchange(fd_, -1); }

std::string system_error_text(const std::string& call, int error) {
  return call + ": " + std::generic_category().message(error);
}

}  // namespace expertwire
