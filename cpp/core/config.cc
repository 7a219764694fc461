#include "core/config.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

#include "expertwire/error.hpp"

namespace expertwire {
namespace {

constexpr int kMaxRanks = 1024;
constexpr int kMaxHiddenSize = 1 << 20;  // keeps every byte count of the layout within 64 bits
constexpr int kMaxInFlight = 64;
constexpr double kMaxTimeoutSeconds = 1e6;

[[noreturn]] void refuse(const std::string& field, const std::string& given, const std::string& allowed) {
  throw Error(ErrorCode::InvalidArgument, field + " = " + given + ": " + allowed);
}

void check_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high,
                 const std::string& why = {}) {
  if (value >= low && value <= high) return;
  refuse(field, std::to_string(value),
         "must be between " + std::to_string(low) + " and " + (why.empty() ? "" : why + " = ") + std::to_string(high));
}

std::string join(const std::vector<int>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) text.append(i == 0 ? "" : ", ").append(std::to_string(values[i]));
  return text + "]";
}

std::vector<int> resolve_placement(const RuntimeConfig& config, int num_ranks) {
  const std::vector<int>& given = config.experts_per_rank;
  if (given.empty()) {
    if (config.num_experts % num_ranks != 0) {
      refuse("num_experts", std::to_string(config.num_experts),
             "is not divisible by the " + std::to_string(num_ranks) + " ranks; give experts_per_rank");
    }
    return std::vector<int>(static_cast<std::size_t>(num_ranks), config.num_experts / num_ranks);
  }
  const std::string needed =
      "needs " + std::to_string(num_ranks) +
      " counts >= 0, one for each rank, that sum to num_experts = " + std::to_string(config.num_experts);
  if (static_cast<int>(given.size()) != num_ranks) refuse("experts_per_rank", join(given), needed);
  if (std::any_of(given.begin(), given.end(), [](int count) { return count < 0; }))
    refuse("experts_per_rank", join(given), needed);
  if (std::accumulate(given.begin(), given.end(), std::int64_t{0}) != config.num_experts) {
    refuse("experts_per_rank", join(given), needed);
  }
  return given;
}

void check_formats(const RuntimeConfig& config) {
  if (config.mode == MoEMode::THROUGHPUT) {
    throw Error(ErrorCode::Unsupported, "mode = THROUGHPUT: this version implements LATENCY only");
  }
  if (config.output_layout == DispatchLayout::TOKEN_MAJOR) {
    throw Error(ErrorCode::Unsupported,
                "output_layout = TOKEN_MAJOR: belongs to THROUGHPUT mode, which this version does not implement");
  }
  const bool fp8 = config.quant.format == DispatchDataType::FP8_E4M3;
  const int multiple = fp8 ? kScaleBlock : 8;
  if (config.hidden_size % multiple != 0) {
    refuse("hidden_size", std::to_string(config.hidden_size),
           "must be a multiple of " + std::to_string(multiple) + " for " + to_string(config.quant.format) + " rows");
  }
}

void check_sizes(const RuntimeConfig& config, int num_ranks) {
  check_range("num_experts", config.num_experts, 1, 1 << 20);
  check_range("hidden_size", config.hidden_size, 1, kMaxHiddenSize);
  check_range("num_topk", config.num_topk, 1, std::min(config.num_experts, kMaxTopk),
              "min(num_experts, " + std::to_string(kMaxTopk) + ")");
  check_range("max_tokens_per_rank", config.max_tokens_per_rank, 1, (std::int64_t{1} << 31) / num_ranks - 1);
  check_range("max_in_flight", config.max_in_flight, 1, kMaxInFlight);
  check_range("dispatch_num_blocks", config.dispatch_num_blocks, 0, 1 << 20);
  check_range("combine_num_blocks", config.combine_num_blocks, 0, 1 << 20);
  if (!(config.timeout_s > 0.0 && config.timeout_s <= kMaxTimeoutSeconds)) {
    refuse("timeout_s", std::to_string(config.timeout_s), "must be greater than 0 and at most 1e6 seconds");
  }
  if (config.invalid_token_expert_id >= 0 && config.invalid_token_expert_id < config.num_experts) {
    refuse("invalid_token_expert_id", std::to_string(config.invalid_token_expert_id),
           "must lie outside [0, num_experts = " + std::to_string(config.num_experts) + ")");
  }
}

Shape make_shape(const RuntimeConfig& config, int num_ranks) {
  Shape shape;
  shape.num_ranks = num_ranks;
  shape.num_experts = config.num_experts;
  shape.max_local_experts = *std::max_element(config.experts_per_rank.begin(), config.experts_per_rank.end());
  shape.hidden_size = config.hidden_size;
  shape.num_topk = config.num_topk;
  shape.max_tokens_per_rank = config.max_tokens_per_rank;
  shape.max_in_flight = config.max_in_flight;
  shape.fp8 = config.quant.format == DispatchDataType::FP8_E4M3;
  shape.ue8m0 = shape.fp8 && config.quant.scale_format == ScaleFormat::UE8M0;
  shape.direct_send = config.combine_mode == CombineMode::DIRECT_SEND;
  return shape;
}

