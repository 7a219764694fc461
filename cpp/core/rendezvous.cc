#include "core/rendezvous.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

namespace expertwire {
namespace {

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// The name has room for 107 bytes. A long key is replaced by its FNV-1a hash; who joins then says the key itself.
SocketName socket_name(const std::string& key) {
  std::string text = "expertwire-" + std::to_string(::geteuid());
  if (key.size() <= 64) {
    text.append("-k").append(key);
  } else {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    text.append("-h").append(std::to_string(hash));
  }
  SocketName name;
  name.address.sun_family = AF_UNIX;
  std::memcpy(name.address.sun_path + 1, text.data(), text.size());  // a leading zero: the abstract namespace
  name.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return name;
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) throw_errno("socket(AF_UNIX)");
  return socket;
}

}  // namespace

std::string Meeting::place() const {
  return " at rendezvous key '" + key.substr(0, 80) + (key.size() > 80 ? "...'" : "'");
}

std::string process_text(pid_t pid) { return " (process " + std::to_string(pid) + ")"; }

void throw_errno(const std::string& what) { throw Error(ErrorCode::Backend, what + ": " + std::strerror(errno)); }

std::optional<Descriptor> try_bind(const Meeting& meeting) {
  Descriptor socket = make_socket();
  const SocketName name = socket_name(meeting.key);
  if (::bind(socket.get(), name.get(), name.length) == 0) return socket;
  if (errno != EADDRINUSE) throw_errno("bind" + meeting.place());
  return std::nullopt;
}

std::optional<FrameSocket> try_connect(const Meeting& meeting) {
  Descriptor socket = make_socket();
  const SocketName name = socket_name(meeting.key);
  if (::connect(socket.get(), name.get(), name.length) != 0) {
    const bool not_yet = errno == ECONNREFUSED || errno == ENOENT || errno == EAGAIN || errno == EINTR;
    if (!not_yet) throw_errno("connect" + meeting.place());
    return std::nullopt;
  }
  FrameSocket server(std::move(socket));
  if (server.peer_uid() != ::geteuid()) {
    throw Error(ErrorCode::Backend, "user " + std::to_string(server.peer_uid()) + process_text(server.peer_pid()) +
                                        " holds the socket" + meeting.place() + ": refused, as it is another user");
  }
  return server;
}

}  // namespace expertwire
