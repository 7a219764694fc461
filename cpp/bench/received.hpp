// What a dispatch left in a lane, on the host; and the way back, for what experts answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "expertwire/moe_runtime.hpp"
#include "place.hpp"

namespace expertwire::bench {

// Rows beyond the counts are left out: those of the first expert or source rank come first, one behind the other.
struct Received {
  std::vector<std::int32_t> counts;        // rows of each local expert (EXPERT_MAJOR) or source rank (RANK_MAJOR)
  std::vector<std::byte> tokens;           // [N, H], BF16 or E4M3
  std::vector<std::byte> scales;           // FP8: [N, S'], whatever the layout of the lane
  std::vector<std::int32_t> rank_ranges;   // EXPERT_MAJOR [L, R, 2]
  std::vector<std::int32_t> source_token;  // EXPERT_MAJOR [N]
  std::vector<std::int32_t> topk_ids;      // RANK_MAJOR [R*M, K], padding rows too
  std::vector<float> weights;              // RANK_MAJOR [R*M, K], padding rows too

  std::size_t num_rows() const;
};

// Waits for the stream of `place`, which is that of the dispatch.
Received receive(Place& place, const MoERuntime& runtime, int lane);

// Puts answers, BF16 [N, H] or with RANK_MAJOR and DIRECT_SEND [N, K, H], where the rows of `received` lie in an array of the
// shape that combine takes.
void answer(Place& place, const MoERuntime& runtime, const Received& received,
            const std::vector<std::uint16_t>& answers, void* expert_output);

}  // namespace expertwire::bench
