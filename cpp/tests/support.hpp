// What the C++ tests need beyond doctest.
//
// Ranks are threads and processes here, and a check ends the one that makes it, wherever that is: REQUIRE and FAIL, not
// CHECK, after which a process would end well. What threads check goes without INFO, CAPTURE and ..._MESSAGE: doctest
// keeps the text of one that fails without a lock.
#pragma once

#include <functional>
#include <source_location>
#include <string>
#include <string_view>

#include "expertwire/error.hpp"

namespace expertwire::test {

using Location = std::source_location;

// What main returns: that of main.cc, or of a program with something to do before. The test cases run in the order of
// their file, without those of the suite `left_out`, which cannot run on this machine, for the reason `why`. Not 0 if none
// has run.
int run_test_cases(int argc, char** argv, const char* left_out = nullptr, const std::string& why = "");

// FAIL at the line of who called a function that checks for many.
void fail_at(const Location& where, const std::string& text);

// `action` must throw Error of this code whose text contains `part`. Returns the error for further checks.
Error check_throws(ErrorCode code, std::string_view part, const std::function<void()>& action,
                   const Location& where = Location::current());

// Runs `body(rank)` on one thread per rank, waits for all of them and rethrows the first failure by rank; a lost peer
// only if nothing else went wrong. A REQUIRE that fails ends its rank, and has told its line by then.
void run_ranks(int num_ranks, const std::function<void(int)>& body);

}  // namespace expertwire::test
