// Expert ids at and beyond every edge of their type, and calls without tokens, whose pointers are null. For sanitizers:
// nothing may be read or written by an id before it has been checked.
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/moe_runtime.hpp"
#include "support.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::test;

constexpr int kTokens = 3;
constexpr int kHidden = 8;

RuntimeConfig make_config(DispatchLayout layout) {
  RuntimeConfig config;
  config.num_experts = 4;
  config.hidden_size = kHidden;
  config.num_topk = 2;
  config.max_tokens_per_rank = kTokens;
  config.output_layout = layout;
  config.timeout_s = 20.0;
  return config;
}

template <typename Index>
DispatchHandle dispatch(MoERuntime& runtime, const std::vector<Index>& ids) {
  const std::vector<std::uint16_t> x(kTokens * kHidden, 0x3F80);
  LatencyDispatchRequest request;
  request.topk_ids_type = sizeof(Index) == 4 ? IndexType::INT32 : IndexType::INT64;
  if (!ids.empty()) {
    request.x = x.data();
    request.topk_ids = ids.data();
    request.num_tokens = kTokens;
  }
  return runtime.dispatch(request);
}

void combine(MoERuntime& runtime, const DispatchHandle& handle, int num_tokens) {
  std::vector<std::uint16_t> out(kTokens * kHidden);
  LatencyCombineRequest request;
  request.expert_output = runtime.combine_input_buffer();
  request.handle = handle;
  request.out = num_tokens > 0 ? out.data() : nullptr;
  request.num_tokens = num_tokens;
  runtime.combine(request);
}

template <typename Index>
std::vector<std::vector<Index>> wrong_ids() {
  using Limits = std::numeric_limits<Index>;
  std::vector<std::vector<Index>> wrong{
      {0, 0, 1, 2, 1, 2}, {0, 1, 1, 2, 3, 3}, {4, 0, 1, 2, 1, 2}, {0, 1, 2, 3, 0, Limits::max()}};
  for (int bit = 2; bit < Limits::digits; ++bit) wrong.push_back({0, 1, 2, 3, static_cast<Index>(Index{1} << bit), 1});
  return wrong;
}

template <typename Index>
void check_ids(DispatchLayout layout) {
  const auto groups = make_local_bootstraps(2, 20.0);
  run_ranks(2, [&](int rank) {
    MoERuntime runtime(groups[static_cast<std::size_t>(rank)], make_config(layout));
    for (const std::vector<Index>& ids : wrong_ids<Index>())
      check_throws(ErrorCode::InvalidArgument, "topk_ids[", [&] { dispatch(runtime, ids); });
    const Index lowest = std::numeric_limits<Index>::min();
    for (const std::vector<Index>& ids :
         {std::vector<Index>{-1, -1, -5, -5, lowest, lowest}, std::vector<Index>{lowest, 3, 0, 1, -2, 2}})
      combine(runtime, dispatch(runtime, ids), kTokens);
    combine(runtime, dispatch(runtime, std::vector<Index>{}), 0);
  });
}

TEST_CASE_TEMPLATE("ids at the edges of their type", Index, std::int32_t, std::int64_t) {
  check_ids<Index>(DispatchLayout::EXPERT_MAJOR);
  check_ids<Index>(DispatchLayout::RANK_MAJOR);
}

}  // namespace
