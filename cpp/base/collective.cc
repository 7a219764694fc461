#include "base/collective.hpp"

#include <exception>

namespace expertwire {
namespace {

// What a rank tells the others of its step: nothing if it succeeded.
std::string outcome(const std::function<void()>& step) {
  try {
    step();
  } catch (const Error& error) {
    return encode(error);
  } catch (const std::exception& error) {
    return encode(Error(ErrorCode::Backend, error.what()));
  }
  return {};
}

}  // namespace

std::vector<std::string> gather(Bootstrap& bootstrap, const std::string& mine) {
  const auto num_ranks = static_cast<std::size_t>(bootstrap.size());
  std::vector<std::string> all = bootstrap.all_gather(mine);
  if (all.size() == num_ranks) return all;
  throw Error(ErrorCode::InvalidArgument,
              "the bootstrap's all_gather returned " + std::to_string(all.size()) +
                  " strings: must be one for each of its size() = " + std::to_string(num_ranks) + " ranks");
}

// A digit for the code, then the text.
std::string encode(const Error& failure) {
  return static_cast<char>('0' + static_cast<int>(failure.code())) + std::string(failure.what());
}

Error decode(const std::string& told) {
  const int code = told.empty() ? -1 : told[0] - '0';
  if (code < 0 || code > static_cast<int>(ErrorCode::Backend))
    return Error(ErrorCode::Backend,
                 "what it sent at set-up cannot be read: the bootstrap's all_gather mixes messages up");
  return Error(static_cast<ErrorCode>(code), told.substr(1));
}

void succeed_together(Bootstrap& bootstrap, const std::function<void()>& step) {
  const std::string mine = outcome(step);
  std::vector<std::string> outcomes(static_cast<std::size_t>(bootstrap.size()));
  try {
    outcomes = gather(bootstrap, mine);
  } catch (const std::exception&) {
    if (mine.empty()) throw;
    outcomes[static_cast<std::size_t>(bootstrap.rank())] = mine;  // the cause, where the group's error is a consequence
  }
  std::string text;
  ErrorCode code = ErrorCode::Backend;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    const Error failure = decode(outcomes[rank]);
    if (text.empty()) code = failure.code();
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + failure.what();
  }
  if (!text.empty()) throw Error(code, text);
}

}  // namespace expertwire
