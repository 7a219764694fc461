// Set-up: every rank maps every rank's segment and learns how to tell whether its process still runs.
#pragma once

#include <memory>
#include <vector>

#include "backend/cpu/shared_memory.hpp"
#include "base/descriptor.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire::cpu {

struct Peer {
  std::shared_ptr<Segment> segment;
  Descriptor process;  // for has_exited()
};

// Collective. Ranks of one process share the owner's mapping. Throws on every rank if any rank fails.
std::vector<Peer> exchange_segments(Bootstrap& bootstrap, std::shared_ptr<Segment> own);

}  // namespace expertwire::cpu
