#include "check.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <thread>

namespace expertwire::test {
namespace {

bool passes(const Test& test) {
  const auto start = std::chrono::steady_clock::now();
  std::string failure;
  try {
    test.run();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  std::cout << (failure.empty() ? "ok   " : "FAIL ") << test.name << " (" << elapsed.count() << " ms)";
  if (!failure.empty()) std::cout << ": " << failure;
  std::cout << std::endl;
  return failure.empty();
}

}  // namespace

CheckFailed::CheckFailed(const std::string& what, const Location& where)
    : std::runtime_error(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " + what) {}

int run_tests(int argc, char** argv, const std::vector<Test>& tests) {
  std::vector<Test> selected;
  for (int i = 1; i < argc; ++i) {
    const auto found = std::find_if(tests.begin(), tests.end(), [&](const Test& test) { return test.name == argv[i]; });
    if (found == tests.end()) {
      std::cerr << "no test named " << argv[i] << '\n';
      return 1;
    }
    selected.push_back(*found);
  }
  if (selected.empty()) selected = tests;
  const auto passed = std::count_if(selected.begin(), selected.end(), passes);
  const auto failed = static_cast<std::ptrdiff_t>(selected.size()) - passed;
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? 0 : 1;
}

void check(bool condition, const std::string& what, const Location& where) {
  if (!condition) throw CheckFailed(what, where);
}

Error check_throws(ErrorCode code, std::string_view part, const std::function<void()>& action, const Location& where) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() != code) throw CheckFailed(std::string("an error of another code: ") + error.what(), where);
    if (std::string_view(error.what()).find(part) == std::string_view::npos) {
      throw CheckFailed("\"" + std::string(part) + "\" is not in the error's text: " + error.what(), where);
    }
    return error;
  }
  throw CheckFailed("nothing was thrown; wanted an error with \"" + std::string(part) + "\"", where);
}

void run_ranks(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&body, &failure = failures[static_cast<std::size_t>(rank)], rank] {
      try {
        body(rank);
      } catch (...) {
        failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::exception_ptr consequence;  // ranks that lost a peer say less than the peer does
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::PeerLost) throw;
      if (!consequence) consequence = failure;
    }
  }
  if (consequence) std::rethrow_exception(consequence);
}

}  // namespace expertwire::test
