#include "backend/cpu/segment_exchange.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "expertwire/error.hpp"

namespace expertwire::cpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSetupTimeout{60};

// What each rank tells the others of its segment.
struct Announcement {
  std::uint64_t process = 0;  // random, and changed by a fork through pid
  std::int64_t pid = 0;
  std::uint64_t segment = 0;  // identifies the segment within its process; also names the socket
  std::uint64_t bytes = 0;

  bool same_process(const Announcement& other) const { return process == other.process && pid == other.pid; }
};

std::uint64_t random_64() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

// Segments of this process by their number, so that ranks that are threads share one mapping.
class LocalSegments {
 public:
  void add(std::uint64_t number, const std::shared_ptr<Segment>& segment) {
    const std::lock_guard lock(mutex_);
    std::erase_if(segments_, [](const auto& entry) { return entry.second.expired(); });
    segments_[number] = segment;
  }
  std::shared_ptr<Segment> find(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = segments_.find(number);
    return found == segments_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<Segment>> segments_;
};

LocalSegments& local_segments() {
  static LocalSegments segments;
  return segments;
}

[[noreturn]] void fail(const std::string& call) { throw Error(ErrorCode::Backend, system_error_text(call, errno)); }

struct SocketAddress {
  sockaddr_un address{};
  socklen_t length = 0;
};

SocketAddress abstract_address(const Announcement& who) {
  const std::string name = "expertwire-segment-" + std::to_string(who.process) + "-" + std::to_string(who.pid) + "-" +
                           std::to_string(who.segment);
  SocketAddress result;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // a leading zero: no name in the file system
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Descriptor listen_at(const Announcement& own, int backlog) {
  Descriptor socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) fail("socket");
  const SocketAddress where = abstract_address(own);
  if (bind(socket_fd.get(), reinterpret_cast<const sockaddr*>(&where.address), where.length) != 0) fail("bind");
  if (listen(socket_fd.get(), backlog) != 0) fail("listen");
  return socket_fd;
}

Descriptor connect_to(const Announcement& peer) {
  Descriptor socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) fail("socket");
  const SocketAddress where = abstract_address(peer);
  if (connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&where.address), where.length) != 0) {
    fail("connect to a peer's socket (ranks on one host share its network namespace)");
  }
  return socket_fd;
}

void wait_readable(const Descriptor& socket_fd, Clock::time_point deadline) {
  pollfd entry{socket_fd.get(), POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0)
      throw Error(ErrorCode::Backend, "exchange of shared memory: a peer did not answer within 60 s");
    const int ready = poll(&entry, 1, static_cast<int>(left.count()));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("poll");
  }
}

ucred credentials(const Descriptor& socket_fd) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket_fd.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) fail("SO_PEERCRED");
  return who;
}

// Control data of one message that carries one descriptor.
union ControlData {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

void send_descriptor(const Descriptor& socket_fd, int fd) {
  char byte = 0;
  iovec payload{&byte, 1};
  ControlData control{};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket_fd.get(), &message, MSG_NOSIGNAL) < 0) fail("sendmsg of a descriptor");
}

Descriptor receive_descriptor(const Descriptor& socket_fd, Clock::time_point deadline) {
  wait_readable(socket_fd, deadline);
  char byte = 0;
  iovec payload{&byte, 1};
  ControlData control{};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  if (recvmsg(socket_fd.get(), &message, MSG_CMSG_CLOEXEC) < 0) fail("recvmsg of a descriptor");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS)
    throw Error(ErrorCode::Backend, "a peer sent no descriptor (it may be out of descriptors)");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Descriptor(fd);
}

// Accepts `count` connections of this user and hands each the descriptor; those of other users are closed unanswered.
void serve_descriptor(const Descriptor& listener, int fd, int count, Clock::time_point deadline) {
  while (count > 0) {
    wait_readable(listener, deadline);
    const Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      fail("accept");
    }
    if (credentials(connection).uid != geteuid()) continue;
    send_descriptor(connection, fd);
    --count;
  }
}

std::vector<Announcement> announce(Bootstrap& bootstrap, const Announcement& own) {
  std::vector<Announcement> all;
  for (const std::string& text : bootstrap.all_gather(std::string(reinterpret_cast<const char*>(&own), sizeof own))) {
    Announcement one;
    if (text.size() != sizeof one)
      throw Error(ErrorCode::Backend, "the group's all_gather returned " + std::to_string(text.size()) +
                                          " bytes, expected " + std::to_string(sizeof one));
    std::memcpy(&one, text.data(), sizeof one);
    all.push_back(one);
  }
  return all;
}

// Connections are all made before any is served: with a backlog for every rank none of them blocks.
std::vector<Peer> map_peers(const std::vector<Announcement>& all, int rank, const std::shared_ptr<Segment>& own,
                            const Descriptor& listener) {
  const Announcement& mine = all[static_cast<std::size_t>(rank)];
  const auto deadline = Clock::now() + kSetupTimeout;
  std::vector<Descriptor> connections(all.size());
  int num_remote = 0;
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].same_process(mine)) continue;
    connections[peer] = connect_to(all[peer]);
    ++num_remote;
  }
  serve_descriptor(listener, own->descriptor.get(), num_remote, deadline);
  std::vector<Peer> peers(all.size());
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (!connections[peer].valid()) {
      peers[peer].segment = local_segments().find(all[peer].segment);
      if (peers[peer].segment == nullptr)
        throw Error(ErrorCode::Backend, "rank " + std::to_string(peer) + " of this process is gone");
      continue;
    }
    const ucred who = credentials(connections[peer]);
    if (who.uid != geteuid())
      throw Error(ErrorCode::Backend, "rank " + std::to_string(peer) + " belongs to another user");
    if (who.pid > 0) peers[peer].process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, who.pid, 0)));
    peers[peer].segment = open_segment(receive_descriptor(connections[peer], deadline), all[peer].bytes);
  }
  return peers;
}

}  // namespace

void agree_on_success(Bootstrap& bootstrap, const std::string& local_error) {
  std::string text;
  const std::vector<std::string> all = bootstrap.all_gather(local_error);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + all[rank];
  }
  if (!text.empty()) throw Error(ErrorCode::Backend, text);
}

std::vector<Peer> exchange_segments(Bootstrap& bootstrap, std::shared_ptr<Segment> own) {
  static const std::uint64_t process = random_64();
  Announcement mine{process, getpid(), random_64(), own->mapping.bytes()};
  local_segments().add(mine.segment, own);
  Descriptor listener;
  std::string error;
  try {
    listener = listen_at(mine, bootstrap.size());
  } catch (const Error& failure) {
    error = failure.what();
  }
  agree_on_success(bootstrap, error);
  const std::vector<Announcement> all = announce(bootstrap, mine);
  std::vector<Peer> peers;
  try {
    peers = map_peers(all, bootstrap.rank(), own, listener);
  } catch (const Error& failure) {
    error = failure.what();
  }
  agree_on_success(bootstrap, error);
  own->descriptor = Descriptor();
  return peers;
}

bool has_exited(const Peer& peer) {
  if (!peer.process.valid()) return false;
  pollfd entry{peer.process.get(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace expertwire::cpu
