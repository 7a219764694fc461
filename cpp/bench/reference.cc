#include "reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "formats.hpp"

namespace expertwire::bench {
namespace {

constexpr float kSmallestAmax = 1e-4f;
constexpr float kLargestBf16 = 0x1.FEp127f;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

template <typename T>
void append_bytes(std::vector<std::byte>& bytes, const T* values, std::size_t count) {
  const auto* first = reinterpret_cast<const std::byte*>(values);
  bytes.insert(bytes.end(), first, first + count * sizeof(T));
}

// The biased exponent of the smallest power of two that is no smaller. Scales are positive and normal.
std::uint32_t exponent_above(float scale) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  return (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
}

float power_of_two(std::uint32_t biased_exponent) { return std::bit_cast<float>(biased_exponent << 23); }

std::vector<std::uint16_t> rounded(const std::vector<float>& row) {
  std::vector<std::uint16_t> bits(row.size());
  std::transform(row.begin(), row.end(), bits.begin(), to_bf16);
  return bits;
}

// sum += weight * row, the product and the sum each rounded to float32.
void add(std::vector<float>& sum, float weight, const std::vector<std::uint16_t>& row) {
  for (std::size_t h = 0; h < row.size(); ++h) {
    const float product = weight * from_bf16(row[h]);
    sum[h] += product;
  }
}

}  // namespace

Reference::Reference(const RuntimeConfig& config, const std::vector<RankInput>& inputs)
    : config_(config),
      inputs_(inputs),
      first_expert_{0},
      mx_(config.quant.format == DispatchDataType::MXFP8),
      scale_block_(mx_ ? kMxScaleBlock : kScaleBlock) {
  for (const int count : config.experts_per_rank) first_expert_.push_back(first_expert_.back() + count);
  if (config.quant.format == DispatchDataType::BF16) return;
  for (const RankInput& input : inputs) {
    Quantised& made = quantised_.emplace_back();
    for (std::size_t first = 0; first < input.x.size(); first += scale_block_) {
      float amax = kSmallestAmax;
      for (std::size_t i = first; i < first + scale_block_; ++i)
        amax = std::fmax(amax, std::fabs(from_bf16(input.x[i])));  // fmax passes NaN over
      amax = std::fmin(amax, kLargestBf16);
      float scale = amax / kLargestE4m3, factor = kLargestE4m3 / amax;
      if (mx_) {
        const std::uint32_t exponent = exponent_above(scale);
        scale = power_of_two(exponent);
        factor = power_of_two(254 - exponent);
      }
      for (std::size_t i = first; i < first + scale_block_; ++i)
        made.rows.push_back(to_e4m3(from_bf16(input.x[i]) * factor));
      made.scales.push_back(scale);
    }
  }
}

int Reference::num_tokens(std::size_t rank) const {
  return static_cast<int>(inputs_[rank].topk_ids.size()) / config_.num_topk;
}

int Reference::owner(std::int64_t expert) const {
  int rank = 0;
  while (expert >= first_expert_[at(rank + 1)]) ++rank;
  return rank;
}

int Reference::slot_of(std::size_t rank, int token, std::int64_t expert) const {
  const std::int64_t* ids = &inputs_[rank].topk_ids[at(token * config_.num_topk)];
  const std::int64_t* found = std::find(ids, ids + config_.num_topk, expert);
  return found == ids + config_.num_topk ? -1 : static_cast<int>(found - ids);
}

void Reference::append_row(Received& received, std::size_t rank, int token) const {
  const std::size_t hidden = at(config_.hidden_size), first = at(token) * hidden;
  if (quantised_.empty()) {
    append_bytes(received.tokens, &inputs_[rank].x[first], hidden);
    return;
  }
  append_bytes(received.tokens, &quantised_[rank].rows[first], hidden);
  const float* scales = &quantised_[rank].scales[first / scale_block_];
  const std::size_t num_scales = hidden / scale_block_;
  if (!mx_) {
    append_bytes(received.scales, scales, num_scales);
    return;
  }
  for (std::size_t i = 0; i < num_scales; ++i)
    received.scales.push_back(static_cast<std::byte>(exponent_above(scales[i])));
}

Received Reference::received(int rank) const {
  return config_.output_layout == DispatchLayout::RANK_MAJOR ? received_by_rank(rank) : received_by_expert(rank);
}

Received Reference::received_by_expert(int rank) const {
  Received received;
  for (int expert = first_expert_[at(rank)]; expert < first_expert_[at(rank + 1)]; ++expert) {
    std::int32_t count = 0;
    for (std::size_t source = 0; source < inputs_.size(); ++source) {
      const std::int32_t before = count;
      for (int token = 0; token < num_tokens(source); ++token) {
        if (slot_of(source, token, expert) < 0) continue;
        append_row(received, source, token);
        received.source_token.push_back(static_cast<std::int32_t>(source) * config_.max_tokens_per_rank + token);
        ++count;
      }
      received.rank_ranges.insert(received.rank_ranges.end(), {before, count - before});
    }
    received.counts.push_back(count);
  }
  return received;
}

Received Reference::received_by_rank(int rank) const {
  const std::size_t num_entries = inputs_.size() * at(config_.max_tokens_per_rank * config_.num_topk);
  Received received;
  received.topk_ids.assign(num_entries, config_.invalid_token_expert_id);
  received.weights.assign(num_entries, 0.0f);
  for (std::size_t source = 0; source < inputs_.size(); ++source) {
    std::int32_t count = 0;
    for (int token = 0; token < num_tokens(source); ++token) {
      bool chosen = false;
      for (int k = 0; k < config_.num_topk; ++k) {
        const std::size_t given = at(token * config_.num_topk + k);
        const std::int64_t expert = inputs_[source].topk_ids[given];
        if (expert < 0 || owner(expert) != rank) continue;
        const std::size_t entry = (source * at(config_.max_tokens_per_rank) + at(count)) * at(config_.num_topk) + at(k);
        received.topk_ids[entry] = static_cast<std::int32_t>(expert);
        received.weights[entry] = inputs_[source].weights[given];
        chosen = true;
      }
      if (!chosen) continue;
      append_row(received, source, token);
      ++count;
    }
    received.counts.push_back(count);
  }
  return received;
}

std::vector<float> Reference::row_as_experts_see_it(std::size_t rank, int token) const {
  const std::size_t hidden = at(config_.hidden_size), first = at(token) * hidden;
  std::vector<float> row(hidden);
  for (std::size_t h = 0; h < hidden; ++h) {
    row[h] = quantised_.empty()
                 ? from_bf16(inputs_[rank].x[first + h])
                 : from_e4m3(quantised_[rank].rows[first + h]) * quantised_[rank].scales[(first + h) / scale_block_];
  }
  return row;
}

float Reference::scale_of(const Received& received, std::size_t block) const {
  if (mx_) return power_of_two(std::to_integer<std::uint32_t>(received.scales[block]));
  float scale = 0;
  std::memcpy(&scale, &received.scales[sizeof scale * block], sizeof scale);
  return scale;
}

std::vector<std::uint16_t> Reference::expert_row(std::int64_t expert, const std::vector<float>& row) const {
  const float factor = 0.5f + static_cast<float>(expert) / static_cast<float>(config_.num_experts);
  std::vector<std::uint16_t> answer(row.size());
  std::transform(row.begin(), row.end(), answer.begin(), [factor](float value) { return to_bf16(value * factor); });
  return answer;
}

std::vector<std::uint16_t> Reference::answers(int rank, const Received& received) const {
  const std::size_t hidden = at(config_.hidden_size);
  const bool rank_major = config_.output_layout == DispatchLayout::RANK_MAJOR, fp8 = !quantised_.empty();
  std::vector<std::uint16_t> answers;
  std::vector<float> row(hidden);
  std::size_t number = 0;
  for (std::size_t run = 0; run < received.counts.size(); ++run) {
    for (int i = 0; i < received.counts[run]; ++i, ++number) {
      const std::byte* from = &received.tokens[number * hidden * (fp8 ? 1 : 2)];
      for (std::size_t h = 0; h < hidden; ++h) {
        std::uint16_t bits = 0;
        float scale = 1.0f;
        if (fp8) scale = scale_of(received, (number * hidden + h) / scale_block_);
        if (!fp8) std::memcpy(&bits, from + 2 * h, 2);
        row[h] = fp8 ? from_e4m3(std::to_integer<std::uint8_t>(from[h])) * scale : from_bf16(bits);
      }
      if (rank_major) {
        answer_slots(received, (run * at(config_.max_tokens_per_rank) + at(i)) * at(config_.num_topk), row, answers);
      } else {
        const std::vector<std::uint16_t> made = expert_row(first_expert_[at(rank)] + static_cast<int>(run), row);
        answers.insert(answers.end(), made.begin(), made.end());
      }
    }
  }
  return answers;
}

// RANK_MAJOR answers come weighted: a row for each slot, or their sum.
void Reference::answer_slots(const Received& received, std::size_t entry, const std::vector<float>& row,
                             std::vector<std::uint16_t>& answers) const {
  std::vector<float> sum(row.size(), 0.0f);
  for (std::size_t k = 0; k < at(config_.num_topk); ++k) {
    std::vector<float> slot(row.size(), 0.0f);
    const std::int32_t expert = received.topk_ids[entry + k];
    if (expert != config_.invalid_token_expert_id) {
      add(slot, received.weights[entry + k], expert_row(expert, row));
      for (std::size_t h = 0; h < row.size(); ++h) sum[h] += slot[h];
    }
    if (config_.combine_mode != CombineMode::DIRECT_SEND) continue;
    const std::vector<std::uint16_t> bits = rounded(slot);
    answers.insert(answers.end(), bits.begin(), bits.end());
  }
  if (config_.combine_mode == CombineMode::DIRECT_SEND) return;
  const std::vector<std::uint16_t> bits = rounded(sum);
  answers.insert(answers.end(), bits.begin(), bits.end());
}

std::vector<std::uint16_t> Reference::combined(int rank) const {
  std::vector<std::uint16_t> rows;
  for (int token = 0; token < num_tokens(at(rank)); ++token) {
    const std::vector<std::uint16_t> row = combined_token(at(rank), token);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

std::vector<std::uint16_t> Reference::combined_token(std::size_t rank, int token) const {
  const bool rank_major = config_.output_layout == DispatchLayout::RANK_MAJOR,
             direct = config_.combine_mode == CombineMode::DIRECT_SEND;
  const std::vector<float> row = row_as_experts_see_it(rank, token);
  const std::vector<float> zeros(row.size(), 0.0f);
  std::vector<std::vector<float>> partials(direct ? 1 : inputs_.size());  // empty: nothing for this rank
  for (int k = 0; k < config_.num_topk; ++k) {
    const std::size_t given = at(token * config_.num_topk + k);
    const std::int64_t expert = inputs_[rank].topk_ids[given];
    if (expert < 0) continue;
    std::vector<float>& partial = partials[direct ? 0 : at(owner(expert))];
    if (partial.empty()) partial = zeros;
    const std::vector<std::uint16_t> answer = expert_row(expert, row);
    if (rank_major && direct) {  // the caller has rounded each weighted row
      std::vector<float> weighted = zeros;
      add(weighted, inputs_[rank].weights[given], answer);
      add(partial, 1.0f, rounded(weighted));
    } else {
      add(partial, inputs_[rank].weights[given], answer);
    }
  }
  std::vector<float> total = zeros;
  for (const std::vector<float>& partial : partials) {
    if (direct && !partial.empty()) return rounded(partial);
    if (!partial.empty()) add(total, 1.0f, rounded(partial));
  }
  return rounded(total);
}

std::int64_t Reference::num_selections() const {
  std::int64_t count = 0;
  for (const RankInput& input : inputs_) {
    count += std::count_if(input.topk_ids.begin(), input.topk_ids.end(), [](std::int64_t id) { return id >= 0; });
  }
  return count;
}

}  // namespace expertwire::bench
