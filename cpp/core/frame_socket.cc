#include "core/frame_socket.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace expertwire {
namespace {

// The last digit is the version of this exchange: processes of different versions do not understand each other.
constexpr std::uint32_t kMagic = 0x45574231;

struct FrameHeader {
  std::uint32_t magic;
  FrameKind kind;
  std::uint64_t num_bytes;
};

}  // namespace

FrameSocket::FrameSocket(Descriptor socket) : socket_(std::move(socket)) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    throw Error(ErrorCode::Backend, std::string("SO_PEERCRED of a Unix socket: ") + std::strerror(errno));
  }
  peer_pid_ = credentials.pid;
  peer_uid_ = credentials.uid;
}

void FrameSocket::read_available() {
  std::array<char, 65536> chunk;
  while (!closed_) {
    const ssize_t num_read = ::recv(socket_.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (num_read > 0) {
      inbox_.append(chunk.data(), static_cast<std::size_t>(num_read));
    } else if (num_read < 0 && errno == EINTR) {
      continue;
    } else if (num_read < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      closed_ = true;
    }
  }
}

std::optional<Frame> FrameSocket::take_frame() {
  FrameHeader header;
  if (inbox_.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, inbox_.data(), sizeof(header));
  if (header.magic != kMagic || header.num_bytes > kMaxFrameBytes) {
    inbox_.clear();
    closed_ = true;  // not a peer of this version: nothing more of it can be understood
    return std::nullopt;
  }
  if (inbox_.size() - sizeof(header) < header.num_bytes) return std::nullopt;
  Frame frame{header.kind, inbox_.substr(sizeof(header), header.num_bytes)};
  inbox_.erase(0, sizeof(header) + header.num_bytes);
  return frame;
}

bool FrameSocket::send_frame(FrameKind kind, std::string_view body, const Deadline& deadline) {
  const FrameHeader header{kMagic, kind, body.size()};
  return send_bytes({reinterpret_cast<const char*>(&header), sizeof(header)}, deadline) && send_bytes(body, deadline);
}

bool FrameSocket::send_bytes(std::string_view bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t num_sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (num_sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(num_sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd entry{socket_.get(), POLLOUT, 0};
      if (::poll(&entry, 1, deadline.remaining_ms()) <= 0 && deadline.passed()) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void wait_readable(const std::vector<int>& descriptors, int timeout_ms) {
  std::vector<pollfd> entries;
  for (const int fd : descriptors) entries.push_back({fd, POLLIN, 0});
  // An interrupted wait looks to the caller like an early one: it looks at its sockets and its deadline, and waits
  // again.
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0 && errno != EINTR) {
    throw Error(ErrorCode::Backend, std::string("poll: ") + std::strerror(errno));
  }
}

std::string BodyReader::take(std::uint64_t num_bytes) {
  if (num_bytes > body_.size() - position_) {
    throw Error(ErrorCode::Backend, "a set-up message of another rank is cut short");
  }
  std::string taken = body_.substr(position_, num_bytes);
  position_ += num_bytes;
  return taken;
}

std::uint64_t BodyReader::number() {
  std::uint64_t value;
  std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
  return value;
}

}  // namespace expertwire
