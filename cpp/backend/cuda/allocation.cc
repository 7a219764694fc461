#include "backend/cuda/allocation.hpp"

#include <string>
#include <utility>

#include "backend/cuda/driver.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

CUmemGenericAllocationHandle create(const CUmemAllocationProp& properties, std::size_t bytes) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver().cuMemCreate(&handle, bytes, &properties, 0);
  const std::string call = "cuMemCreate of " + std::to_string(bytes) + " bytes";
  const bool is_refused = result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_ERROR_NOT_SUPPORTED;
  if (is_refused && properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) {
    throw Error(ErrorCode::Unsupported,
                call + " to be shared by a fabric handle, as ranks on several hosts need: not permitted here; " +
                    "nvidia-imex must run and /dev/nvidia-caps-imex-channels must be open to this user");
  }
  check(result, call.c_str());
  return handle;
}

}  // namespace

Allocation::Allocation(int device, std::size_t bytes, CUmemAllocationHandleType type) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = type;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  std::size_t granularity = 0;
  check(driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  bytes_ = round_up(bytes, granularity);
  handle_ = create(properties, bytes_);
}

Allocation::Allocation(void* shared_handle, CUmemAllocationHandleType type, std::size_t bytes) : bytes_(bytes) {
  check(driver().cuMemImportFromShareableHandle(&handle_, shared_handle, type), "cuMemImportFromShareableHandle");
}

Allocation::~Allocation() {
  if (handle_ != 0) driver().cuMemRelease(handle_);
}

Allocation::Allocation(Allocation&& other) noexcept
    : handle_(std::exchange(other.handle_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

Allocation& Allocation::operator=(Allocation&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Descriptor Allocation::export_descriptor() const {
  int fd = -1;
  check(driver().cuMemExportToShareableHandle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle as a file descriptor");
  return Descriptor(fd);
}

CUmemFabricHandle Allocation::export_fabric() const {
  CUmemFabricHandle result{};
  check(driver().cuMemExportToShareableHandle(&result, handle_, CU_MEM_HANDLE_TYPE_FABRIC, 0),
        "cuMemExportToShareableHandle as a fabric handle");
  return result;
}

// Delegates, so that the destructor undoes the steps taken if a later one fails.
Mapping::Mapping(const Allocation& allocation, int device) : Mapping() {
  bytes_ = allocation.bytes();
  check(driver().cuMemAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  check(driver().cuMemMap(address_, bytes_, 0, allocation.handle(), 0), "cuMemMap");
  is_mapped_ = true;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(driver().cuMemSetAccess(address_, bytes_, &access, 1), "cuMemSetAccess");
}

// What the driver answers is of no use here: it may be shutting down, or its context lost.
Mapping::~Mapping() {
  if (address_ == 0 || process_.is_inherited()) return;
  if (is_mapped_) driver().cuMemUnmap(address_, bytes_);
  driver().cuMemAddressFree(address_, bytes_);
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(is_mapped_, other.is_mapped_);
  std::swap(process_, other.process_);
}

}  // namespace expertwire::cuda
