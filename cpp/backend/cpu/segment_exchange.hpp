// Set-up: every rank maps every rank's segment and learns how to tell whether its process still runs.
#pragma once

#include <memory>
#include <vector>

#include "backend/cpu/shared_memory.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire::cpu {

struct Peer {
  std::shared_ptr<Segment> segment;
  Descriptor process;  // pidfd; empty for this process's own ranks and where the kernel has none
};

// Collective. Descriptors travel over Unix sockets in the abstract namespace, and only between processes of one user.
// Ranks of one process share the owner's mapping. Throws on every rank if any rank fails.
std::vector<Peer> exchange_segments(Bootstrap& bootstrap, std::shared_ptr<Segment> own);

// True once the process behind `peer` has ended.
bool has_exited(const Peer& peer);

// Collective. Throws Backend on every rank if any rank's `local_error` is not empty, naming the ranks.
void agree_on_success(Bootstrap& bootstrap, const std::string& local_error);

}  // namespace expertwire::cpu
