#include "base/collective.hpp"

#include <exception>

namespace expertwire {
namespace {

// What a rank tells the others of its step: nothing if it succeeded, else a byte for the code and the text.
std::string outcome(const std::function<void()>& step) {
  const auto failure = [](ErrorCode code, const char* text) { return std::string(1, static_cast<char>(code)) + text; };
  try {
    step();
  } catch (const Error& error) {
    return failure(error.code(), error.what());
  } catch (const std::exception& error) {
    return failure(ErrorCode::Backend, error.what());
  }
  return {};
}

}  // namespace

void succeed_together(Bootstrap& bootstrap, const std::function<void()>& step) {
  const std::string mine = outcome(step);
  std::vector<std::string> outcomes(static_cast<std::size_t>(bootstrap.size()));
  try {
    outcomes = bootstrap.all_gather(mine);
  } catch (const Error&) {
    if (mine.empty()) throw;
    outcomes[static_cast<std::size_t>(bootstrap.rank())] = mine;  // the cause, where the group's error is a consequence
  }
  std::string text;
  ErrorCode code = ErrorCode::Backend;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    if (text.empty()) code = static_cast<ErrorCode>(outcomes[rank][0]);
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + outcomes[rank].substr(1);
  }
  if (!text.empty()) throw Error(code, text);
}

}  // namespace expertwire
