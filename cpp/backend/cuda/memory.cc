#include "backend/cuda/memory.hpp"

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "backend/cuda/driver.hpp"
#include "base/collective.hpp"
#include "base/descriptor_exchange.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cuda {
namespace {

// What one rank writes into another's part. The owner's nonce is new each time: memory that was used before holds no
// right mark.
std::uint64_t mark(std::uint32_t owner_nonce, std::size_t writer) {
  return (std::uint64_t{owner_nonce} << 32) | (writer + 1);
}

void require_equal(std::uint64_t bytes, std::uint64_t of_peer, std::size_t peer) {
  if (bytes == of_peer) return;
  throw Error(ErrorCode::InvalidArgument, "bytes = " + std::to_string(bytes) + ": must be equal on all ranks; rank " +
                                              std::to_string(peer) + " has " + std::to_string(of_peer));
}

}  // namespace

// What each rank tells the others of itself.
struct SymmetricMemory::Member {
  RankDevice device;
  std::uint64_t bytes = 0;
  std::uint32_t nonce = 0;
};

// A part as cuMemImportFromShareableHandle takes it.
struct SymmetricMemory::SharedPart {
  void* handle = nullptr;
  std::size_t bytes = 0;
};

SymmetricMemory::SymmetricMemory(Bootstrap& bootstrap, int device, std::size_t bytes)
    : rank_(bootstrap.rank()),
      device_(device),
      parts_(static_cast<std::size_t>(bootstrap.size())),
      processes_(static_cast<std::size_t>(bootstrap.size())) {
  Member mine;
  succeed_together(bootstrap, [&] {
    context_.emplace(device);
    mine = {describe_device(device), bytes, std::random_device{}()};
  });
  const std::vector<Member> members = gather_values(bootstrap, mine);
  for (const Member& member : members) {
    devices_.push_back(member.device);
    nonces_.push_back(member.nonce);
  }
  Allocation own;
  CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_NONE;
  succeed_together(bootstrap, [&] {
    for (std::size_t peer = 0; peer < members.size(); ++peer) require_equal(bytes, members[peer].bytes, peer);
    type = choose_handle_type(devices_);
    require_peer_access(devices_, rank_, device_);
    const CurrentContext current(*context_);
    own = Allocation(device_, std::max(bytes, parts_.size() * sizeof mark(0, 0)), type);
    parts_[static_cast<std::size_t>(rank_)] = Mapping(own, device_);
  });
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    share_by_fabric(bootstrap, own);
  } else {
    share_by_descriptor(bootstrap, own);
  }
  succeed_together(bootstrap, [&] { write_marks(); });
  succeed_together(bootstrap, [&] { require_marks(); });
}

bool SymmetricMemory::has_exited(int rank) const {
  return expertwire::has_exited(processes_[static_cast<std::size_t>(rank)]);
}

void SymmetricMemory::share_by_descriptor(Bootstrap& bootstrap, const Allocation& own) {
  auto exported = std::make_shared<Descriptor>();
  succeed_together(bootstrap, [&] { *exported = own.export_descriptor(); });
  std::vector<Received> received = exchange_descriptors(bootstrap, {*exported, exported, own.bytes()});
  succeed_together(bootstrap, [&] {
    std::vector<SharedPart> shared;
    for (const Received& one : received) {
      const int fd = one.local ? std::static_pointer_cast<Descriptor>(one.local)->get() : one.descriptor.get();
      shared.push_back({reinterpret_cast<void*>(std::intptr_t{fd}), one.bytes});
    }
    map_parts(shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  });
  for (std::size_t peer = 0; peer < received.size(); ++peer) processes_[peer] = std::move(received[peer].process);
}

void SymmetricMemory::share_by_fabric(Bootstrap& bootstrap, const Allocation& own) {
  struct Exported {
    CUmemFabricHandle handle;
    std::uint64_t bytes;
  };
  Exported mine{};
  succeed_together(bootstrap, [&] { mine = {own.export_fabric(), own.bytes()}; });
  std::vector<Exported> all = gather_values(bootstrap, mine);
  succeed_together(bootstrap, [&] {
    std::vector<SharedPart> shared;
    for (Exported& one : all) shared.push_back({&one.handle, one.bytes});
    map_parts(shared, CU_MEM_HANDLE_TYPE_FABRIC);
  });
}

void SymmetricMemory::map_parts(const std::vector<SharedPart>& shared, CUmemAllocationHandleType type) {
  const CurrentContext current(*context_);
  for (int peer = 0; peer < static_cast<int>(shared.size()); ++peer) {
    if (peer == rank_) continue;
    const auto idx = static_cast<std::size_t>(peer);
    try {
      parts_[idx] = Mapping(Allocation(shared[idx].handle, type, shared[idx].bytes), device_);
    } catch (const Error& error) {
      std::string text = "mapping " + part_text(peer) + ": " + error.what();
      if (!is_visible(devices_[idx].uuid)) {
        text +=
            "; this process does not see that GPU: let CUDA_VISIBLE_DEVICES name the GPUs of all ranks in every rank";
      }
      throw Error(error.code(), text);
    }
  }
}

std::string SymmetricMemory::part_text(int rank) const {
  const auto idx = static_cast<std::size_t>(rank);
  return "the memory of rank " + std::to_string(rank) + " on " + to_string(devices_[idx]) + " for " +
         to_string(devices_[static_cast<std::size_t>(rank_)]);
}

void SymmetricMemory::write_marks() {
  const Stream stream(*context_);
  const auto me = static_cast<std::size_t>(rank_);
  std::vector<std::uint64_t> marks;
  for (const std::uint32_t nonce : nonces_) marks.push_back(mark(nonce, me));
  for (std::size_t owner = 0; owner < parts_.size(); ++owner) {
    const CUdeviceptr place = parts_[owner].address() + me * sizeof marks[owner];
    const std::string call = "writing to " + part_text(static_cast<int>(owner));
    check(driver().cuMemcpyHtoDAsync(place, &marks[owner], sizeof marks[owner], stream.get()), call.c_str());
    check(driver().cuStreamSynchronize(stream.get()), call.c_str());
  }
}

void SymmetricMemory::require_marks() {
  const Stream stream(*context_);
  const auto me = static_cast<std::size_t>(rank_);
  std::vector<std::uint64_t> marks(parts_.size());
  check(driver().cuMemcpyDtoHAsync(marks.data(), address(rank_), marks.size() * sizeof marks[0], stream.get()),
        "reading this rank's memory");
  check(driver().cuStreamSynchronize(stream.get()), "reading this rank's memory");
  for (std::size_t writer = 0; writer < marks.size(); ++writer) {
    if (marks[writer] == mark(nonces_[me], writer)) continue;
    throw Error(ErrorCode::Backend, "what rank " + std::to_string(writer) + " on " + to_string(devices_[writer]) +
                                        " wrote did not arrive in this rank's memory on " + to_string(devices_[me]));
  }
}

}  // namespace expertwire::cuda
