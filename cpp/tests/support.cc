#include "support.hpp"

#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>  // with its implementation: CMakeLists.txt asks for it

namespace expertwire::test {
namespace {

// Says which test case begins, for one that crashes or hangs says nothing, and counts them.
struct Announcer : doctest::IReporter {
  static inline int num_begun = 0;

  explicit Announcer(const doctest::ContextOptions& /*unused*/) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    ++num_begun;
    std::cout << test.m_file << ":" << test.m_line << ": " << test.m_name << std::endl;
  }

  void report_query(const doctest::QueryData& /*unused*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*unused*/) override {}
  void test_case_reenter(const doctest::TestCaseData& /*unused*/) override {}
  void test_case_end(const doctest::CurrentTestCaseStats& /*unused*/) override {}
  void test_case_exception(const doctest::TestCaseException& /*unused*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*unused*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*unused*/) override {}
  void log_message(const doctest::MessageData& /*unused*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*unused*/) override {}
};

REGISTER_LISTENER("announcer", 1, Announcer);

}  // namespace

int run_test_cases(int argc, char** argv, const char* left_out, const std::string& why) {
  // Line by line, or a process that forks would say again what it has said, and one that is killed would keep it.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  doctest::Context context;
  context.setOption("duration", true);
  context.applyCommandLine(argc, argv);
  if (left_out != nullptr) {
    context.addFilter("test-suite-exclude", left_out);
    std::cout << "left out: tests " << left_out << ": " << why << std::endl;
  }
  const int result = context.run();
  if (context.shouldExit() || Announcer::num_begun > 0) return result;  // the former: it was only asked what there is
  std::cerr << "no test case has run" << std::endl;
  return 1;
}

void fail_at(const Location& where, const std::string& text) {
  ADD_FAIL_AT(where.file_name(), static_cast<int>(where.line()), text);
}

Error check_throws(ErrorCode code, std::string_view part, const std::function<void()>& action, const Location& where) {
  std::optional<Error> thrown;
  try {
    action();
  } catch (const Error& error) {
    thrown = error;
  }
  if (!thrown) fail_at(where, std::string("nothing was thrown; wanted an error with: ").append(part));
  const std::string text = thrown.value().what();
  if (thrown->code() != code) fail_at(where, "an error of another code: " + text);
  if (text.find(part) == std::string::npos) fail_at(where, (text + ": the error's text lacks: ").append(part));
  return *thrown;
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
