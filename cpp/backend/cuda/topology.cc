#include "backend/cuda/topology.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <optional>

#include "backend/cuda/driver.hpp"
#include "base/descriptor.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {
namespace {

constexpr const char* kOtherWays = "; cudaIpc handles and copies through the host are not done by this version";

// Where neither can be read, ranks look as if on one host, and passing descriptors tells if they are not.
std::string host_name() {
  char boot[64] = {};
  const Descriptor file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!file.valid() || read(file.get(), boot, 36) != 36) boot[0] = '\0';
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) != 0) network.st_ino = 0;
  return std::string(boot) + "/" + std::to_string(network.st_ino);
}

CUdevice device_of(int ordinal) {
  CUdevice device = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

CUuuid uuid_of(CUdevice device) {
  CUuuid uuid{};
  check(driver().cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
  return uuid;
}

// A driver that does not know the attribute does not have the feature.
bool has(CUdevice_attribute attribute, CUdevice device) {
  int value = 0;
  const CUresult result = driver().cuDeviceGetAttribute(&value, attribute, device);
  if (result == CUDA_ERROR_INVALID_VALUE) return false;
  check(result, "cuDeviceGetAttribute");
  return value != 0;
}

bool equal(const CUuuid& a, const CUuuid& b) { return std::memcmp(a.bytes, b.bytes, sizeof a.bytes) == 0; }

std::optional<CUdevice> find_device(const CUuuid& uuid) {
  int num_devices = 0;
  check(driver().cuDeviceGetCount(&num_devices), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < num_devices; ++ordinal) {
    const CUdevice device = device_of(ordinal);
    if (equal(uuid_of(device), uuid)) return device;
  }
  return std::nullopt;
}

void require_all(const std::vector<RankDevice>& ranks, bool RankDevice::* feature, const std::string& what) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].*feature) continue;
    throw Error(ErrorCode::Unsupported, what + ", which " + to_string(ranks[rank]) + " of rank " +
                                            std::to_string(rank) + " lacks" + kOtherWays);
  }
}

}  // namespace

RankDevice describe_device(int ordinal) {
  const CUdevice device = device_of(ordinal);
  RankDevice result;
  std::snprintf(result.host, sizeof result.host, "%s", host_name().c_str());
  check(driver().cuDeviceGetName(result.name, sizeof result.name, device), "cuDeviceGetName");
  result.uuid = uuid_of(device);
  const bool is_virtual = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  result.has_descriptors = is_virtual && has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  result.has_fabric = is_virtual && has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, device);
  return result;
}

std::string to_string(const RankDevice& device) {
  std::string text = std::string(device.name) + " (GPU";
  for (std::size_t i = 0; i < sizeof device.uuid.bytes; ++i) {
    std::array<char, 3> digits;
    std::snprintf(digits.data(), digits.size(), "%02x", unsigned{device.uuid.bytes[i]});
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits.data();
  }
  return text + ")";
}

CUmemAllocationHandleType choose_handle_type(const std::vector<RankDevice>& ranks) {
  std::size_t elsewhere = 0;
  while (elsewhere < ranks.size() && std::strcmp(ranks[elsewhere].host, ranks[0].host) == 0) ++elsewhere;
  if (elsewhere == ranks.size()) {
    require_all(ranks, &RankDevice::has_descriptors, "sharing memory needs allocations exported as file descriptors");
    return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  require_all(ranks, &RankDevice::has_fabric,
              "ranks 0 and " + std::to_string(elsewhere) +
                  " run on different hosts or in different network namespaces: sharing memory needs fabric handles");
  return CU_MEM_HANDLE_TYPE_FABRIC;
}

void require_peer_access(const std::vector<RankDevice>& ranks, int rank, int device) {
  const RankDevice& mine = ranks[static_cast<std::size_t>(rank)];
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    if (equal(ranks[peer].uuid, mine.uuid)) continue;
    const std::optional<CUdevice> theirs = find_device(ranks[peer].uuid);
    if (!theirs) continue;
    int can = 0;
    check(driver().cuDeviceCanAccessPeer(&can, device_of(device), *theirs), "cuDeviceCanAccessPeer");
    if (can != 0) continue;
    throw Error(ErrorCode::Unsupported,
                to_string(mine) + " cannot reach the memory of " + to_string(ranks[peer]) + ", the device of rank " +
                    std::to_string(peer) +
                    ": the driver allows no peer access between them (nvidia-smi topo -p2p rw); " +
                    "the GPUs of a group must be joined by NVLink or by PCI Express with peer access" + kOtherWays);
  }
}

bool is_visible(const CUuuid& uuid) { return find_device(uuid).has_value(); }

}  // namespace expertwire::cuda
