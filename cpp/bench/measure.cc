#include "measure.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>

#include "base/collective.hpp"
#include "cuda_place.hpp"
#include "expertwire/moe_runtime.hpp"
#include "place.hpp"

namespace expertwire::bench {
namespace {

// Pairs issued in a row when the caller is timed: few enough that no launch waits for room in a queue.
constexpr int kHostPairs = 20;

std::int64_t nanoseconds(double microseconds) { return std::llround(microseconds * 1e3); }

template <typename T>
void must_equal(const char* what, const std::vector<T>& got, const std::vector<T>& wanted) {
  if (got.size() != wanted.size()) {
    throw Error(ErrorCode::Backend, std::string("wrong result: ") + what + " has " + std::to_string(got.size()) +
                                        " elements, expected " + std::to_string(wanted.size()));
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &wanted[i], sizeof(T)) != 0)
      throw Error(ErrorCode::Backend,
                  std::string("wrong result: ") + what + " differs at element " + std::to_string(i));
  }
}

// One rank: its place, its runtime, and its arrays there.
class Rank {
 public:
  Rank(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options, const Reference& reference,
       const RankInput& input)
      : bootstrap_(*bootstrap), options_(options), reference_(reference) {
    RuntimeConfig config = options.config();
    config.device.type = options.backend;
    together([&] {
      if (options.backend == DeviceType::CUDA) config.device.index = bootstrap->rank() % num_cuda_devices();
      place_ = make_place(config.device);
      request_.x = place(input.x);
      request_.topk_ids = place(input.topk_ids);
      request_.weights = place(input.weights);
      num_elements_ = input.x.size();
      collect_.out = place_->allocate(num_elements_ * sizeof(std::uint16_t));
    });
    runtime_.emplace(bootstrap, config);
    request_.num_tokens = collect_.num_tokens = options.num_tokens;
    request_.stream = collect_.stream = place_->stream();
  }

  RankTimes run() {
    together([&] { prepare(); });
    if (options_.cuda_graph) capture();
    RankTimes times;
    for (const int count : options_.parts()) together([&] { time_round(count, times); });
    together([&] { check(); });
    return times;
  }

 private:
  void together(const std::function<void()>& step) { succeed_together(bootstrap_, step); }

  template <typename T>
  const T* place(const std::vector<T>& values) {
    auto* memory = static_cast<T*>(place_->allocate(values.size() * sizeof(T)));
    place_->write(memory, values.data(), values.size() * sizeof(T));
    return memory;
  }

  void dispatch() { collect_.handle = runtime_->dispatch(request_); }
  void combine() { runtime_->combine(collect_); }
  void pair() {
    dispatch();
    combine();
  }

  // The first pair is checked; later ones use its experts' answers again.
  void prepare() {
    dispatch();
    const LaneBuffers& lane = runtime_->lane_buffers(collect_.handle.lane());
    const Received received = receive(*place_, *runtime_, collect_.handle.lane());
    answer(*place_, *runtime_, received, reference_.answers(bootstrap_.rank(), received), lane.combine_input);
    collect_.expert_output = lane.combine_input;
    combine();
    check();
    for (int i = 0; i < options_.warmup; ++i) pair();
    place_->wait();
  }

  void check() {
    const int rank = bootstrap_.rank();
    const Received got = receive(*place_, *runtime_, collect_.handle.lane()), wanted = reference_.received(rank);
    must_equal("counts", got.counts, wanted.counts);
    must_equal("tokens", got.tokens, wanted.tokens);
    must_equal("scales", got.scales, wanted.scales);
    must_equal("rank_ranges", got.rank_ranges, wanted.rank_ranges);
    must_equal("source_token", got.source_token, wanted.source_token);
    must_equal("topk_ids", got.topk_ids, wanted.topk_ids);
    must_equal("weights", got.weights, wanted.weights);
    const std::vector<std::uint16_t> combined = reference_.combined(rank);
    std::vector<std::uint16_t> out(combined.size());
    place_->read(out.data(), collect_.out, out.size() * sizeof(std::uint16_t));
    must_equal("combined", out, combined);
  }

