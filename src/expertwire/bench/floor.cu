// One raw exchange step of the benchmark's floor: every rank pushes rows to its peers, which wait for them and copy them
// to an output. Data is its own flag: staging memory holds a sentinel word wherever nothing has arrived, and whoever
// reads a word puts the sentinel back.
//
// Why one staging buffer a phase is enough: dispatch and combine alternate, and as many rows go from A to B in one as
// come back in the other. When A starts its next dispatch, all rows of B's combine have reached it, and B launched that
// combine after its dispatch had ended, with all its reads and its cleaning of what A is about to write. Combine
// likewise. Where no rows go, nothing is written.

constexpr int kMaxRanks = 16;
constexpr int kBatch = 4;  // words of a thread that travel at the same time
constexpr unsigned kSentinel = 0xFFFFFFFFu;
constexpr unsigned kLooksPerClock = 4096;

struct ExchangeParams {
  const uint4* source[kMaxRanks];  // rows for each rank, its own among them
  uint4* target[kMaxRanks];        // where they go: staging memory of that rank; unused for this one
  uint4* staging[kMaxRanks];       // where rows of each rank arrive
  uint4* output[kMaxRanks];        // where they end up
  long long words_out[kMaxRanks];  // of 16 bytes
  long long words_in[kMaxRanks];
  unsigned long long timeout_ns;
  unsigned* lost;  // not zero once rows did not arrive in time
  int num_ranks;
  int rank;
};

__device__ __forceinline__ uint4 load_arriving(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_across(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ unsigned sendable(unsigned word) { return word == kSentinel ? kSentinel - 1 : word; }

__device__ __forceinline__ bool has_arrived(uint4 v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}

__device__ void send(const uint4* source, uint4* target, long long num_words, long long first, long long stride) {
  for (long long begin = first; begin < num_words; begin += kBatch * stride) {
    uint4 words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i * stride < num_words) words[i] = source[begin + i * stride];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint4 v = words[i];
      if (begin + i * stride < num_words) {
        store_across(target + begin + i * stride, {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)});
      }
    }
  }
}

__device__ void copy(const uint4* source, uint4* target, long long num_words, long long first, long long stride) {
  for (long long i = first; i < num_words; i += stride) target[i] = source[i];
}

// False if the word did not come in time.
__device__ bool await(const uint4* from, uint4& v, unsigned long long timeout_ns) {
  const unsigned long long start = has_arrived(v) ? 0 : now_ns();
  for (unsigned looks = 1; !has_arrived(v); ++looks) {
    v = load_arriving(from);
    if (looks % kLooksPerClock == 0 && now_ns() - start > timeout_ns) return false;
  }
  return true;
}

__device__ bool receive(uint4* staging, uint4* output, long long num_words, long long first, long long stride,
                        unsigned long long timeout_ns) {
  for (long long begin = first; begin < num_words; begin += kBatch * stride) {
    uint4 words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i * stride < num_words) words[i] = load_arriving(staging + begin + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const long long at = begin + i * stride;
      if (at >= num_words) continue;
      if (!await(staging + at, words[i], timeout_ns)) return false;
      output[at] = words[i];
      staging[at] = {kSentinel, kSentinel, kSentinel, kSentinel};
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(1024) exchange(const __grid_constant__ ExchangeParams p) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int step = 1; step < p.num_ranks; ++step) {
    const int peer = (p.rank + step) % p.num_ranks;
    send(p.source[peer], p.target[peer], p.words_out[peer], thread, stride);
  }
  // Few rows are the work of few threads: others copy and wait.
  copy(p.source[p.rank], p.output[p.rank], p.words_out[p.rank], stride - 1 - thread, stride);
  const long long waiting = (thread + stride / 2) % stride;
  for (int step = 1; step < p.num_ranks; ++step) {
    const int peer = (p.rank + p.num_ranks - step) % p.num_ranks;
    if (!receive(p.staging[peer], p.output[peer], p.words_in[peer], waiting, stride, p.timeout_ns)) {
      *p.lost = 1;
      return;
    }
  }
}
