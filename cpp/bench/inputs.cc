#include "inputs.hpp"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <random>
#include <utility>

#include "formats.hpp"

namespace expertwire::bench {
namespace {

// In [0, 1), the same with every standard library, unlike its distributions.
float draw(std::mt19937_64& random) { return static_cast<float>(random() >> 40) * 0x1p-24f; }

RankInput drawn(const Options& options, int rank) {
  std::seed_seq seed{options.seed, rank};
  std::mt19937_64 random(seed);
  const auto hidden = static_cast<std::size_t>(options.hidden_size), topk = static_cast<std::size_t>(options.num_topk);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(options.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  RankInput input;
  for (int token = 0; token < options.num_tokens; ++token) {
    for (std::size_t h = 0; h < hidden; ++h) input.x.push_back(to_bf16(4.0f * draw(random) - 2.0f));
    float sum = 0.0f;
    for (std::size_t k = 0; k < topk; ++k) {  // the first K places of a shuffle: every expert is as likely
      std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
      input.topk_ids.push_back(experts[k]);
      input.weights.push_back(draw(random) + 0.1f);
      sum += input.weights.back();
    }
    std::transform(input.weights.end() - options.num_topk, input.weights.end(), input.weights.end() - options.num_topk,
                   [sum](float weight) { return weight / sum; });
  }
  return input;
}

template <typename T>
std::vector<T> read_file(const std::string& path, std::size_t count) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw UsageError("--inputs: cannot read " + path);
  const auto bytes = static_cast<std::size_t>(file.tellg());
  if (bytes != count * sizeof(T)) {
    throw UsageError("--inputs: " + path + " has " + std::to_string(bytes) + " bytes, this shape needs " +
                     std::to_string(count * sizeof(T)));
  }
  std::vector<T> values(count);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(bytes));
  if (!file) throw UsageError("--inputs: cannot read " + path);
  return values;
}

void check_ids(const Options& options, const std::string& path, const std::vector<std::int64_t>& ids) {
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    if (*id >= options.num_experts) {
      throw UsageError("--inputs: " + path + " names expert " + std::to_string(*id) + "; must be below -e " +
                       std::to_string(options.num_experts));
    }
    const auto token = (id - ids.begin()) / options.num_topk;
    if (*id >= 0 && std::find(ids.begin() + token * options.num_topk, id, *id) != id) {
      throw UsageError("--inputs: " + path + " names expert " + std::to_string(*id) + " twice in token " +
                       std::to_string(token));
    }
  }
}

RankInput read(const Options& options, int rank) {
  const std::string stem = options.inputs + "/" + std::to_string(rank);
  const auto tokens = static_cast<std::size_t>(options.num_tokens);
  const std::size_t slots = tokens * static_cast<std::size_t>(options.num_topk);
  RankInput input;
  input.x = read_file<std::uint16_t>(stem + ".x", tokens * static_cast<std::size_t>(options.hidden_size));
  input.topk_ids = read_file<std::int64_t>(stem + ".topk_ids", slots);
  input.weights = read_file<float>(stem + ".weights", slots);
  check_ids(options, stem + ".topk_ids", input.topk_ids);
  return input;
}

}  // namespace

std::vector<RankInput> make_inputs(const Options& options) {
  std::vector<RankInput> inputs;
  for (int rank = 0; rank < options.num_ranks; ++rank)
    inputs.push_back(options.inputs.empty() ? drawn(options, rank) : read(options, rank));
  return inputs;
}

}  // namespace expertwire::bench
