// Who takes part: a rank, a size, and two collectives used at set-up only. Nothing of the data path goes through here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace expertwire {

// Collectives are called by all ranks in the same order, from one thread of a rank at a time. An implementation bounds
// its waits and throws Error (PeerLost with operation "construct", or Backend) when it cannot complete.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Contributes one byte string and returns those of all ranks by rank. Lengths may differ.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  virtual void barrier() { all_gather({}); }
};

// One bootstrap for each of `size` threads of this process.
std::vector<std::shared_ptr<Bootstrap>> make_local_bootstraps(int size, double timeout_s = 300.0);

// Processes of one host meet at an abstract Unix socket named after `key` and the user; rank 0 serves. Every rank
// passes the same key and size. Peers of another user are refused. The object may serve several runtimes, one after another.
std::shared_ptr<Bootstrap> make_host_bootstrap(int rank, int size, const std::string& key, double timeout_s = 300.0);

}  // namespace expertwire
