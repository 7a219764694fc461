/// @file
/// Plain types of the public API.
///
/// Symbols: R ranks, E experts of all ranks, L experts of this rank, T tokens of this rank in this call, M
/// max_tokens_per_rank, H hidden_size, K num_topk, S = H / 128 scale blocks (MXFP8: H / 32), F max_in_flight. Arrays are
/// dense and in row order: the last index is the fastest.
#pragma once

#include <cstdint>
#include <vector>

namespace [[gnu::visibility("default")]] expertwire {

/// LATENCY: few tokens in a call, as in decoding. THROUGHPUT is reserved: Unsupported in this version.
enum class MoEMode { LATENCY, THROUGHPUT };

/// How dispatch arranges the rows that this rank receives.
enum class DispatchLayout {
  /// [L, R*M, H]: a token lies there once for each local expert that it chose. Of expert e the first
  /// num_tokens_per_expert[e] rows are valid, ordered by source rank, then token.
  EXPERT_MAJOR,
  /// [R*M, H]: source rank s owns rows s*M and following; the first num_tokens_per_rank[s] are valid, ordered by token.
  /// A token lies there once, its ids and weights beside it.
  RANK_MAJOR,
  /// Reserved: Unsupported in this version.
  TOKEN_MAJOR,
};

/// Who sums a token's expert outputs. Sums are float32 in a fixed order, products and sums each rounded, so that
/// results are the same bits every time and on every backend.
enum class CombineMode {
  /// The experts' rank sums its experts' outputs of a token (EXPERT_MAJOR; the caller does for RANK_MAJOR) and sends
  /// one BF16 row; the token's rank sums those by ascending rank.
  RANK_LOCAL_REDUCE,
  /// Every output travels as it is; the token's rank sums them by ascending k.
  DIRECT_SEND,
};

/// FP8_E4M3: E4M3 with a scale for each 128 elements. MXFP8: E4M3 with a UE8M0 scale for each 32.
enum class DispatchDataType { BF16, FP8_E4M3, MXFP8 };
/// Scales: float32, or UE8M0: the exponents of four consecutive blocks in one int32, the lower block in the lower
/// byte.
enum class ScaleFormat { FLOAT32, UE8M0 };
/// ROW: scales of a row are neighbours. COLUMN: scales of one block for consecutive rows are, as grouped GEMMs read
/// them.
enum class ScaleLayout { ROW, COLUMN };
enum class IndexType { INT32, INT64 };

/// What the others do once a rank does not take part within timeout_s, exits, or closes.
enum class PeerLossPolicy {
  /// The operation throws PeerLost, and so does every later one.
  RAISE,
  /// They go on without it: its rows and its experts' outputs are absent.
  MASK,
};

enum class DeviceType { CPU, CUDA };

/// Payload of dispatched rows; combine is BF16 always. The members after `format` do not matter for BF16. MXFP8 implies
/// UE8M0.
struct QuantConfig {
  DispatchDataType format = DispatchDataType::BF16;
  /// Scales are powers of two. Implied by UE8M0.
  bool round_scale_pow2 = false;
  ScaleFormat scale_format = ScaleFormat::FLOAT32;
  ScaleLayout scale_layout = ScaleLayout::ROW;
};

struct Device {
  DeviceType type = DeviceType::CPU;
  /// Ordinal among the GPUs that this process sees; 0 for the CPU.
  int index = 0;
};

/// Everything that describes a runtime but its group. Checked whole at construction, against itself and against R, which
/// is 1 to 1024. Equal on all ranks but for validate, two_phase, block_overlap, device.index and the numbers of blocks.
/// What a backend does not do yet is refused with Unsupported; README.md has the list.
struct RuntimeConfig {
  /// E, 1 to 2^20.
  int num_experts = 0;
  /// H: a multiple of 8 (BF16) or 128 (FP8_E4M3, MXFP8), at most 2^20.
  int hidden_size = 0;
  /// K, 1 to min(E, 32).
  int num_topk = 0;
  /// M, at least 1, R * M below 2^31, R * M * K * H at most 2^54. EXPERT_MAJOR: max(L) * R * M below 2^31 too.
  int max_tokens_per_rank = 0;
  /// Experts of each rank, contiguous by rank. Empty: E / R each, if R divides E. Otherwise R counts >= 0 that sum to
  /// E.
  std::vector<int> experts_per_rank;
  /// Empty: tokens choose physical experts, of which E are spread over the ranks. Else [E]: the logical expert that each
  /// physical one holds, or -1 for none. Tokens then choose logical experts, 0 to G - 1, each of which is held at least
  /// once; physical experts are what outputs and counts speak of. MoERuntime::update_placement() replaces it, and
  /// docs/placement.md says which of several copies a rank sends its tokens to. G is at least num_topk.
  std::vector<int> placement;
  MoEMode mode = MoEMode::LATENCY;
  DispatchLayout output_layout = DispatchLayout::EXPERT_MAJOR;
  CombineMode combine_mode = CombineMode::RANK_LOCAL_REDUCE;
  QuantConfig quant;
  /// RANK_MAJOR: what stands in topk_ids for "no local expert". Outside [0, E).
  int invalid_token_expert_id = -1;
  /// CUDA: blocks of a grid, at most 2^20; 0 chooses. No effect on the CPU.
  int dispatch_num_blocks = 0;
  int combine_num_blocks = 0;
  /// F, 1 to 64: lanes, used in turn. A dispatch's output and handle live until F newer dispatches.
  int max_in_flight = 1;
  /// CUDA: check ids on the device. The CPU always checks them.
  bool validate = false;
  /// CUDA: also load the kernels of dispatch_send and the like, which are refused without. The CPU always has them.
  bool two_phase = false;
  /// CUDA: also load the kernels of LatencyCombineRequest::ready, which is refused without. The CPU always has them.
  bool block_overlap = false;
  Device device;
  /// Bound of every wait for a peer in seconds, above 0 and at most 1e6.
  double timeout_s = 100.0;
  PeerLossPolicy on_peer_loss = PeerLossPolicy::RAISE;
};

/// Fixed buffers of one lane, in the memory of the device. The runtime owns them; they stay where they are for its
/// life. What dispatch wrote is valid until F newer dispatches. Rows beyond the counts are unspecified: never read
/// them. Members that the layout does not use are null.
struct LaneBuffers {
  /// Received rows, BF16 or E4M3: EXPERT_MAJOR [L, R*M, H], RANK_MAJOR [R*M, H].
  void* tokens = nullptr;
  /// FP8_E4M3 and MXFP8: S' scales for each row of `tokens`; FLOAT32: S' = S floats, UE8M0: S' = ceil(S / 4) int32. ROW
  /// [.., rows, S'], where rows is R*M; COLUMN [.., S', rows rounded up to a multiple of 4], as TMA wants it.
  void* scales = nullptr;
  std::int32_t* num_tokens_per_expert = nullptr;  ///< EXPERT_MAJOR [L]: valid rows of each local expert
  std::int32_t* num_tokens_per_rank = nullptr;    ///< RANK_MAJOR [R]: valid rows of each source rank
  std::int32_t* rank_ranges = nullptr;            ///< EXPERT_MAJOR [L, R, 2]: first row and row count by source rank
  std::int32_t* source_token = nullptr;           ///< EXPERT_MAJOR [L, R*M]: source rank * M + token index there
  /// RANK_MAJOR [R*M, K]: global ids of (physical) local experts, else invalid_token_expert_id
  std::int32_t* topk_ids = nullptr;
  float* weights = nullptr;  ///< RANK_MAJOR [R*M, K]: their weights, else 0
  /// A place for expert outputs, BF16: the shape of `tokens`, or [R*M, K, H] for RANK_MAJOR with DIRECT_SEND. Any other
  /// array of that shape serves combine as well.
  void* combine_input = nullptr;
  /// CUDA [R]: nanoseconds that operations of this lane ran before each rank was heard to be in them. They only grow, by
  /// kernels, and may be read on the stream of the calls. The CPU has none (RuntimeStats::source_wait_seconds).
  const std::uint64_t* source_wait_ns = nullptr;
};

/// Bytes that a runtime holds on this rank, by a formula of the configuration alone (docs/layout.md).
struct MemoryBytes {
  std::uint64_t shared = 0;    ///< written by this rank or its peers, and read by the other
  std::uint64_t outputs = 0;   ///< lane buffers; address space on the CPU, touched only as far as it is used
  std::uint64_t private_ = 0;  ///< routing facts and scratch
};

/// Since construction. What a backend does not count stays 0; README.md says what.
struct RuntimeStats {
  std::uint64_t dispatch_calls = 0;
  std::uint64_t combine_calls = 0;
  std::uint64_t bytes_sent = 0;  ///< rows and scales that left this rank for other ranks
  std::uint64_t bytes_received = 0;
  std::uint64_t timeouts = 0;
  std::vector<std::uint64_t> expert_tokens;  ///< [L] rows received for each local (physical) expert
  std::vector<double>
      source_wait_seconds;  ///< [R] time spent waiting for each rank; CUDA: in an operation, until it was in it, too
};

}  // namespace expertwire
