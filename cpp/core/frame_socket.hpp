// Frames over a Unix stream socket, never blocking: what the processes of a host bootstrap speak.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/descriptor.hpp"
#include "core/bootstrap_deadline.hpp"

namespace expertwire {

enum class FrameKind : std::uint32_t {
  JOIN,     // to rank 0: size, rank and key of the sender
  WELCOME,  // from rank 0: every rank has joined
  DATA,     // to rank 0: one contribution; from rank 0: all of them
  LATE,     // to rank 0: the sender's time is up in the round given; asks for a FAILURE that names the culprits
  FAILURE,  // from rank 0: an error, to be thrown on every rank
};

struct Frame {
  FrameKind kind;
  std::string body;
};

constexpr std::uint64_t kMaxFrameBytes = std::uint64_t{1} << 30;

// One peer's end. After the peer has gone, frames that it sent before can still be taken.
class FrameSocket {
 public:
  explicit FrameSocket(Descriptor socket);

  int descriptor() const { return socket_.get(); }
  bool closed() const { return closed_; }
  pid_t peer_pid() const { return peer_pid_; }
  uid_t peer_uid() const { return peer_uid_; }

  void read_available();
  std::optional<Frame> take_frame();
  // False if the peer has gone or does not read in time.
  bool send_frame(FrameKind kind, std::string_view body, const Deadline& deadline);

 private:
  bool send_bytes(std::string_view bytes, const Deadline& deadline);

  Descriptor socket_;
  std::string inbox_;
  bool closed_ = false;
  pid_t peer_pid_ = 0;
  uid_t peer_uid_ = 0;
};

// Waits until one of `descriptors` can be read or its peer has gone, or for `timeout_ms`.
void wait_readable(const std::vector<int>& descriptors, int timeout_ms);

// Numbers and strings one after another in a frame's body.
class BodyWriter {
 public:
  BodyWriter& number(std::uint64_t value) {
    body_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  BodyWriter& text(std::string_view value) {
    number(value.size());
    body_.append(value);
    return *this;
  }
  const std::string& body() const { return body_; }

 private:
  std::string body_;
};

// Throws Error (Backend) when the body ends early.
class BodyReader {
 public:
  explicit BodyReader(std::string body) : body_(std::move(body)) {}
  std::uint64_t number();
  std::string text() { return take(number()); }

 private:
  std::string take(std::uint64_t num_bytes);

  std::string body_;
  std::size_t position_ = 0;
};

}  // namespace expertwire
