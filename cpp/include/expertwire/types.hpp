// Plain types of the public API. Symbols: R ranks, E global experts, L experts on this rank, T tokens of this rank in
// this call, M max_tokens_per_rank, H hidden_size, K num_topk, S = H / 128 scale blocks, F max_in_flight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace expertwire {

enum class MoEMode { LATENCY, THROUGHPUT };
enum class DispatchLayout { EXPERT_MAJOR, RANK_MAJOR, TOKEN_MAJOR };
enum class CombineMode { RANK_LOCAL_REDUCE, DIRECT_SEND };
enum class DispatchDataType { BF16, FP8_E4M3 };
enum class ScaleFormat { FLOAT32, UE8M0 };
enum class ScaleLayout { ROW, COLUMN };
enum class IndexType { INT32, INT64 };
enum class PeerLossPolicy { RAISE, MASK };
enum class DeviceType { CPU, CUDA };

// Payload format of dispatched rows; combine is BF16 always. UE8M0 implies round_scale_pow2.
struct QuantConfig {
  DispatchDataType format = DispatchDataType::BF16;
  bool round_scale_pow2 = false;
  ScaleFormat scale_format = ScaleFormat::FLOAT32;
  ScaleLayout scale_layout = ScaleLayout::ROW;
};

struct Device {
  DeviceType type = DeviceType::CPU;
  int index = 0;
};

// Everything that describes a runtime but its group. Equal on all ranks (validate, device and num_blocks may differ).
struct RuntimeConfig {
  int num_experts = 0;
  int hidden_size = 0;  // multiple of 8 (BF16) or 128 (FP8_E4M3)
  int num_topk = 0;     // 1 .. min(E, 32)
  int max_tokens_per_rank = 0;
  std::vector<int> experts_per_rank;  // empty: E / R each; else R counts >= 0 that sum to E
  MoEMode mode = MoEMode::LATENCY;
  DispatchLayout output_layout = DispatchLayout::EXPERT_MAJOR;
  CombineMode combine_mode = CombineMode::RANK_LOCAL_REDUCE;
  QuantConfig quant;
  int invalid_token_expert_id = -1;  // outside [0, E)
  int dispatch_num_blocks = 0;       // CUDA grid sizes; 0 chooses. No effect on the CPU.
  int combine_num_blocks = 0;
  int max_in_flight = 1;
  bool validate = false;  // CUDA: check ids on the device. The CPU backend always checks them.
  Device device;
  double timeout_s = 100.0;
  PeerLossPolicy on_peer_loss = PeerLossPolicy::RAISE;
};

// Fixed buffers of one lane, owned by the runtime and valid for its life. Unused members are null.
struct LaneBuffers {
  void* tokens = nullptr;  // EXPERT_MAJOR [L, R*M, H], RANK_MAJOR [R*M, H]; BF16 or E4M3
  void* scales = nullptr;  // ROW [.., S'], COLUMN [.., S', rows]; float32, or int32 for UE8M0 (S' = ceil(S/4))
  std::int32_t* num_tokens_per_expert = nullptr;  // EXPERT_MAJOR [L]
  std::int32_t* num_tokens_per_rank = nullptr;    // RANK_MAJOR [R]
  std::int32_t* rank_ranges = nullptr;            // EXPERT_MAJOR [L, R, 2]
  std::int32_t* source_token = nullptr;           // EXPERT_MAJOR [L, R*M]
  std::int32_t* topk_ids = nullptr;               // RANK_MAJOR [R*M, K]
  float* weights = nullptr;                       // RANK_MAJOR [R*M, K]
  void* combine_input = nullptr;  // BF16, shape of expert_output (RANK_MAJOR + DIRECT_SEND: [R*M, K, H])
};

// Bytes that a runtime holds on this rank, by a formula of the configuration alone (docs/layout.md).
struct MemoryBytes {
  std::uint64_t shared = 0;    // mapped by every rank: packets and staging
  std::uint64_t outputs = 0;   // lane buffers; address space on the CPU, touched only as far as it is used
  std::uint64_t private_ = 0;  // routing facts and scratch
};

struct RuntimeStats {
  std::uint64_t dispatch_calls = 0;
  std::uint64_t combine_calls = 0;
  std::uint64_t bytes_sent = 0;  // rows and scales that left this rank for other ranks
  std::uint64_t bytes_received = 0;
  std::uint64_t timeouts = 0;
  std::vector<std::uint64_t> expert_tokens;  // [L] rows received per local expert
  std::vector<double> source_wait_seconds;   // [R] time spent waiting for each rank
};

}  // namespace expertwire
