// Where the processes of a host bootstrap meet: an abstract Unix socket named after a key and the user.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "core/frame_socket.hpp"

namespace expertwire {

struct Meeting {
  int rank;
  int size;
  std::string key;
  double timeout_s;

  std::string place() const;  // " at rendezvous key '...'", for error texts
};

std::string process_text(pid_t pid);  // " (process 123)"
[[noreturn]] void throw_errno(const std::string& what);

// The name is bound and not listened to; nothing if it is in use.
std::optional<Descriptor> try_bind(const Meeting& meeting);
// Nothing if nobody listens, now. Throws if another user does.
std::optional<FrameSocket> try_connect(const Meeting& meeting);

}  // namespace expertwire
