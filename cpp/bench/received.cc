#include "received.hpp"

#include <functional>
#include <numeric>

namespace expertwire::bench {
namespace {

// Calls with (first row in the array, first row among the valid ones, number of rows) for each run of valid rows.
void for_each_run(const MoERuntime& runtime, const std::vector<std::int32_t>& counts,
                  const std::function<void(std::size_t, std::size_t, std::size_t)>& use) {
  const auto most = static_cast<std::size_t>(runtime.config().max_tokens_per_rank);
  const bool rank_major = runtime.config().output_layout == DispatchLayout::RANK_MAJOR;
  const std::size_t rows_per_run = rank_major ? most : most * static_cast<std::size_t>(runtime.num_ranks());
  std::size_t before = 0;
  for (std::size_t run = 0; run < counts.size(); ++run) {
    const auto count = static_cast<std::size_t>(counts[run]);
    if (count > 0) use(run * rows_per_run, before, count);
    before += count;
  }
}

template <typename T>
std::vector<T> read_all(Place& place, const T* from, std::size_t count) {
  std::vector<T> values(count);
  place.read(values.data(), from, count * sizeof(T));
  return values;
}

std::size_t num_scale_words(const RuntimeConfig& config) {
  const auto blocks = static_cast<std::size_t>(config.hidden_size / 128);
  if (config.quant.format == DispatchDataType::MXFP8) return blocks;  // four of 32 in a word
  return config.quant.scale_format == ScaleFormat::UE8M0 ? (blocks + 3) / 4 : blocks;
}

// Scales of an expert (or, RANK_MAJOR, of all ranks) lie as [rows, S'] or, COLUMN, as [S', rows up to a multiple of 4].
std::vector<std::byte> read_scales(Place& place, const MoERuntime& runtime, const LaneBuffers& lane,
                                   const Received& received) {
  constexpr std::size_t kWord = 4;
  const RuntimeConfig& config = runtime.config();
  const std::size_t words = num_scale_words(config),
                    rows = static_cast<std::size_t>(config.max_tokens_per_rank * runtime.num_ranks());
  const std::size_t column_rows = (rows + 3) / 4 * 4;
  const auto* from = static_cast<const std::byte*>(lane.scales);
  std::vector<std::byte> scales(received.num_rows() * words * kWord);
  std::vector<std::byte> column;
  for_each_run(runtime, received.counts, [&](std::size_t first, std::size_t before, std::size_t count) {
    if (config.quant.scale_layout == ScaleLayout::ROW) {
      place.read(&scales[before * words * kWord], from + first * words * kWord, count * words * kWord);
      return;
    }
    column.resize(count * kWord);
    const std::size_t group = first / rows, row = first % rows;
    for (std::size_t word = 0; word < words; ++word) {
      place.read(column.data(), from + ((group * words + word) * column_rows + row) * kWord, count * kWord);
      for (std::size_t i = 0; i < count * kWord; ++i)
        scales[((before + i / kWord) * words + word) * kWord + i % kWord] = column[i];
    }
  });
  return scales;
}

}  // namespace

std::size_t Received::num_rows() const {
  return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
}

Received receive(Place& place, const MoERuntime& runtime, int lane_idx) {
  const RuntimeConfig& config = runtime.config();
  const LaneBuffers& lane = runtime.lane_buffers(lane_idx);
  const bool rank_major = config.output_layout == DispatchLayout::RANK_MAJOR,
             fp8 = config.quant.format != DispatchDataType::BF16;
  const auto num_ranks = static_cast<std::size_t>(runtime.num_ranks()),
             num_experts = static_cast<std::size_t>(runtime.num_local_experts()),
             num_entries = num_ranks * static_cast<std::size_t>(config.max_tokens_per_rank * config.num_topk);
  const std::size_t row_bytes = static_cast<std::size_t>(config.hidden_size) * (fp8 ? 1 : 2);
  Received received;
  received.counts = rank_major ? read_all(place, lane.num_tokens_per_rank, num_ranks)
                               : read_all(place, lane.num_tokens_per_expert, num_experts);
  received.tokens.resize(received.num_rows() * row_bytes);
  received.source_token.resize(rank_major ? 0 : received.num_rows());
  for_each_run(runtime, received.counts, [&](std::size_t first, std::size_t before, std::size_t count) {
    place.read(&received.tokens[before * row_bytes], static_cast<const std::byte*>(lane.tokens) + first * row_bytes,
               count * row_bytes);
    if (!rank_major)
      place.read(&received.source_token[before], lane.source_token + first, count * sizeof(std::int32_t));
  });
  if (fp8) received.scales = read_scales(place, runtime, lane, received);
  if (rank_major) {
    received.topk_ids = read_all(place, lane.topk_ids, num_entries);
    received.weights = read_all(place, lane.weights, num_entries);
  } else {
    received.rank_ranges = read_all(place, lane.rank_ranges, num_experts * num_ranks * 2);
  }
  return received;
}

void answer(Place& place, const MoERuntime& runtime, const Received& received,
            const std::vector<std::uint16_t>& answers, void* expert_output) {
  const RuntimeConfig& config = runtime.config();
  const bool slots =
      config.output_layout == DispatchLayout::RANK_MAJOR && config.combine_mode == CombineMode::DIRECT_SEND;
  const auto elements = static_cast<std::size_t>(config.hidden_size * (slots ? config.num_topk : 1));
  for_each_run(runtime, received.counts, [&](std::size_t first, std::size_t before, std::size_t count) {
    place.write(static_cast<std::uint16_t*>(expert_output) + first * elements, &answers[before * elements],
                count * elements * sizeof(std::uint16_t));
  });
}

}  // namespace expertwire::bench
