#include "core/config.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/collective.hpp"
#include "base/rank_list.hpp"
#include "core/placement.hpp"

namespace expertwire {
namespace {

constexpr int kMaxHiddenSize = 1 << 20;  // keeps every byte count of the layout within 64 bits
constexpr int kMaxInFlight = 64;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 54;  // so do the largest sizes together
constexpr double kMaxTimeoutSeconds = 1e6;

template <typename Enum>
constexpr std::array<std::string_view, 0> kNames{};
template <>
constexpr std::array<std::string_view, 2> kNames<MoEMode>{"LATENCY", "THROUGHPUT"};
template <>
constexpr std::array<std::string_view, 3> kNames<DispatchLayout>{"EXPERT_MAJOR", "RANK_MAJOR", "TOKEN_MAJOR"};
template <>
constexpr std::array<std::string_view, 2> kNames<CombineMode>{"RANK_LOCAL_REDUCE", "DIRECT_SEND"};
template <>
constexpr std::array<std::string_view, 3> kNames<DispatchDataType>{"BF16", "FP8_E4M3", "MXFP8"};
template <>
constexpr std::array<std::string_view, 2> kNames<ScaleFormat>{"FLOAT32", "UE8M0"};
template <>
constexpr std::array<std::string_view, 2> kNames<ScaleLayout>{"ROW", "COLUMN"};
template <>
constexpr std::array<std::string_view, 2> kNames<PeerLossPolicy>{"RAISE", "MASK"};
template <>
constexpr std::array<std::string_view, 2> kNames<DeviceType>{"CPU", "CUDA"};

// Its name, or its number if it has none: callers can cast anything to an enum.
template <typename Enum>
std::string to_text(Enum value) {
  const auto idx = static_cast<std::size_t>(value);
  return idx < kNames<Enum>.size() ? std::string(kNames<Enum>[idx]) : std::to_string(static_cast<int>(value));
}

[[noreturn]] void refuse(const std::string& field, const std::string& given, const std::string& allowed) {
  throw Error(ErrorCode::InvalidArgument, field + " = " + given + ": " + allowed);
}

void check_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high,
                 const std::string& why = {}) {
  if (value >= low && value <= high) return;
  refuse(field, std::to_string(value),
         "must be between " + std::to_string(low) + " and " + (why.empty() ? "" : why + " = ") + std::to_string(high));
}

template <typename Enum>
void check_enum(const char* field, Enum value) {
  if (static_cast<std::size_t>(value) < kNames<Enum>.size()) return;
  std::string allowed = "must be one of";
  for (const std::string_view name : kNames<Enum>) allowed.append(" ").append(name);
  refuse(field, to_text(value), allowed);
}

std::string join(const std::vector<int>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) text.append(i == 0 ? "" : ", ").append(std::to_string(values[i]));
  return text + "]";
}

std::vector<int> resolve_experts_per_rank(const RuntimeConfig& config, int num_ranks) {
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
  check_enum("mode", config.mode);
  check_enum("output_layout", config.output_layout);
  check_enum("combine_mode", config.combine_mode);
  check_enum("quant.format", config.quant.format);
  check_enum("quant.scale_format", config.quant.scale_format);
  check_enum("quant.scale_layout", config.quant.scale_layout);
  check_enum("on_peer_loss", config.on_peer_loss);
  check_enum("device.type", config.device.type);
  check_range("device.index", config.device.index, 0, config.device.type == DeviceType::CPU ? 0 : kMaxRanks - 1);
  if (config.mode == MoEMode::THROUGHPUT) {
    throw Error(ErrorCode::Unsupported, "mode = THROUGHPUT: this version implements LATENCY only");
  }
  if (config.output_layout == DispatchLayout::TOKEN_MAJOR) {
    throw Error(ErrorCode::Unsupported,
                "output_layout = TOKEN_MAJOR: belongs to THROUGHPUT mode, which this version does not implement");
  }
  const int multiple = config.quant.format == DispatchDataType::BF16 ? 8 : kScaleBlock;
  if (config.hidden_size % multiple != 0) {
    refuse("hidden_size", std::to_string(config.hidden_size),
           "must be a multiple of " + std::to_string(multiple) + " for " + to_text(config.quant.format) + " rows");
  }
}

