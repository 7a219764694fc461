/// @file
/// A bootstrap over MPI. Header-only: only who includes it needs MPI, the library itself does not.
#pragma once

#include <mpi.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"

namespace [[gnu::visibility("default")]] expertwire {

/// Works on a duplicate of the communicator given, so that its messages and error handling stay apart from the
/// caller's. Construction and destruction are collective, and come between MPI_Init and MPI_Finalize. MPI has no
/// time-outs: what becomes of the others when a rank dies, or stays away, is up to its launcher.
class MpiBootstrap final : public Bootstrap {
 public:
  //// Collective over `comm`. The object may serve several runtimes, one after another.
  /// @throws Error Backend with MPI's text
  /// @throws Error Backend with MPI's text
  explicit MpiBootstrap(MPI_Comm comm = MPI_COMM_WORLD) {
    check(MPI_Comm_dup(comm, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }
  ~MpiBootstrap() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  MpiBootstrap(const MpiBootstrap&) = delete;
  MpiBootstrap& operator=(const MpiBootstrap&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// @throws Error InvalidArgument if all contributions together reach 2 GiB; Backend with MPI's text
  std::vector<std::string> all_gather(const std::string& mine) override {
    const auto num_ranks = static_cast<std::size_t>(size_);
    const auto my_bytes = static_cast<std::uint64_t>(mine.size());
    std::vector<std::uint64_t> num_bytes(num_ranks);
    check(MPI_Allgather(&my_bytes, 1, MPI_UINT64_T, num_bytes.data(), 1, MPI_UINT64_T, comm_), "MPI_Allgather");

    std::vector<int> counts;
    std::vector<int> offsets;
    std::uint64_t total = 0;
    for (const std::uint64_t bytes : num_bytes) {
      // Seen alike by every rank, so that all of them throw.
      if (bytes > INT_MAX || total + bytes > INT_MAX) {
        throw Error(ErrorCode::InvalidArgument, "the contributions of all ranks must be below 2 GiB together");
      }
      counts.push_back(static_cast<int>(bytes));
      offsets.push_back(static_cast<int>(total));
      total += bytes;
    }
    std::string packed(total, '\0');
    check(MPI_Allgatherv(mine.data(), static_cast<int>(my_bytes), MPI_BYTE, packed.data(), counts.data(),
                         offsets.data(), MPI_BYTE, comm_),
          "MPI_Allgatherv");
    std::vector<std::string> all;
    for (std::size_t i = 0; i < num_ranks; ++i) {
      all.push_back(packed.substr(static_cast<std::size_t>(offsets[i]), static_cast<std::size_t>(counts[i])));
    }
    return all;
  }

 private:
  static void check(int status, const char* what) {
    if (status == MPI_SUCCESS) return;
    std::string text(MPI_MAX_ERROR_STRING, '\0');
    int length = 0;
    MPI_Error_string(status, text.data(), &length);
    text.resize(static_cast<std::size_t>(length));
    throw Error(ErrorCode::Backend, std::string(what) + ": " + text);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
};

// Collective over `comm`.
inline std::shared_ptr<Bootstrap> make_mpi_bootstrap(MPI_Comm comm = MPI_COMM_WORLD) {
  return std::make_shared<MpiBootstrap>(comm);
}

}  // namespace expertwire
