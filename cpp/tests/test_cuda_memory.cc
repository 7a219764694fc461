// Symmetric CUDA memory: ranks as threads and as processes, on one GPU and on two. Without a GPU only the choice of how
// to share is tested.
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/memory.hpp"
#include "backend/cuda/topology.hpp"
#include "expertwire/bootstrap.hpp"
#include "process.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

using namespace std::chrono_literals;
using cuda::CUdeviceptr;
using cuda::driver;
using cuda::RankDevice;
using cuda::SymmetricMemory;

constexpr std::size_t kBytes = 5'000'000;  // no multiple of what a driver maps

RankDevice rank_device(const char* host, unsigned char number) {
  RankDevice device;
  std::strcpy(device.host, host);
  std::strcpy(device.name, "Some GPU");
  device.uuid.bytes[15] = number;
  device.has_descriptors = true;
  return device;
}

TEST_CASE("one host shares by descriptor") {
  std::vector<RankDevice> ranks{rank_device("a", 1), rank_device("a", 1), rank_device("a", 2)};
  REQUIRE(cuda::choose_handle_type(ranks) == cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  ranks[2].has_descriptors = false;
  const std::string device = "Some GPU (GPU-00000000-0000-0000-0000-000000000002)";
  check_throws(ErrorCode::Unsupported, "file descriptors, which " + device + " of rank 2 lacks; cudaIpc handles",
               [&] { cuda::choose_handle_type(ranks); });
}

TEST_CASE("several hosts share by fabric") {
  std::vector<RankDevice> ranks{rank_device("a", 1), rank_device("a", 2), rank_device("b", 1)};
  check_throws(ErrorCode::Unsupported, "ranks 0 and 2 run on different hosts",
               [&] { cuda::choose_handle_type(ranks); });
  for (RankDevice& device : ranks) device.has_fabric = true;
  REQUIRE(cuda::choose_handle_type(ranks) == cuda::CU_MEM_HANDLE_TYPE_FABRIC);
}

int num_devices() {
  int count = 0;
  cuda::check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

class Writer {
 public:
  explicit Writer(int device) : context_(device), stream_(context_) {}
  void fill(CUdeviceptr place, unsigned value, std::size_t num_words) const {
    cuda::check(driver().cuMemsetD32Async(place, value, num_words, stream_.get()), "cuMemsetD32Async");
    cuda::check(driver().cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
  }
  std::vector<unsigned> read(CUdeviceptr place, std::size_t num_words) const {
    std::vector<unsigned> words(num_words);
    cuda::check(driver().cuMemcpyDtoHAsync(words.data(), place, 4 * num_words, stream_.get()), "cuMemcpyDtoHAsync");
    cuda::check(driver().cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
    return words;
  }

 private:
  cuda::PrimaryContext context_;
  cuda::Stream stream_;
};

// Every rank fills its region of every part, and then finds all of its own part as the others must have written it.
void exchange_regions(Bootstrap& bootstrap, const SymmetricMemory& memory, int device) {
  const Writer writer(device);
  const int rank = bootstrap.rank();
  const std::size_t num_words = memory.bytes() / 4 / static_cast<std::size_t>(bootstrap.size());
  const auto value = [](int from, int owner) { return 0xA0000000U + static_cast<unsigned>(1000 * from + owner); };
  const auto region = [&](int owner, int from) {
    return memory.address(owner) + 4 * num_words * static_cast<std::size_t>(from);
  };
  for (int owner = 0; owner < bootstrap.size(); ++owner)
    writer.fill(region(owner, rank), value(rank, owner), num_words);
  bootstrap.barrier();
  for (int from = 0; from < bootstrap.size(); ++from) {
    const std::vector<unsigned> wanted(num_words, value(from, rank));
    if (writer.read(region(rank, from), num_words) != wanted) FAIL("not what rank ", from, " wrote");
  }
  bootstrap.barrier();
}

void check_rank(Bootstrap& bootstrap, int device) {
  for (int i = 0; i < 3; ++i) {
    const SymmetricMemory memory(bootstrap, device, kBytes);
    REQUIRE(memory.bytes() >= kBytes);
    exchange_regions(bootstrap, memory, device);
    for (int rank = 0; rank < bootstrap.size(); ++rank) REQUIRE(!memory.has_exited(rank));
    bootstrap.barrier();
  }
}

void check_threads(int num_ranks, int devices) {
  const auto bootstraps = make_local_bootstraps(num_ranks, 60.0);
  run_ranks(num_ranks, [&](int rank) { check_rank(*bootstraps[static_cast<std::size_t>(rank)], rank % devices); });
}

std::string fresh_key() {
  static int counter = 0;
  return "cuda-memory-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
}

// Processes first: once CUDA has been used in this one, it cannot fork ranks.
TEST_SUITE_BEGIN("on devices");

TEST_CASE("processes") {
  for (const int num_ranks : {2, 4}) {
    const std::string key = fresh_key();
    check_processes(num_ranks, [&](int rank) {
      const auto bootstrap = make_host_bootstrap(rank, num_ranks, key, 60.0);
      check_rank(*bootstrap, 0);
      check_rank(*bootstrap, rank % num_devices());
    });
  }
}

// The survivor still writes to the memory of the dead, drops it, and goes on with the same context.
TEST_CASE("a killed process") {
  const std::string key = fresh_key();
  const auto rank_of = [&key](int rank) {
    const auto bootstrap = make_host_bootstrap(rank, 2, key, 60.0);
    const int device = rank % num_devices();
    auto memory = std::make_unique<SymmetricMemory>(*bootstrap, device, kBytes);
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    for (int i = 0; i < 1000 && !memory->has_exited(1); ++i) std::this_thread::sleep_for(10ms);
    REQUIRE(memory->has_exited(1));
    {
      const Writer writer(device);
      writer.fill(memory->address(1), 7, 1024);
      REQUIRE(writer.read(memory->address(1), 1024) == std::vector<unsigned>(1024, 7));
    }
    memory.reset();
    check_rank(*make_local_bootstraps(1).front(), device);
  };
  const Process survivor([&] { rank_of(0); });
  const Process victim([&] { rank_of(1); });
  REQUIRE(victim.is_killed_by(SIGKILL));
  REQUIRE(survivor.wait());
}

TEST_CASE("one rank") { check_threads(1, 1); }
TEST_CASE("two threads") { check_threads(2, 1); }
TEST_CASE("four threads") { check_threads(4, 1); }

TEST_CASE("threads on two devices") {
  if (num_devices() < 2) {
    std::cout << "skipped: two devices: this machine shows one" << std::endl;
    return;
  }
  check_threads(2, 2);
  check_threads(4, 2);
}

TEST_CASE("any order of destruction") {
  const auto bootstraps = make_local_bootstraps(3, 60.0);
  for (int first = 0; first < 3; ++first) {
    run_ranks(3, [&](int rank) {
      Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
      const int device = rank % num_devices();
      auto memory = std::make_unique<SymmetricMemory>(bootstrap, device, kBytes);
      if (rank == first) memory.reset();
      bootstrap.barrier();
      if (memory != nullptr) {
        const Writer writer(device);
        const CUdeviceptr place = memory->address(first) + 4096 * static_cast<std::size_t>(rank);
        writer.fill(place, 5, 1024);
        REQUIRE(writer.read(place, 1024) == std::vector<unsigned>(1024, 5));  // memory outlives its owner
      }
      bootstrap.barrier();
    });
  }
}

TEST_CASE("errors reach every rank") {
  const auto bootstraps = make_local_bootstraps(3, 60.0);
  run_ranks(3, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    check_throws(ErrorCode::InvalidArgument, "rank 1: device = cuda:99: must be between cuda:0 and",
                 [&] { SymmetricMemory(bootstrap, rank == 1 ? 99 : 0, kBytes); });
    check_throws(ErrorCode::InvalidArgument, "rank 0: bytes = 5000000: must be equal on all ranks; rank 2 has 5000001",
                 [&] { SymmetricMemory(bootstrap, 0, kBytes + (rank == 2 ? 1 : 0)); });
    check_throws(ErrorCode::Backend, "cuMemCreate of ", [&] { SymmetricMemory(bootstrap, 0, std::size_t{1} << 46); });
    check_rank(bootstrap, 0);  // as if nothing had happened
  });
}

// Where it is not permitted, the error says so.
TEST_CASE("fabric allocation") {
  if (!cuda::describe_device(0).has_fabric) {
    std::cout << "skipped: fabric handles: this device has none" << std::endl;
    return;
  }
  const Writer writer(0);
  try {
    const cuda::Allocation own(0, kBytes, cuda::CU_MEM_HANDLE_TYPE_FABRIC);
    cuda::CUmemFabricHandle handle = own.export_fabric();
    const cuda::Mapping mapping(cuda::Allocation(&handle, cuda::CU_MEM_HANDLE_TYPE_FABRIC, own.bytes()), 0);
    writer.fill(mapping.address(), 3, mapping.bytes() / 4);
    const std::vector<unsigned> words = writer.read(cuda::Mapping(own, 0).address(), 1024);
    REQUIRE(words == std::vector<unsigned>(1024, 3));
  } catch (const Error& error) {
    REQUIRE_MESSAGE(error.code() == ErrorCode::Unsupported, error.what());
    std::cout << "not permitted here: " << error.what() << std::endl;
  }
}

TEST_SUITE_END();

// Nothing, if there is one. Asked in a child, for the same reason.
std::string why_no_device() {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
  const Process probe([&] {
    std::string text;
    try {
      driver();
    } catch (const Error& error) {
      text = error.what();
    }
    if (::write(ends[1], text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
      throw std::runtime_error("the pipe took less");
    }
  });
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> chunk;
  for (ssize_t num_read; (num_read = ::read(ends[0], chunk.data(), chunk.size())) > 0;)
    text.append(chunk.data(), static_cast<std::size_t>(num_read));
  ::close(ends[0]);
  if (!probe.wait()) throw std::runtime_error("loading the driver ended the process");
  return text;
}

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) {
  using namespace expertwire::test;
  const std::string why = why_no_device();
  return why.empty() ? run_test_cases(argc, argv) : run_test_cases(argc, argv, "on devices", "no CUDA device: " + why);
}
