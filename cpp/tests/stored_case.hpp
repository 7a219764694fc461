// Cases of the case table as files, with the outputs of the Python reference: tests/export_cases.py writes them, and says
// how. Both languages read the same files.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench/place.hpp"
#include "expertwire/bootstrap.hpp"
#include "expertwire/types.hpp"

namespace expertwire::test {

struct StoredArray {
  std::string dtype;  // as NumPy writes it
  std::vector<std::size_t> shape;
  std::vector<std::byte> bytes;
};

struct StoredCase {
  std::string name;
  int num_ranks = 0;
  RuntimeConfig config;
  std::vector<std::map<std::string, StoredArray>> ranks;  // the arrays of each rank by name

  const StoredArray* find(int rank, const std::string& array) const;  // null: there is none
  const StoredArray& get(int rank, const std::string& array) const;
};

// All of them. Fails where the files are damaged.
const std::vector<StoredCase>& stored_cases();

// Nothing, if elements are equal bit for bit; NaN equals NaN, whatever its sign and payload.
std::string difference(const std::vector<std::byte>& got, const StoredArray& wanted);

// There must be none.
void check_same(const std::string& what, const std::vector<std::byte>& got, const StoredArray& wanted);

template <typename T>
std::vector<std::byte> as_bytes(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

// Collective. Is one rank of a case, on the device of its place: pairs of dispatch and combine in every lane, all of them
// equal to what is stored. `num_blocks` is the size of CUDA grids, 0 chooses.
void run_case(const std::shared_ptr<Bootstrap>& bootstrap, const StoredCase& stored, bench::Place& place,
              int num_blocks = 0);

}  // namespace expertwire::test
