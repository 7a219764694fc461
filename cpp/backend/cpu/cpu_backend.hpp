// The CPU backend: ranks are threads or processes of one host over shared memory. Rows are pulled: a rank writes what it
// sends into its own segment and posts, and every peer copies what is for it to its final place. dispatch.cc and
// combine.cc are the two operations; docs/protocol.md says why a buffer may be written again.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/peer_board.hpp"
#include "backend/cpu/rows.hpp"
#include "backend/cpu/shared_memory.hpp"

namespace expertwire::cpu {

// With a row count: dispatch was given no weights, so combine may bring some.
constexpr i32 kWeightsComeLate = static_cast<i32>(0x8000'0000u);

// Typed view of one rank's dispatch buffer.
struct DispatchBuffer {
  i32* rank_rows;   // [R] rows for each rank, with kWeightsComeLate
  i32* row_lists;   // [R, M] their token indices
  i32* topk_ids;    // [M, K]
  float* weights;   // [M, K]
  std::byte* rows;  // [M] by token index

  DispatchBuffer(std::byte* base, const SegmentLayout& layout);
  std::byte* row(int token) const { return rows + static_cast<std::size_t>(token) * row_bytes_; }

 private:
  std::size_t row_bytes_;
};

struct CombineBuffer {
  CombinePacket* packet;
  float* weights;   // [M, K]
  std::byte* rows;  // [R, M, row_slots] by destination rank and slot

  CombineBuffer(std::byte* base, const SegmentLayout& layout);
  std::uint16_t* row(std::size_t received, int selection) const {
    return reinterpret_cast<std::uint16_t*>(rows +
                                            (received * row_slots_ + static_cast<std::size_t>(selection)) * row_bytes_);
  }

 private:
  std::size_t row_slots_, row_bytes_;
};

// Typed view of one lane's routing facts (RouteLayout).
struct Routes {
  i32 *num_destinations, *destination_rank, *destination_slot;
  i32 *rank_rows, *token, *num_selections, *selection_row, *selection_k;
  float* selection_weight;

  Routes(std::byte* base, const RouteLayout& layout);
  std::size_t first_destination(int token) const { return static_cast<std::size_t>(token) * destinations_; }
  std::size_t first_selection(std::size_t received) const { return received * selections_; }

 private:
  std::size_t destinations_, selections_;
};

// An operation under way. In two phases the own rank's rows go through its segment like those for others, so that the
// inputs are free after the first: then `params` serves for the outputs alone.
struct DispatchCall {
  DispatchParams params;
  Operation operation;
  bool in_two_phases = false;
};

struct CombineCall {
  CombineParams params;
  Operation operation;
  bool in_two_phases = false;
  bool stages_own_rows = false;               // also where rows are taken as they are published
  std::vector<const float*> new_weights;      // [R] given to combine, or null
  std::vector<char> absent;                   // [R] lost, or combining another dispatch
  std::vector<char> kept_weights;             // [R] did not ask whether this rank brings weights
  std::vector<std::uint32_t> other_dispatch;  // [R] 0, or which other dispatch
};

struct Lane {
  Mapping outputs;
  Mapping route_memory;
  LaneBuffers buffers;
  Routes routes;
  std::uint32_t dispatch_epoch = kWordEpochs.before_first();
  std::uint32_t combine_epoch = kWordEpochs.before_first();
  DispatchCall dispatch;
  CombineCall combine;
  std::vector<char> weights_come_late;  // [R] of the last dispatch

  Lane(const Problem& problem, const Plan& plan);
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Problem& problem, const Plan& plan, std::vector<Lane> lanes, std::vector<Peer> peers);
  ~CpuBackend() override = default;

  const LaneBuffers& lane_buffers(int lane) const override { return lanes_[static_cast<std::size_t>(lane)].buffers; }
  void dispatch(int lane, const DispatchParams& params) override;
  void combine(int lane, const CombineParams& params) override;
  void send(int lane, const DispatchParams& params) override;
  void send(int lane, const CombineParams& params) override;
  void receive(Step step, int lane, void* stream) override;
  bool has_arrived(Step step, int lane) override;
  RuntimeStats stats() const override;
  std::vector<int> lost_ranks() const override { return board_.lost_ranks(); }
  bool is_available() const noexcept override { return board_.is_available(); }
  void check() override { board_.require_available(); }
  void check_update(void*) override { board_.require_available(); }
  void update_placement(std::vector<i32> physical_of_logical, void*) override {
    problem_.physical_of_logical = std::move(physical_of_logical);
  }
  void close() noexcept override { board_.close(); }

 private:
  DispatchBuffer dispatch_buffer(int rank, int lane, std::uint32_t epoch) const;
  CombineBuffer combine_buffer(int rank, int lane, std::uint32_t epoch) const;
  std::size_t source_row(int rank, int slot) const {  // index into [R, M]
    return static_cast<std::size_t>(rank) * static_cast<std::size_t>(shape_.max_tokens_per_rank) +
           static_cast<std::size_t>(slot);
  }
  std::size_t num_source_rows() const { return source_row(shape_.num_ranks, 0); }
  std::size_t first_entry(std::size_t row) const {  // index into [.., K] of ids and weights
    return row * static_cast<std::size_t>(shape_.num_topk);
  }
  std::size_t first_entry(int token) const { return first_entry(static_cast<std::size_t>(token)); }

  // dispatch.cc
  template <typename Index>
  void take_topk_ids(const Index* topk_ids, int num_tokens, DispatchBuffer& own);
  void send_dispatch(int lane_idx, const DispatchParams& params, bool in_two_phases);
  void receive_dispatch(Lane& lane);
  void write_routes(Lane& lane, const DispatchParams& params, DispatchBuffer& own);
  void write_rows(const Lane& lane, DispatchBuffer& own) const;
  void receive_all(Lane& lane);
  void receive_from(int source, Lane& lane, const DispatchBuffer& from, int num_rows);
  void note_selections(Lane& lane, const DispatchBuffer& from, std::size_t received, int source, int token);
  void place_row(Lane& lane, const DispatchParams& params, std::size_t received, const std::byte* row,
                 const std::byte* scales);
  void place_scales(Lane& lane, const std::byte* scales, std::size_t output_row) const;
  void finish_source(int source, Lane& lane, int num_rows);
  void fill_padding(Lane& lane, std::size_t first, std::size_t last) const;
  void clear_counts(Lane& lane) const;
  void count_dispatch(const DispatchBuffer& own);

  // combine.cc
  struct CombineView;
  CombineView view(Lane& lane) const;
  void send_combine(int lane_idx, const CombineParams& params, bool in_two_phases);
  void receive_combine(Lane& lane);
  void send_rows(const CombineView& call);
  void write_published_rows(const CombineView& call);
  bool is_published(const CombineView& call, std::size_t received) const;
  bool hears_of_weights(const CombineView& call, int destination) const;
  void meet(const CombineView& call, WordKind kind, int peer);
  void write_row(const CombineView& call, int destination, std::size_t received);
  void reduce_selections(const CombineView& call, std::size_t received, const float* new_weights,
                         std::uint16_t* out) const;
  void sum_token(const CombineView& call, int token);
  int collect_partials(const CombineView& call, int token, const std::uint16_t** rows);
  int collect_slots(const CombineView& call, int token, const std::uint16_t** rows, float* weights) const;
  const std::uint16_t* expert_row(const CombineView& call, std::size_t received, int selection) const;
  const std::uint16_t* sent_row(const CombineView& call, int rank, std::size_t received, int selection) const;
  void fill_with_nan(const CombineParams& params) const;
  void count_combine_bytes(const CombineView& call);
  void require_agreement(const CombineView& call) const;

  Problem problem_;
  Plan plan_;
  Shape shape_;
  bool rank_major_;
  bool sums_here_;  // a combine sums before it sends
  const RowOps& ops_;
  std::vector<Lane> lanes_;
  PeerBoard board_;
  std::vector<i32> rank_of_expert_;        // [E]
  std::vector<std::uint64_t> last_token_;  // [E] the last token that chose the expert: finds repeats in one pass
  std::uint64_t token_counter_ = 0;
  std::vector<i32> expert_rows_;            // [L] rows placed so far in this dispatch
  std::vector<std::uint16_t> partial_row_;  // [H]
  std::vector<char> is_written_;            // [R, M] of the rows that one combine sends as they are published
  RuntimeStats stats_;
};

// Collective: returns on every rank or throws on every rank.
std::unique_ptr<Backend> make_cpu_backend(const Problem& problem, const Plan& plan, Bootstrap& bootstrap);

}  // namespace expertwire::cpu