// Fields on which all ranks must agree, as text. One line each, so that a difference can be shown as it is.
std::vector<std::pair<std::string, std::string>> agreed_fields(const RuntimeConfig& config) {
  return {
      {"num_experts", std::to_string(config.num_experts)},
      {"hidden_size", std::to_string(config.hidden_size)},
      {"num_topk", std::to_string(config.num_topk)},
      {"max_tokens_per_rank", std::to_string(config.max_tokens_per_rank)},
      {"experts_per_rank", config.experts_per_rank.empty() ? "even" : join(config.experts_per_rank)},
      {"output_layout", to_string(config.output_layout)},
      {"combine_mode", to_string(config.combine_mode)},
      {"mode", config.mode == MoEMode::LATENCY ? "LATENCY" : "THROUGHPUT"},
      {"quant.format", to_string(config.quant.format)},
      {"quant.round_scale_pow2", config.quant.round_scale_pow2 ? "true" : "false"},
      {"quant.scale_format", config.quant.scale_format == ScaleFormat::UE8M0 ? "UE8M0" : "FLOAT32"},
      {"quant.scale_layout", config.quant.scale_layout == ScaleLayout::COLUMN ? "COLUMN" : "ROW"},
      {"invalid_token_expert_id", std::to_string(config.invalid_token_expert_id)},
      {"max_in_flight", std::to_string(config.max_in_flight)},
      {"timeout_s", std::to_string(config.timeout_s)},
      {"on_peer_loss", to_string(config.on_peer_loss)},
      {"device", config.device.type == DeviceType::CPU ? "cpu" : "cuda"},
  };
}

// "8 on ranks 0, 1; 16 on rank 2"
std::string values_by_rank(const std::vector<std::string>& values) {
  std::map<std::string, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < values.size(); ++rank) ranks[values[rank]].push_back(static_cast<int>(rank));
  std::string text;
  for (const auto& [value, holders] : ranks) {
    text.append(text.empty() ? "" : "; ").append(value).append(holders.size() > 1 ? " on ranks " : " on rank ");
    for (std::size_t i = 0; i < holders.size(); ++i) text.append(i == 0 ? "" : ", ").append(std::to_string(holders[i]));
  }
  return text;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace

const char* to_string(DispatchLayout layout) {
  switch (layout) {
    case DispatchLayout::EXPERT_MAJOR: return "EXPERT_MAJOR";
    case DispatchLayout::RANK_MAJOR: return "RANK_MAJOR";
    case DispatchLayout::TOKEN_MAJOR: return "TOKEN_MAJOR";
  }
  return "?";
}

const char* to_string(CombineMode mode) {
  return mode == CombineMode::DIRECT_SEND ? "DIRECT_SEND" : "RANK_LOCAL_REDUCE";
}
const char* to_string(DispatchDataType format) { return format == DispatchDataType::FP8_E4M3 ? "FP8_E4M3" : "BF16"; }
const char* to_string(PeerLossPolicy policy) { return policy == PeerLossPolicy::MASK ? "MASK" : "RAISE"; }

Problem make_problem(const RuntimeConfig& config, int rank, int num_ranks) {
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("rank", rank, 0, num_ranks - 1, "num_ranks - 1");
  check_sizes(config, num_ranks);
  check_formats(config);
  Problem problem;
  problem.config = config;
  problem.config.experts_per_rank = resolve_placement(config, num_ranks);
  if (config.quant.scale_format == ScaleFormat::UE8M0) problem.config.quant.round_scale_pow2 = true;
  const std::vector<int>& counts = problem.config.experts_per_rank;
  problem.rank = rank;
  problem.num_ranks = num_ranks;
  problem.first_local_expert = std::accumulate(counts.begin(), counts.begin() + rank, 0);
  problem.num_local_experts = counts[static_cast<std::size_t>(rank)];
  problem.shape = make_shape(problem.config, num_ranks);
  const std::int64_t rows = std::int64_t{problem.shape.max_local_experts} * num_ranks * config.max_tokens_per_rank;
  if (config.output_layout == DispatchLayout::EXPERT_MAJOR)
    check_range("experts per rank * num_ranks * max_tokens_per_rank", rows, 1, INT32_MAX);
  return problem;
}

void agree_on_config(Bootstrap& bootstrap, const RuntimeConfig& config, const std::string& local_error) {
  const auto fields = agreed_fields(config);
  std::string mine = local_error;
  std::replace(mine.begin(), mine.end(), '\n', ' ');
  mine += '\n';
  for (const auto& field : fields) mine += field.second + '\n';
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : bootstrap.all_gather(mine)) all.push_back(split_lines(text));
  if (!local_error.empty()) return;  // the caller has something better to say

  std::string differences;
  for (std::size_t field = 0; field < fields.size(); ++field) {
    std::vector<std::string> values;
    for (const auto& lines : all) values.push_back(field + 1 < lines.size() ? lines[field + 1] : "(missing)");
    if (std::all_of(values.begin(), values.end(), [&](const std::string& value) { return value == values[0]; }))
      continue;
    differences += (differences.empty() ? "" : "; ") + fields[field].first + " is " + values_by_rank(values);
  }
  if (!differences.empty()) {
    throw Error(ErrorCode::InvalidArgument, "ranks were constructed with different configurations: " + differences);
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0].empty()) continue;
    throw Error(ErrorCode::InvalidArgument,
                "rank " + std::to_string(rank) + " could not be constructed: " + all[rank][0]);
  }
}

}  // namespace expertwire
