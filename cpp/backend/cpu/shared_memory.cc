#include "backend/cpu/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/file_limit.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cpu {
namespace {

[[noreturn]] void fail(const std::string& call, int error, std::size_t bytes) {
  throw Error(ErrorCode::Backend, system_error_text(call, error) + " (" + std::to_string(bytes) + " bytes)");
}

Mapping map_shared(int fd, std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail("mmap of shared memory", errno, bytes);
  return Mapping(data, bytes);
}

}  // namespace

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping map_private(std::size_t bytes) {
  if (bytes == 0) return Mapping();
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail("mmap of private memory", errno, bytes);
  constexpr std::size_t kWorthHugePages = std::size_t{4} << 20;
  if (bytes >= kWorthHugePages) madvise(data, bytes, MADV_HUGEPAGE);  // a hint: fewer faults and misses where granted
  return Mapping(data, bytes);
}

std::shared_ptr<Segment> create_segment(std::size_t bytes) {
  if (const std::uint64_t most = largest_file_bytes(); bytes > most) {
    throw Error(ErrorCode::Backend, "shared memory of " + std::to_string(bytes) +
                                        " bytes: this process may make files of at most " + std::to_string(most) +
                                        " bytes (ulimit -f)");
  }
  auto segment = std::make_shared<Segment>();
  segment->descriptor = Descriptor(memfd_create("expertwire", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int fd = segment->descriptor.get();
  if (fd < 0) fail("memfd_create", errno, bytes);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail("ftruncate of shared memory", errno, bytes);
  // Nobody can shrink it under a peer's feet, which would be a SIGBUS there.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("sealing of shared memory", errno, bytes);
  segment->mapping = map_shared(fd, bytes);
  return segment;
}

std::shared_ptr<Segment> open_segment(Descriptor descriptor, std::size_t bytes) {
  struct stat status{};
  if (fstat(descriptor.get(), &status) != 0) fail("fstat of a peer's shared memory", errno, bytes);
  if (static_cast<std::size_t>(status.st_size) != bytes) {
    throw Error(ErrorCode::Backend, "a peer's shared memory has " + std::to_string(status.st_size) +
                                        " bytes, expected " + std::to_string(bytes));
  }
  auto segment = std::make_shared<Segment>();
  segment->mapping = map_shared(descriptor.get(), bytes);
  return segment;
}

}  // namespace expertwire::cpu
