// Set-up steps taken together, over the bootstrap's one collective.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"

namespace expertwire {

// Collective. all_gather of the bootstrap, which may be anybody's: throws unless there is one string for each rank.
std::vector<std::string> gather(Bootstrap& bootstrap, const std::string& mine);

// A failure as ranks tell it to each other, and back; whatever others sent gives an error with a code that exists.
std::string encode(const Error& failure);
Error decode(const std::string& told);

// Collective. Runs `step`, which holds no collective. Returns on every rank once it succeeded on all; if it threw on
// any, throws on every rank one error that names those ranks, with the code of the first of them. If the collective fails
// too, a rank throws what its own step threw.
void succeed_together(Bootstrap& bootstrap, const std::function<void()>& step);

// Collective. What every rank passed, by rank: plain data, of one layout on all ranks.
template <typename T>
std::vector<T> gather_values(Bootstrap& bootstrap, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all;
  for (const std::string& text : gather(bootstrap, std::string(reinterpret_cast<const char*>(&mine), sizeof mine))) {
    T one;
    if (text.size() != sizeof one) {
      throw Error(ErrorCode::Backend, "the group's all_gather returned " + std::to_string(text.size()) +
                                          " bytes, expected " + std::to_string(sizeof one));
    }
    std::memcpy(&one, text.data(), sizeof one);
    all.push_back(one);
  }
  return all;
}

}  // namespace expertwire