  // Also holds what a replay produces against the reference.
  void capture() {
    together([&] {
      graph_.emplace(cuda_place(), [&] {
        for (int i = 0; i < options_.iters_per_graph; ++i) pair();
      });
      const std::vector<std::uint16_t> nonsense(num_elements_, 0x4242);
      place_->write(collect_.out, nonsense.data(), num_elements_ * sizeof(std::uint16_t));
    });
    together([&] {
      graph_->launch();
      check();
    });
  }

  // Each kind of timing begins with a pair more, or a replay, which brings caches and ranks back in step.
  void time_round(int count, RankTimes& times) {
    if (options_.backend == DeviceType::CPU) return time_calls(count, "", times);
    time_launches(count, times);
    if (graph_) time_replays(count, times);
    time_calls(std::min(count, kHostPairs), "-host", times);
    if (options_.validate) check();
  }

  void time_calls(int count, const std::string& kind, RankTimes& times) {
    const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch(); };
    pair();
    place_->wait();
    for (int i = 0; i < count; ++i) {
      const std::chrono::nanoseconds start = now();
      dispatch();
      const std::chrono::nanoseconds middle = now();
      combine();
      const std::chrono::nanoseconds end = now();
      times["dispatch" + kind].push_back((middle - start).count());
      times["combine" + kind].push_back((end - middle).count());
      if (kind.empty()) times["pair"].push_back((end - start).count());
      if (options_.validate && kind.empty()) check();
    }
  }

  // The host does not wait in between: it stays ahead of the GPU.
  void time_launches(int count, RankTimes& times) {
    const std::vector<Event> events = make_events(2 * count + 1);
    pair();
    events.front().record();
    for (std::size_t i = 1; i < events.size(); i += 2) {
      dispatch();
      events[i].record();
      combine();
      events[i + 1].record();
    }
    place_->wait();
    for (std::size_t i = 1; i < events.size(); i += 2) {
      times["dispatch-launch"].push_back(nanoseconds(events[i].microseconds_since(events[i - 1])));
      times["combine-launch"].push_back(nanoseconds(events[i + 1].microseconds_since(events[i])));
      times["pair-launch"].push_back(nanoseconds(events[i + 1].microseconds_since(events[i - 1])));
    }
  }

  void time_replays(int count, RankTimes& times) {
    const std::vector<Event> events = make_events(count + 1);
    graph_->launch();
    events.front().record();
    for (std::size_t i = 1; i < events.size(); ++i) {
      graph_->launch();
      events[i].record();
    }
    place_->wait();
    for (std::size_t i = 1; i < events.size(); ++i)
      times["pair"].push_back(nanoseconds(events[i].microseconds_since(events[i - 1]) / options_.iters_per_graph));
  }

  const CudaPlace& cuda_place() const { return static_cast<const CudaPlace&>(*place_); }

  std::vector<Event> make_events(int count) const {
    std::vector<Event> events;
    for (int i = 0; i < count; ++i) events.emplace_back(cuda_place());
    return events;
  }

  Bootstrap& bootstrap_;
  const Options& options_;
  const Reference& reference_;
  std::unique_ptr<Place> place_;
  std::optional<MoERuntime> runtime_;  // ends before its place
  std::optional<Graph> graph_;
  LatencyDispatchRequest request_;
  LatencyCombineRequest collect_;
  std::size_t num_elements_ = 0;  // of this rank's tokens
};

std::string packed(const RankTimes& times) {
  std::string bytes;
  for (const auto& [phase, values] : times)
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::int64_t));
  return bytes;
}

// The inverse; every rank has as many samples of each phase as this one.
RankTimes unpacked(const std::string& bytes, RankTimes times) {
  const char* from = bytes.data();
  for (auto& [phase, values] : times) {
    std::memcpy(values.data(), from, values.size() * sizeof(std::int64_t));
    from += values.size() * sizeof(std::int64_t);
  }
  return times;
}

}  // namespace

std::vector<RankTimes> measure(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options,
                               const std::vector<RankInput>& inputs) {
  const RuntimeConfig config = options.config();
  const Reference reference(config, inputs);
  Rank rank(bootstrap, options, reference, inputs[static_cast<std::size_t>(bootstrap->rank())]);
  const RankTimes mine = rank.run();
  std::vector<RankTimes> all;
  for (const std::string& bytes : bootstrap->all_gather(packed(mine))) all.push_back(unpacked(bytes, mine));
  return all;
}

}  // namespace expertwire::bench
