// Processes made by fork: only while this program has one thread, and holds nothing that a child may not inherit.
#pragma once

#include <sys/types.h>

#include <functional>

#include "support.hpp"

namespace expertwire::test {

// Runs body in a process of its own.
class Process {
 public:
  explicit Process(const std::function<void()>& body);
  bool wait() const;                    // for its end; true if it ended well: without an exception or a failed REQUIRE
  bool is_killed_by(int signal) const;  // waits for its end, too
  void kill(int signal) const;

 private:
  int end() const;  // its status, once

  pid_t pid_;
};

// Runs body(0) ... body(num - 1) at once in processes of their own, and fails if one does.
void check_processes(int num, const std::function<void(int)>& body, const Location& where = Location::current());

// The same for a single one.
inline void check_process(const std::function<void()>& body, const Location& where = Location::current()) {
  check_processes(1, [&body](int) { body(); }, where);
}

}  // namespace expertwire::test