void check_sizes(const RuntimeConfig& config, int num_ranks) {
  check_range("num_experts", config.num_experts, 1, 1 << 20);
  check_range("hidden_size", config.hidden_size, 1, kMaxHiddenSize);
  check_range("num_topk", config.num_topk, 1, std::min(config.num_experts, kMaxTopk),
              "min(num_experts, " + std::to_string(kMaxTopk) + ")");
  check_range("max_tokens_per_rank", config.max_tokens_per_rank, 1, INT32_MAX / num_ranks);
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
  shape.fp8 = config.quant.format != DispatchDataType::BF16;
  if (config.quant.format == DispatchDataType::MXFP8) shape.scale_block = kMxScaleBlock;
  shape.ue8m0 = shape.fp8 && config.quant.scale_format == ScaleFormat::UE8M0;
  shape.direct_send = config.combine_mode == CombineMode::DIRECT_SEND;
  shape.mask = config.on_peer_loss == PeerLossPolicy::MASK;
  return shape;
}

// Fields on which all ranks must agree, as text. One line each, so that a difference can be shown as it is.
std::vector<std::pair<std::string, std::string>> agreed_fields(const RuntimeConfig& config, int num_ranks) {
  return {
      {"the number of ranks", std::to_string(num_ranks)},
      {"num_experts", std::to_string(config.num_experts)},
      {"hidden_size", std::to_string(config.hidden_size)},
      {"num_topk", std::to_string(config.num_topk)},
      {"max_tokens_per_rank", std::to_string(config.max_tokens_per_rank)},
      {"experts_per_rank", config.experts_per_rank.empty() ? "even" : join(config.experts_per_rank)},
      {"placement", config.placement.empty() ? "none" : join(config.placement)},
      {"output_layout", to_text(config.output_layout)},
      {"combine_mode", to_text(config.combine_mode)},
      {"mode", to_text(config.mode)},
      {"quant.format", to_text(config.quant.format)},
      {"quant.round_scale_pow2", config.quant.round_scale_pow2 ? "true" : "false"},
      {"quant.scale_format", to_text(config.quant.scale_format)},
      {"quant.scale_layout", to_text(config.quant.scale_layout)},
      {"invalid_token_expert_id", std::to_string(config.invalid_token_expert_id)},
      {"max_in_flight", std::to_string(config.max_in_flight)},
      {"timeout_s", std::to_string(config.timeout_s)},
      {"on_peer_loss", to_text(config.on_peer_loss)},
      {"device.type", to_text(config.device.type)},
  };
}

using RanksByValue = std::map<std::string, std::vector<int>>;

// "8 on ranks 0, 1; 16 on rank 2"
std::string to_text(const RanksByValue& ranks) {
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

// What ranks agree on, and how errors speak of it.
struct Agreement {
  std::vector<std::string> fields;  // a line of the description each
  const char* differ;
  const char* failed;
};

// What one rank tells the others: lines of which the first two are its rank, and what failed or nothing.
constexpr std::size_t kFirstField = 2;
using Told = std::vector<std::string>;

// Of every rank, in its place.
std::vector<Told> tell(Bootstrap& bootstrap, const std::string& description, const std::optional<Error>& failure) {
  std::string failed = failure ? encode(*failure) : std::string();
  std::replace(failed.begin(), failed.end(), '\n', ' ');
  const std::string mine = std::to_string(bootstrap.rank()) + "\n" + failed + "\n" + description;
  std::vector<Told> all;
  for (const std::string& text : gather(bootstrap, mine)) {
    const std::string rank = std::to_string(all.size());
    all.push_back(split_lines(text));
    if (all.back().size() < kFirstField || all.back()[0] != rank) {
      throw Error(ErrorCode::InvalidArgument, "the bootstrap's all_gather returned in place of rank " + rank +
                                                  " what that rank did not pass: must be the strings of all ranks by "
                                                  "rank(), which differs between them");
    }
  }
  return all;
}

void agree(Bootstrap& bootstrap, const Agreement& agreement, const std::string& description,
           const std::optional<Error>& failure) {
  std::vector<Told> all;
  try {
    all = tell(bootstrap, description, failure);
  } catch (const std::exception&) {
    if (!failure) throw;
  }
  if (failure) return;  // the caller throws it: it is the cause, also where the group could not be told

  std::string differences;
  for (std::size_t field = 0; field < agreement.fields.size(); ++field) {
    RanksByValue ranks;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (kFirstField + field < all[rank].size())
        ranks[all[rank][kFirstField + field]].push_back(static_cast<int>(rank));
    }
    if (ranks.size() > 1)
      differences.append(differences.empty() ? "" : "; ").append(agreement.fields[field] + " is " + to_text(ranks));
  }
  if (!differences.empty()) throw Error(ErrorCode::InvalidArgument, agreement.differ + (": " + differences));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][1].empty()) continue;
    const Error theirs = decode(all[rank][1]);
    throw Error(theirs.code(), "rank " + std::to_string(rank) + " " + agreement.failed + ": " + theirs.what());
  }
}

}  // namespace

