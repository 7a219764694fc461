// A bootstrap of one's own: ranks that meet in a directory which all of them can write, such as one of a network file
// system. Give each job a new, empty one.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "expertwire/bootstrap.hpp"
#include "expertwire/error.hpp"

// In round n each rank writes a file n.rank under another name and renames it, which is atomic: who finds it finds all
// of it.
class SharedDirectoryBootstrap final : public expertwire::Bootstrap {
 public:
  SharedDirectoryBootstrap(int rank, int size, std::filesystem::path directory, double timeout_s = 60.0)
      : rank_(rank), size_(size), directory_(std::move(directory)), timeout_s_(timeout_s) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& mine) override {
    ++round_;
    try {
      // Everyone has read this rank's file of the round before the last: nobody ends a round that another has not
      // begun.
      if (round_ > 2) std::filesystem::remove(path(round_ - 2, rank_));
      post(mine);
    } catch (const std::exception& error) {
      throw expertwire::Error(expertwire::ErrorCode::Backend, error.what());
    }
    const Clock::time_point deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
    std::vector<std::string> all(static_cast<std::size_t>(size_));
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer) {
      if (!await(path(round_, peer), deadline, all[static_cast<std::size_t>(peer)])) missing.push_back(peer);
    }
    if (!missing.empty()) throw lost(missing);
    return all;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path path(std::uint64_t round, int rank) const {
    return directory_ / (std::to_string(round) + "." + std::to_string(rank));
  }

  void post(const std::string& mine) const {
    std::filesystem::path written = path(round_, rank_);
    written += ".new";
    {
      std::ofstream file;
      file.exceptions(std::ofstream::failbit | std::ofstream::badbit);
      file.open(written, std::ofstream::binary);
      file << mine;
    }
    std::filesystem::rename(written, path(round_, rank_));
  }

  static bool await(const std::filesystem::path& path, Clock::time_point deadline, std::string& contribution) {
    for (;;) {
      if (std::ifstream file(path, std::ifstream::binary); file) {
        contribution.assign(std::istreambuf_iterator<char>(file), {});
        return true;
      }
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  expertwire::Error lost(const std::vector<int>& missing) const {
    std::string text = "did not come to " + directory_.string() + " in time: ranks";
    for (const int rank : missing) text.append(" ").append(std::to_string(rank));
    return expertwire::Error(text, missing, "construct", 0);
  }

  int rank_, size_;
  std::filesystem::path directory_;
  double timeout_s_;
  std::uint64_t round_ = 0;
};
