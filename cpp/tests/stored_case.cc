#include "stored_case.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include <doctest/doctest.h>

namespace expertwire::test {
namespace {

const std::map<std::string, std::size_t> kElementBytes{
    {"bfloat16", 2}, {"float8_e4m3fn", 1}, {"float32", 4}, {"int32", 4}, {"int64", 8}};

std::vector<char> read_file(const std::string& name) {
  const std::string path = std::string(EXPERTWIRE_CASES) + "/" + name;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T choose(const std::string& word, const std::map<std::string, T>& meanings) {
  const auto found = meanings.find(word);
  if (found == meanings.end()) throw std::runtime_error("cases.txt: unknown word " + word);
  return found->second;
}

QuantConfig read_quant(std::istringstream& words) {
  std::string format, scale_format, scale_layout;
  words >> format >> scale_format >> scale_layout;
  QuantConfig quant;
  quant.format = choose<DispatchDataType>(
      format,
      {{"bf16", DispatchDataType::BF16}, {"fp8_e4m3", DispatchDataType::FP8_E4M3}, {"mxfp8", DispatchDataType::MXFP8}});
  quant.scale_format =
      choose<ScaleFormat>(scale_format, {{"float32", ScaleFormat::FLOAT32}, {"ue8m0", ScaleFormat::UE8M0}});
  quant.scale_layout = choose<ScaleLayout>(scale_layout, {{"row", ScaleLayout::ROW}, {"column", ScaleLayout::COLUMN}});
  return quant;
}

void read_field(StoredCase& stored, const std::string& key, std::istringstream& words) {
  RuntimeConfig& config = stored.config;
  const std::map<std::string, int*> numbers{{"num_ranks", &stored.num_ranks},
                                            {"num_experts", &config.num_experts},
                                            {"hidden_size", &config.hidden_size},
                                            {"num_topk", &config.num_topk},
                                            {"max_tokens_per_rank", &config.max_tokens_per_rank},
                                            {"max_in_flight", &config.max_in_flight},
                                            {"invalid_token_expert_id", &config.invalid_token_expert_id}};
  std::string word;
  if (key == "experts_per_rank") {
    for (int count = 0; words >> count;) config.experts_per_rank.push_back(count);
  } else if (key == "placement") {
    for (int expert = 0; words >> expert;) config.placement.push_back(expert);
  } else if (key == "quant") {
    config.quant = read_quant(words);
  } else if (key == "round_scale_pow2") {
    words >> config.quant.round_scale_pow2;
  } else if (key == "output_layout") {
    words >> word;
    config.output_layout = choose<DispatchLayout>(
        word, {{"expert_major", DispatchLayout::EXPERT_MAJOR}, {"rank_major", DispatchLayout::RANK_MAJOR}});
  } else if (key == "combine_mode") {
    words >> word;
    config.combine_mode = choose<CombineMode>(
        word, {{"rank_local_reduce", CombineMode::RANK_LOCAL_REDUCE}, {"direct_send", CombineMode::DIRECT_SEND}});
  } else {
    words >> *choose(key, numbers);
  }
}

void read_array(StoredCase& stored, std::istringstream& words, const std::vector<char>& elements) {
  std::size_t rank = 0, offset = 0;
  std::string name, shape;
  StoredArray array;
  words >> rank >> name >> array.dtype >> shape >> offset;
  std::size_t bytes = choose(array.dtype, kElementBytes);
  std::replace(shape.begin(), shape.end(), 'x', ' ');
  std::istringstream sizes(shape);
  for (std::size_t size = 0; sizes >> size; bytes *= size) array.shape.push_back(size);
  if (words.fail() || offset + bytes > elements.size()) {
    throw std::runtime_error("cases.txt: an array of " + stored.name + " is damaged");
  }
  const auto* first = reinterpret_cast<const std::byte*>(elements.data()) + offset;
  array.bytes.assign(first, first + bytes);
  stored.ranks.resize(static_cast<std::size_t>(stored.num_ranks));
  stored.ranks.at(rank)[name] = array;
}

std::vector<StoredCase> read_cases() {
  const std::vector<char> elements = read_file("cases.bin"), text = read_file("cases.txt");
  std::istringstream lines(std::string(text.begin(), text.end()));
  std::vector<StoredCase> cases;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "case") {
      words >> cases.emplace_back().name;
    } else if (key == "array") {
      read_array(cases.back(), words, elements);
    } else if (key != "#") {
      read_field(cases.back(), key, words);
    }
  }
  if (cases.empty()) throw std::runtime_error("cases.txt holds no case");
  return cases;
}

bool is_nan(const std::string& dtype, const std::byte* element) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, element, kElementBytes.at(dtype));
  if (dtype == "bfloat16") return (bits & 0x7FFF) > 0x7F80;
  if (dtype == "float8_e4m3fn") return (bits & 0x7F) == 0x7F;
  return dtype == "float32" && (bits & 0x7FFFFFFF) > 0x7F800000;
}

}  // namespace

const StoredArray* StoredCase::find(int rank, const std::string& array) const {
  const auto& arrays = ranks.at(static_cast<std::size_t>(rank));
  const auto found = arrays.find(array);
  return found == arrays.end() ? nullptr : &found->second;
}

const StoredArray& StoredCase::get(int rank, const std::string& array) const {
  const StoredArray* found = find(rank, array);
  if (found == nullptr) throw std::runtime_error(name + " has no array " + array);
  return *found;
}

const std::vector<StoredCase>& stored_cases() {
  static const std::vector<StoredCase> cases = read_cases();
  return cases;
}

std::string difference(const std::vector<std::byte>& got, const StoredArray& wanted) {
  if (got.size() != wanted.bytes.size()) {
    return std::to_string(got.size()) + " bytes, wanted " + std::to_string(wanted.bytes.size());
  }
  const std::size_t size = kElementBytes.at(wanted.dtype);
  for (std::size_t at = 0; at < got.size(); at += size) {
    if (std::memcmp(&got[at], &wanted.bytes[at], size) == 0) continue;
    if (is_nan(wanted.dtype, &got[at]) && is_nan(wanted.dtype, &wanted.bytes[at])) continue;
    return "element " + std::to_string(at / size) + " differs";
  }
  return {};
}

void check_same(const std::string& what, const std::vector<std::byte>& got, const StoredArray& wanted) {
  const std::string text = difference(got, wanted);
  if (!text.empty()) FAIL(what, ": ", text);
}

}  // namespace expertwire::test
