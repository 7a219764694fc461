// What a pair must return, by plain loops over the inputs of all ranks. Nothing here is shared with the library: results
// are held against it bit for bit before anything is timed.
#pragma once

#include <cstdint>
#include <vector>

#include "expertwire/types.hpp"
#include "received.hpp"

namespace expertwire::bench {

// What one rank brings.
struct RankInput {
  std::vector<std::uint16_t> x;        // [T, H] BF16
  std::vector<std::int64_t> topk_ids;  // [T, K], negative: selects nothing
  std::vector<float> weights;          // [T, K]
};

// One exchange of all ranks. Scales are in row order: float32 ones of FP8, exponent bytes of MXFP8.
class Reference {
 public:
  // `config` has experts_per_rank filled in. Both live as long as the object.
  Reference(const RuntimeConfig& config, const std::vector<RankInput>& inputs);

  // What `rank` receives.
  Received received(int rank) const;
  // What the experts of `rank` answer to it: each scales its rows by a factor of its own.
  std::vector<std::uint16_t> answers(int rank, const Received& received) const;
  // The combined tokens of `rank`, [T, H] BF16.
  std::vector<std::uint16_t> combined(int rank) const;
  // Selections of all ranks that name an expert.
  std::int64_t num_selections() const;

 private:
  struct Quantised {
    std::vector<std::uint8_t> rows;
    std::vector<float> scales;
  };

  int num_tokens(std::size_t rank) const;
  int owner(std::int64_t expert) const;
  int slot_of(std::size_t rank, int token, std::int64_t expert) const;  // -1 if the token does not name the expert
  void append_row(Received& received, std::size_t rank, int token) const;
  Received received_by_expert(int rank) const;
  Received received_by_rank(int rank) const;
  float scale_of(const Received& received, std::size_t block) const;  // block of all received rows
  std::vector<float> row_as_experts_see_it(std::size_t rank, int token) const;
  std::vector<std::uint16_t> expert_row(std::int64_t expert, const std::vector<float>& row) const;
  std::vector<std::uint16_t> combined_token(std::size_t rank, int token) const;
  void answer_slots(const Received& received, std::size_t entry, const std::vector<float>& row,
                    std::vector<std::uint16_t>& answers) const;

  const RuntimeConfig& config_;
  const std::vector<RankInput>& inputs_;
  std::vector<int> first_expert_;  // by rank, and behind the last one E
  bool mx_;
  std::size_t scale_block_;
  std::vector<Quantised> quantised_;
};

}  // namespace expertwire::bench
