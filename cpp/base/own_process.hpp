// Which process an object belongs to: a forked child has a copy of it, and no part in what it stands for.
#pragma once

namespace expertwire {

class OwnProcess {
 public:
  OwnProcess() noexcept;
  bool is_inherited() const noexcept;  // this process is a forked child of the one that made it; costs no system call

 private:
  unsigned num_forks_;  // in this process's line, when it was made
};

}  // namespace expertwire
