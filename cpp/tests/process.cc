#include "process.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <iostream>
#include <vector>

namespace expertwire::test {

Process::Process(const std::function<void()>& body) : pid_(::fork()) {
  if (pid_ != 0) return;
  int status = 1;
  try {
    body();
    status = 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  } catch (...) {  // a failed REQUIRE, which has told its line
  }
  ::_exit(status);
}

int Process::end() const {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

bool Process::wait() const {
  const int status = end();
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool Process::is_killed_by(int signal) const {
  const int status = end();
  return WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

void Process::kill(int signal) const { ::kill(pid_, signal); }

void check_processes(int num, const std::function<void(int)>& body, const Location& where) {
  std::vector<Process> processes;
  for (int i = 0; i < num; ++i) processes.emplace_back([&] { body(i); });
  bool all_ended_well = true;
  for (const Process& process : processes) all_ended_well = process.wait() && all_ended_well;
  if (!all_ended_well) fail_at(where, "a process failed; its text is above");
}

}  // namespace expertwire::test
