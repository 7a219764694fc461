// A file descriptor with an owner.
#pragma once

#include <string>

namespace expertwire {

// Closes on destruction. That never shuts a socket down, since a forked child may hold a copy of it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

// "memfd_create: Too many open files"
std::string system_error_text(const std::string& call, int error);

}  // namespace expertwire
