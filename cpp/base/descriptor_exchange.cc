#include "base/descriptor_exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "base/collective.hpp"
#include "expertwire/error.hpp"

namespace expertwire {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSetupTimeout{60};

// What each rank tells the others of its offer.
struct Announcement {
  std::uint64_t process = 0;  // random, and changed by a fork through pid
  std::int64_t pid = 0;
  std::uint64_t number = 0;  // identifies the offer within its process; also names the socket
  std::uint64_t bytes = 0;

  bool same_process(const Announcement& other) const { return process == other.process && pid == other.pid; }
};

std::uint64_t random_64() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

// Objects offered in this process by their number, for its ranks that are threads.
class LocalObjects {
 public:
  void add(std::uint64_t number, const std::shared_ptr<void>& object) {
    const std::lock_guard lock(mutex_);
    std::erase_if(objects_, [](const auto& entry) { return entry.second.expired(); });
    objects_[number] = object;
  }
  std::shared_ptr<void> find(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<void>> objects_;
};

LocalObjects& local_objects() {
  static LocalObjects objects;
  return objects;
}

[[noreturn]] void fail(const std::string& call) { throw Error(ErrorCode::Backend, system_error_text(call, errno)); }

struct SocketAddress {
  sockaddr_un address{};
  socklen_t length = 0;
};

SocketAddress abstract_address(const Announcement& who) {
  const std::string name = "expertwire-exchange-" + std::to_string(who.process) + "-" + std::to_string(who.pid) + "-" +
                           std::to_string(who.number);
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

Descriptor connect_to(int rank, const Announcement& peer) {
  Descriptor socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) fail("socket");
  const SocketAddress where = abstract_address(peer);
  if (connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&where.address), where.length) != 0) {
    fail("connect to rank " + std::to_string(rank) + " (ranks on one host share its network namespace)");
  }
  return socket_fd;
}

ucred credentials(const Descriptor& socket_fd) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket_fd.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) fail("SO_PEERCRED");
  return who;
}

// A message of one byte with room for one descriptor. `message` points into it: it stays where it is.
struct DescriptorMessage {
  char byte = 0;
  iovec payload{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};

  DescriptorMessage() {
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;
};

// A receiver that has gone is no error here: its own end of the exchange tells which rank that was.
void send_descriptor(const Descriptor& socket_fd, int fd) {
  DescriptorMessage out;
  cmsghdr* header = CMSG_FIRSTHDR(&out.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket_fd.get(), &out.message, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET)
    fail("sendmsg of a descriptor");
}

Descriptor receive_descriptor(int rank, const Descriptor& socket_fd) {
  DescriptorMessage in;
  const ssize_t num_read = recvmsg(socket_fd.get(), &in.message, MSG_CMSG_CLOEXEC);
  if (num_read < 0 && errno != ECONNRESET) fail("recvmsg of a descriptor");
  if (num_read <= 0) {
    throw Error(ErrorCode::Backend, "rank " + std::to_string(rank) + " gave up the exchange of descriptors");
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&in.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw Error(ErrorCode::Backend,
                "rank " + std::to_string(rank) +
                    " sent a descriptor for which this process has no room (its limit on open files)");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Descriptor(fd);
}

// For has_exited(); empty where the kernel has no such thing or hides the process.
Descriptor open_process(pid_t pid) {
  if (pid <= 0) return Descriptor();
  Descriptor process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid() && (errno == EMFILE || errno == ENFILE)) fail("pidfd_open of a peer");
  return process;
}

// One rank's part in the exchange. Everything it holds open is closed when it fails, which is how peers that wait for it
// learn that at once; the error itself is told when all ranks agree.
class Exchange {
 public:
  Exchange(const std::vector<Announcement>& all, const Announcement& mine, const Descriptor& own, Descriptor listener)
      : all_(all), mine_(mine), own_(own), listener_(std::move(listener)), connections_(all.size()) {}

  // Connections are all made before any is served: with a backlog for every rank none of them blocks.
  std::vector<Received> run() {
    std::vector<Received> received(all_.size());
    for (std::size_t peer = 0; peer < all_.size(); ++peer) {
      received[peer].bytes = all_[peer].bytes;
      if (all_[peer].same_process(mine_)) {
        received[peer].local = find_local(peer);
      } else {
        connections_[peer] = connect_to(static_cast<int>(peer), all_[peer]);
        ++num_unserved_;
      }
    }
    const auto deadline = Clock::now() + kSetupTimeout;
    for (std::vector<pollfd> entries = wait(deadline); !entries.empty(); entries = wait(deadline)) {
      if (entries.front().revents != 0) serve();
      for (std::size_t peer = 0; peer < all_.size(); ++peer) {
        if (entries[peer + 1].revents != 0) received[peer] = take(peer);
      }
    }
    return received;
  }

 private:
  std::shared_ptr<void> find_local(std::size_t peer) const {
    std::shared_ptr<void> object = local_objects().find(all_[peer].number);
    if (object == nullptr) throw Error(ErrorCode::Backend, "rank " + std::to_string(peer) + " of this process is gone");
    return object;
  }

  // What is ready of the listener and then the connections by rank; nothing once there is nothing left to wait for.
  std::vector<pollfd> wait(Clock::time_point deadline) const {
    std::vector<pollfd> entries{{num_unserved_ > 0 ? listener_.get() : -1, POLLIN, 0}};
    bool done = num_unserved_ == 0;
    for (const Descriptor& connection : connections_) {
      entries.push_back({connection.get(), POLLIN, 0});  // poll skips what is negative
      done = done && !connection.valid();
    }
    if (done) return {};
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0)
        throw Error(ErrorCode::Backend, "exchange of descriptors: a peer did not answer within 60 s");
      const int ready = poll(entries.data(), entries.size(), static_cast<int>(left.count()));
      if (ready > 0) return entries;
      if (ready < 0 && errno != EINTR) fail("poll");
    }
  }

  // Hands the descriptor to a process of this user; others are closed unanswered.
  void serve() {
    const Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) return;
      fail("accept");
    }
    if (credentials(connection).uid != geteuid()) return;
    send_descriptor(connection, own_.get());
    --num_unserved_;
  }

  Received take(std::size_t peer) {
    const Descriptor connection = std::move(connections_[peer]);
    const ucred who = credentials(connection);
    if (who.uid != geteuid())
      throw Error(ErrorCode::Backend, "rank " + std::to_string(peer) + " belongs to another user");
    Received one;
    one.bytes = all_[peer].bytes;
    one.descriptor = receive_descriptor(static_cast<int>(peer), connection);
    one.process = open_process(who.pid);
    return one;
  }

  const std::vector<Announcement>& all_;
  const Announcement& mine_;
  const Descriptor& own_;
  const Descriptor listener_;
  std::vector<Descriptor> connections_;  // to the ranks of other processes that have not answered yet
  int num_unserved_ = 0;
};

}  // namespace

std::vector<Received> exchange_descriptors(Bootstrap& bootstrap, const Offer& own) {
  Announcement mine;
  Descriptor listener;
  succeed_together(bootstrap, [&] {
    static const std::uint64_t process = random_64();
    mine = {process, getpid(), random_64(), own.bytes};
    local_objects().add(mine.number, own.local);
    listener = listen_at(mine, bootstrap.size());
  });
  const std::vector<Announcement> all = gather_values(bootstrap, mine);
  std::vector<Received> received;
  succeed_together(bootstrap, [&] { received = Exchange(all, mine, own.descriptor, std::move(listener)).run(); });
  return received;
}

bool has_exited(const Descriptor& process) {
  if (!process.valid()) return false;
  pollfd entry{process.get(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace expertwire
