#include "backend/cuda/kept.hpp"

#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/cuda/context.hpp"
#include "backend/cuda/driver.hpp"

namespace expertwire::cuda {
namespace {

struct KeptDevice {
  std::optional<PrimaryContext> context;  // modules go with it
  std::map<std::string, CUmodule> modules;
};

// Never destroyed: at the end of the process the driver may be gone first.
struct Kept {
  std::mutex mutex;
  std::map<int, KeptDevice> devices;
  std::vector<HostWords*> host_words;
};

Kept& kept() {
  static Kept* const all = new Kept;
  return *all;
}

}  // namespace

CUmodule loaded_module(int device, const std::string& cubin) {
  const std::lock_guard lock(kept().mutex);
  KeptDevice& of_device = kept().devices[device];
  if (!of_device.context) of_device.context.emplace(device);
  const auto found = of_device.modules.find(cubin);
  if (found != of_device.modules.end()) return found->second;
  CUmodule module = nullptr;
  check(driver().cuModuleLoadData(&module, cubin.data()), "cuModuleLoadData");
  return of_device.modules.emplace(cubin, module).first->second;
}

HostWords* take_host_words() {
  const std::lock_guard lock(kept().mutex);
  if (kept().host_words.empty()) {
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, sizeof(HostWords), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
          "cuMemHostAlloc");
    kept().host_words.push_back(static_cast<HostWords*>(memory));
  }
  HostWords* const words = kept().host_words.back();
  kept().host_words.pop_back();
  *words = HostWords{};
  return words;
}

void put_back(HostWords* words) {
  const std::lock_guard lock(kept().mutex);
  kept().host_words.push_back(words);
}

}  // namespace expertwire::cuda
