// Set-up: every rank hands a file descriptor to every rank of its host, and learns how to tell whether a peer still runs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/descriptor.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire {

struct Offer {
  const Descriptor& descriptor;  // ranks of other processes receive a duplicate
  std::shared_ptr<void> local;   // ranks of this process receive this instead; of one type in all of a process's ranks
  std::uint64_t bytes = 0;       // size of what is behind the descriptor
};

// What one rank offered; `descriptor` or `local` is set.
struct Received {
  Descriptor descriptor;
  std::shared_ptr<void> local;
  std::uint64_t bytes = 0;
  Descriptor process;  // pidfd; empty for this process's own ranks and where the kernel has none
};

// Collective; the result is by rank. Descriptors travel over Unix sockets in the abstract namespace, and only between
// processes of one user. Throws on every rank if any rank fails. Afterwards no peer needs `own` any more.
std::vector<Received> exchange_descriptors(Bootstrap& bootstrap, const Offer& own);

// True once the process behind a pidfd has ended; false where there is none.
bool has_exited(const Descriptor& process);

}  // namespace expertwire
