// Checks for the C++ tests. A test is a function that returns, or throws at its first failed check; a test program is
//
//   int main(int argc, char** argv) { return run_tests(argc, argv, {{"offsets", offsets}, {"totals", totals}}); }
//
// and runs all its tests, or those named on the command line.
// Our own and not doctest or GoogleTest: a failed check must end one rank's thread or process and reach who waits for it.
#pragma once

#include <functional>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "expertwire/error.hpp"

namespace expertwire::test {

using Location = std::source_location;

class CheckFailed : public std::runtime_error {
 public:
  CheckFailed(const std::string& what, const Location& where);
};

struct Test {
  std::string_view name;
  void (*run)();
};

// Returns what main returns: 0 if every test passed, else 1. An unknown name fails.
int run_tests(int argc, char** argv, const std::vector<Test>& tests);

void check(bool condition, const std::string& what = "condition is false", const Location& where = Location::current());

template <typename A, typename B>
void check_equal(const A& got, const B& wanted, const Location& where = Location::current()) {
  if (got == wanted) return;
  std::ostringstream text;
  text << "got " << got << ", wanted " << wanted;
  throw CheckFailed(text.str(), where);
}

// `action` must throw Error of this code whose text contains `part`. Returns the error for further checks.
Error check_throws(ErrorCode code, std::string_view part, const std::function<void()>& action,
                   const Location& where = Location::current());

// Runs `body(rank)` on one thread per rank, waits for all of them and rethrows the first failure by rank; a lost peer only
// if nothing else went wrong.
void run_ranks(int num_ranks, const std::function<void(int)>& body);

}  // namespace expertwire::test
