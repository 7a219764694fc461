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
  /// Collective over `comm`. The object may serve several runtimes, one after another.
  /// @param comm  of one group (no intercommunicator); duplicated, and the caller's as before
  /// @throws Error InvalidArgument for a `comm` that cannot be used, or outside MPI_Init and MPI_Finalize; Backend with
  ///         MPI's text, where the error handler of `comm` lets it return
  explicit MpiBootstrap(MPI_Comm comm = MPI_COMM_WORLD) {
    if (!is_running()) {
      throw Error(ErrorCode::InvalidArgument,
                  "MpiBootstrap: MPI is not running; must be between MPI_Init and MPI_Finalize");
    }
    int has_two_groups = 0;
    if (comm != MPI_COMM_NULL) check(MPI_Comm_test_inter(comm, &has_two_groups), "MPI_Comm_test_inter");
    if (comm == MPI_COMM_NULL || has_two_groups != 0) {
      throw Error(ErrorCode::InvalidArgument, std::string("comm is ") +
                                                  (has_two_groups != 0 ? "an intercommunicator" : "MPI_COMM_NULL") +
                                                  ": must be a communicator of one group, such as MPI_COMM_WORLD");
    }
    check(MPI_Comm_dup(comm, &comm_.handle), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_.handle, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(comm_.handle, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_.handle, &size_), "MPI_Comm_size");
  }
  ~MpiBootstrap() override = default;
  MpiBootstrap(const MpiBootstrap&) = delete;
  MpiBootstrap& operator=(const MpiBootstrap&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// @throws Error InvalidArgument if all contributions together reach 2 GiB; also after MPI_Finalize; Backend with
  ///         MPI's text
  std::vector<std::string> all_gather(const std::string& mine) override {
    if (!is_running()) throw Error(ErrorCode::InvalidArgument, "MpiBootstrap: all_gather after MPI_Finalize");
    const auto num_ranks = static_cast<std::size_t>(size_);
    const auto my_bytes = static_cast<std::uint64_t>(mine.size());
    std::vector<std::uint64_t> num_bytes(num_ranks);
    check(MPI_Allgather(&my_bytes, 1, MPI_UINT64_T, num_bytes.data(), 1, MPI_UINT64_T, comm_.handle), "MPI_Allgather");

    std::vector<int> counts;
    std::vector<int> offsets;
    std::uint64_t total = 0;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      const std::uint64_t bytes = num_bytes[rank];
      // Seen alike by every rank, so that all of them throw.
      if (bytes > INT_MAX || total + bytes > INT_MAX) {
        throw Error(ErrorCode::InvalidArgument, "all_gather of " + std::to_string(bytes) + " bytes of rank " +
                                                    std::to_string(rank) + " behind " + std::to_string(total) +
                                                    ": all ranks together must be below 2 GiB");
      }
      counts.push_back(static_cast<int>(bytes));
      offsets.push_back(static_cast<int>(total));
      total += bytes;
    }
    std::string packed(total, '\0');
    check(MPI_Allgatherv(mine.data(), static_cast<int>(my_bytes), MPI_BYTE, packed.data(), counts.data(),
                         offsets.data(), MPI_BYTE, comm_.handle),
          "MPI_Allgatherv");
    std::vector<std::string> all;
    for (std::size_t i = 0; i < num_ranks; ++i) {
      all.push_back(packed.substr(static_cast<std::size_t>(offsets[i]), static_cast<std::size_t>(counts[i])));
    }
    return all;
  }

 private:
  // The duplicate: freed also if the constructor ends half-way, and not once MPI has ended.
  struct OwnComm {
    MPI_Comm handle = MPI_COMM_NULL;
    OwnComm() = default;
    OwnComm(const OwnComm&) = delete;
    OwnComm& operator=(const OwnComm&) = delete;
    ~OwnComm() {
      if (handle != MPI_COMM_NULL && is_running()) MPI_Comm_free(&handle);
    }
  };

  static bool is_running() {
    int has_begun = 0;
    int has_ended = 0;
    MPI_Initialized(&has_begun);
    MPI_Finalized(&has_ended);
    return has_begun != 0 && has_ended == 0;
  }

  static void check(int status, const char* what) {
    if (status == MPI_SUCCESS) return;
    std::string text(MPI_MAX_ERROR_STRING, '\0');
    int length = 0;
    MPI_Error_string(status, text.data(), &length);
    text.resize(static_cast<std::size_t>(length));
    throw Error(ErrorCode::Backend, std::string(what) + ": " + text);
  }

  OwnComm comm_;
  int rank_ = 0;
  int size_ = 0;
};

/// Collective over `comm`: an MpiBootstrap.
inline std::shared_ptr<Bootstrap> make_mpi_bootstrap(MPI_Comm comm = MPI_COMM_WORLD) {
  return std::make_shared<MpiBootstrap>(comm);
}

}  // namespace expertwire
