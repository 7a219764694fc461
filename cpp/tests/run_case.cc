#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "bench/received.hpp"
#include "stored_case.hpp"

namespace expertwire::test {
namespace {

constexpr std::byte kPoison{0x3F};  // plausible in every format: about 0.75 in BF16, 1.9 in E4M3
constexpr std::size_t kGuardBytes = 16;

class CaseRank {
 public:
  CaseRank(const std::shared_ptr<Bootstrap>& bootstrap, const StoredCase& stored, bench::Place& place, int num_blocks)
      : stored_(stored),
        place_(place),
        rank_(bootstrap->rank()),
        x_(put("x")),
        block_scales_(put("block_scales")),
        topk_ids_(put("topk_ids")),
        weights_(put("weights")),
        new_weights_(put("new_weights")),
        out_(place.allocate(out_bytes() + kGuardBytes)),
        runtime_(bootstrap, configured(num_blocks)) {}

  void run_pairs() {
    const int num_pairs = runtime_.config().max_in_flight + 2;  // the last ones use buffers again
    for (int pair = 0; pair < num_pairs; ++pair) {
      poison_lane(runtime_.next_lane());
      const DispatchHandle handle = runtime_.dispatch(dispatch_request());
      check_dispatched(handle);
      check_combined(handle);
      if (pair % 2 == 0) check_combined(handle);  // a handle that is not stale serves again
    }
  }

 private:
  RuntimeConfig configured(int num_blocks) const {
    RuntimeConfig config = stored_.config;
    config.device = place_.device();
    config.dispatch_num_blocks = config.combine_num_blocks = num_blocks;
    config.timeout_s = 20.0;
    return config;
  }

  const void* put(const std::string& name) {
    const StoredArray* array = stored_.find(rank_, name);
    if (array == nullptr) return nullptr;
    void* memory = place_.allocate(array->bytes.size());
    place_.write(memory, array->bytes.data(), array->bytes.size());
    return memory;
  }

  std::size_t out_bytes() const { return stored_.get(rank_, "combined").bytes.size(); }
  int num_tokens() const { return static_cast<int>(stored_.get(rank_, "x").shape[0]); }

  LatencyDispatchRequest dispatch_request() const {
    LatencyDispatchRequest request;
    request.x = x_;
    request.block_scales = block_scales_;
    request.topk_ids = topk_ids_;
    request.topk_ids_type = stored_.get(rank_, "topk_ids").dtype == "int32" ? IndexType::INT32 : IndexType::INT64;
    request.weights = static_cast<const float*>(weights_);
    request.num_tokens = num_tokens();
    request.stream = place_.stream();
    return request;
  }

  LatencyCombineRequest combine_request(const DispatchHandle& handle) const {
    LatencyCombineRequest request;
    if (runtime_.num_local_experts() > 0) request.expert_output = runtime_.lane_buffers(handle.lane()).combine_input;
    request.handle = handle;
    request.weights = static_cast<const float*>(new_weights_);
    request.out = out_;
    request.num_tokens = num_tokens();
    request.stream = place_.stream();
    return request;
  }

  void fill(void* memory, std::size_t bytes) {
    const std::vector<std::byte> poison(bytes, kPoison);
    place_.write(memory, poison.data(), bytes);
  }

  // A row that is not written, and one beyond the counts that is read, both show.
  void poison_lane(int lane) {
    const RuntimeConfig& config = runtime_.config();
    const LaneBuffers& buffers = runtime_.lane_buffers(lane);
    const bool rank_major = config.output_layout == DispatchLayout::RANK_MAJOR;
    const int groups = rank_major ? 1 : runtime_.num_local_experts();
    const auto elements = static_cast<std::size_t>(groups * runtime_.num_ranks() * config.max_tokens_per_rank) *
                          static_cast<std::size_t>(config.hidden_size);
    const bool slots = rank_major && config.combine_mode == CombineMode::DIRECT_SEND;
    fill(buffers.tokens, elements * (config.quant.format == DispatchDataType::BF16 ? 2 : 1));
    fill(buffers.combine_input, elements * 2 * static_cast<std::size_t>(slots ? config.num_topk : 1));
  }

  void check_dispatched(const DispatchHandle& handle) {
    const bench::Received got = bench::receive(place_, runtime_, handle.lane());
    const bool rank_major = stored_.config.output_layout == DispatchLayout::RANK_MAJOR;
    const auto same = [&](const char* name, const std::vector<std::byte>& bytes) {
      check_same(stored_.name + ": " + name + " on rank " + std::to_string(rank_), bytes, stored_.get(rank_, name));
    };
    same(rank_major ? "num_tokens_per_rank" : "num_tokens_per_expert", as_bytes(got.counts));
    same("tokens", got.tokens);
    if (stored_.config.quant.format != DispatchDataType::BF16) same("scales", got.scales);
    if (rank_major) {
      same("received_ids", as_bytes(got.topk_ids));
      same("received_weights", as_bytes(got.weights));
    } else {
      same("rank_ranges", as_bytes(got.rank_ranges));
      same("source_token", as_bytes(got.source_token));
    }
    const std::vector<std::byte>& stored_answers = stored_.get(rank_, "expert_output").bytes;
    std::vector<std::uint16_t> answers(stored_answers.size() / 2);
    if (!answers.empty()) std::memcpy(answers.data(), stored_answers.data(), stored_answers.size());
    bench::answer(place_, runtime_, got, answers, runtime_.lane_buffers(handle.lane()).combine_input);
  }

  void check_combined(const DispatchHandle& handle) {
    fill(out_, out_bytes() + kGuardBytes);
    runtime_.combine(combine_request(handle));
    std::vector<std::byte> got(out_bytes() + kGuardBytes);
    place_.read(got.data(), out_, got.size());
    const std::vector<std::byte> guard(got.end() - kGuardBytes, got.end());
    if (guard != std::vector<std::byte>(kGuardBytes, kPoison)) FAIL(stored_.name, ": combine wrote beyond its output");
    got.resize(out_bytes());
    check_same(stored_.name + ": combined on rank " + std::to_string(rank_), got, stored_.get(rank_, "combined"));
  }

  const StoredCase& stored_;
  bench::Place& place_;
  const int rank_;
  const void *x_, *block_scales_, *topk_ids_, *weights_, *new_weights_;
  void* out_;
  MoERuntime runtime_;
};

}  // namespace

void run_case(const std::shared_ptr<Bootstrap>& bootstrap, const StoredCase& stored, bench::Place& place,
              int num_blocks) {
  CaseRank rank(bootstrap, stored, place, num_blocks);
  rank.run_pairs();
  bootstrap->barrier();  // ranks that share a GPU: nobody frees memory while a peer's kernel may wait
}

}  // namespace expertwire::test