Problem make_problem(const RuntimeConfig& config, int rank, int num_ranks) {
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("rank", rank, 0, num_ranks - 1, "num_ranks - 1");
  check_sizes(config, num_ranks);
  check_formats(config);
  Problem problem;
  problem.config = config;
  problem.config.experts_per_rank = resolve_experts_per_rank(config, num_ranks);
  if (config.quant.format == DispatchDataType::MXFP8) problem.config.quant.scale_format = ScaleFormat::UE8M0;
  if (problem.config.quant.scale_format == ScaleFormat::UE8M0) problem.config.quant.round_scale_pow2 = true;
  const std::vector<int>& counts = problem.config.experts_per_rank;
  problem.rank = rank;
  problem.num_ranks = num_ranks;
  problem.first_local_expert = std::accumulate(counts.begin(), counts.begin() + rank, 0);
  problem.num_local_experts = counts[static_cast<std::size_t>(rank)];
  problem.num_logical_experts = config.num_experts;
  if (!config.placement.empty()) {
    problem.num_logical_experts = check_placement(config.placement, config.num_experts);
    check_range("num_topk", config.num_topk, 1, problem.num_logical_experts, "the logical experts of placement");
    problem.physical_of_logical = physical_experts(config.placement, counts, rank);
  }
  problem.shape = make_shape(problem.config, num_ranks);
  const std::int64_t rows = std::int64_t{problem.shape.max_local_experts} * num_ranks * config.max_tokens_per_rank;
  if (config.output_layout == DispatchLayout::EXPERT_MAJOR)
    check_range("experts per rank * num_ranks * max_tokens_per_rank", rows, 1, INT32_MAX);
  const std::int64_t received = std::int64_t{num_ranks} * config.max_tokens_per_rank;
  check_range("num_ranks * max_tokens_per_rank * num_topk * hidden_size",
              received * config.num_topk * config.hidden_size, 1, kMaxElements);
  return problem;
}

std::string Problem::id_bound() const {
  const std::string bound = physical_of_logical.empty() ? "num_experts" : "the number of logical experts";
  return bound + " = " + std::to_string(num_logical_experts);
}

std::string describe(const RuntimeConfig& config, int num_ranks) {
  std::string lines;
  for (const auto& field : agreed_fields(config, num_ranks)) lines.append(field.second).append("\n");
  return lines;
}

void agree_on_config(Bootstrap& bootstrap, const std::string& description, const std::optional<Error>& failure) {
  Agreement agreement{{}, "ranks were constructed with different configurations", "could not be constructed"};
  for (const auto& field : agreed_fields({}, 0)) agreement.fields.push_back(field.first);
  agree(bootstrap, agreement, description, failure);
}

void agree_on_placement(Bootstrap& bootstrap, const std::vector<int>& placement, const std::optional<Error>& failure) {
  agree(bootstrap, {{"placement"}, "ranks gave different placements", "could not update the placement"},
        failure ? std::string() : join(placement), failure);
}

}  // namespace expertwire
