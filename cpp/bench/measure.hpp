// The measuring loop of one rank. The method is that of `expertwire bench`: check, warm up, time pairs of dispatch and
// combine back to back, check again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "options.hpp"
#include "reference.hpp"

namespace expertwire::bench {

// What can be timed, in the order of tables. Alone: on CPUs by the caller's clock, on GPUs by events around a captured graph,
// per pair. "-launch": plain launches, by events. "-host": what a call costs its caller, who does not wait for the GPU.
inline constexpr const char* kPhases[] = {"dispatch",       "combine",     "pair",          "dispatch-launch",
                                          "combine-launch", "pair-launch", "dispatch-host", "combine-host"};

// Nanoseconds of every timed call of one rank, by phase.
using RankTimes = std::map<std::string, std::vector<std::int64_t>>;

// Collective. The times of all ranks, by rank. Throws Error on every rank if any of them failed or was wrong.
std::vector<RankTimes> measure(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options,
                               const std::vector<RankInput>& inputs);

}  // namespace expertwire::bench
