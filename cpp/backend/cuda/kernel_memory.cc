#include "backend/cuda/kernel_memory.hpp"

#include <mutex>
#include <utility>

#include "backend/cuda/driver.hpp"

namespace expertwire::cuda {
namespace {

// Never destroyed: at the end of the process the driver may be gone first.
struct Dropped {
  std::mutex mutex;
  std::vector<std::shared_ptr<KernelMemory>> memory;
  std::shared_ptr<KernelMemory> kept_last;
};

Dropped& dropped() {
  static Dropped* const all = new Dropped;
  return *all;
}

void drop(void* holder) {
  const std::unique_ptr<std::shared_ptr<KernelMemory>> memory(static_cast<std::shared_ptr<KernelMemory>*>(holder));
  const std::lock_guard lock(dropped().mutex);
  dropped().memory.push_back(std::move(*memory));
}

}  // namespace

void keep_for_graph(CUgraph graph, const std::shared_ptr<KernelMemory>& memory) {
  const Driver& cuda = driver();
  auto holder = std::make_unique<std::shared_ptr<KernelMemory>>(memory);
  CUuserObject object = nullptr;
  check(cuda.cuUserObjectCreate(&object, holder.get(), drop, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        "cuUserObjectCreate");
  holder.release();  // to drop()
  const CUresult result = cuda.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (result != CUDA_SUCCESS) cuda.cuUserObjectRelease(object, 1);
  check(result, "cuGraphRetainUserObject");
}

void keep_for_good(std::shared_ptr<KernelMemory> memory) noexcept {
  const std::lock_guard lock(dropped().mutex);
  memory->kept_before = std::move(dropped().kept_last);
  dropped().kept_last = std::move(memory);
}

void release_what_graphs_dropped() noexcept {
  std::vector<std::shared_ptr<KernelMemory>> memory;  // released after the lock: the driver may be calling drop()
  const std::lock_guard lock(dropped().mutex);
  memory.swap(dropped().memory);
}

}  // namespace expertwire::cuda
