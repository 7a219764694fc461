/// @file
/// Who takes part: a rank, a size, and two collectives used at set-up only. Nothing of the data path goes through here.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] expertwire {

/// One rank's end of a group. Derive from it to meet by means of your own; docs/cpp.md has an example.
///
/// Collectives are called by all ranks in the same order, from one thread of a rank at a time. An implementation bounds
/// its waits, and throws Error when it cannot complete: PeerLost with the missing ranks and operation "construct", or
/// Backend. Ranks that wait for one that threw must come to an end too, at the latest by their own bound.
class Bootstrap {
 public:
  virtual ~Bootstrap();

  /// This rank, from 0 to size() - 1; constant, and another one on each rank.
  virtual int rank() const = 0;
  /// Number of ranks, 1 to 1024; constant, and equal on all of them.
  virtual int size() const = 0;
  /// Collective. Contributes one string of bytes (any bytes, also none) and returns those of all ranks by rank. Lengths
  /// may differ between ranks. The library passes up to about a kilobyte for each rank, and experts_per_rank and a placement
  /// as text. It refuses a result that does not hold a string of each rank in its place.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  /// Collective. Returns once every rank has called; all_gather of nothing unless overridden.
  virtual void barrier();
};

/// One bootstrap for each of `size` threads of this process; hand each to its thread. A rank whose bootstrap is
/// destroyed while others wait for it counts as missing at once.
/// @param size       1 to 1024
/// @param timeout_s  bound of each collective in seconds, above 0 and at most 1e6
/// @throws Error InvalidArgument
std::vector<std::shared_ptr<Bootstrap>> make_local_bootstraps(int size, double timeout_s = 300.0);

/// Collective. Processes of one host and user meet at an abstract Unix socket named after `key` and the user; rank 0
/// serves. The object may serve several runtimes, one after another.
/// @param rank, size  such as a launcher's environment variables tell; at most 1024 ranks
/// @param key         any text; the same on all ranks of a job, different for jobs that run at the same time
/// @param timeout_s   bound of the meeting and of each collective in seconds, above 0 and at most 1e6
/// @throws Error InvalidArgument (also when two jobs meet under a key), PeerLost (who did not come, or left), Backend;
///         processes of another user are refused
std::shared_ptr<Bootstrap> make_host_bootstrap(int rank, int size, const std::string& key, double timeout_s = 300.0);

}  // namespace expertwire
