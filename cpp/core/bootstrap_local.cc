// Ranks are threads of one process: they meet in a shared state under one mutex.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/rank_list.hpp"
#include "core/bootstrap_deadline.hpp"
#include "expertwire/bootstrap.hpp"

namespace expertwire {
namespace {

using Contributions = std::vector<std::string>;

class LocalMeeting {
  struct Failure {
    std::string text;
    std::vector<int> ranks;
  };

 public:
  LocalMeeting(int size, double timeout_s)
      : timeout_s_(timeout_s), mine_(static_cast<std::size_t>(size)), gone_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(mine_.size()); }

  Contributions all_gather(int rank, const std::string& mine) {
    const Deadline deadline(timeout_s_);
    std::unique_lock lock(mutex_);
    if (failure_) throw_failure();
    std::optional<std::string>& place = mine_[static_cast<std::size_t>(rank)];
    if (place) {
      throw Error(ErrorCode::InvalidArgument,
                  "rank " + std::to_string(rank) + " of a local group is in a collective already: one thread per rank");
    }
    place = mine;
    if (missing().empty()) return complete_round();
    const std::uint64_t round = round_;
    while (round_ == round && !failure_) {
      fail_if_gone();
      if (!failure_ && changed_.wait_until(lock, deadline.time()) == std::cv_status::timeout && round_ == round) {
        fail(missing(), " did not take part in set-up within " + seconds_text(timeout_s_));
      }
    }
    if (round_ == round) throw_failure();
    return result_;  // still this round's: the next one cannot complete before this rank takes part in it
  }

  void leave(int rank) {
    const std::scoped_lock lock(mutex_);
    gone_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();
  }

 private:
  Contributions complete_round() {
    result_.clear();
    for (auto& place : mine_) {
      result_.push_back(std::move(*place));
      place.reset();
    }
    ++round_;
    changed_.notify_all();
    return result_;
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < mine_.size(); ++rank) {
      if (!mine_[rank]) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

  void fail_if_gone() {
    std::vector<int> lost;
    for (const int rank : missing()) {
      if (gone_[static_cast<std::size_t>(rank)]) lost.push_back(rank);
    }
    if (!lost.empty()) fail(lost, " gave up its end of the group during set-up");
  }

  void fail(const std::vector<int>& ranks, const std::string& what) {
    const std::string text = rank_list(ranks) + what + " (local group of " + std::to_string(size()) + " threads)";
    failure_ = Failure{text, ranks};
    changed_.notify_all();
  }

  // A new object each time: copies of one exception would share its text between threads.
  [[noreturn]] void throw_failure() const { throw Error(failure_->text, failure_->ranks, "construct", 0); }

  const double timeout_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<std::string>> mine_;  // of the round under way
  std::vector<bool> gone_;
  std::uint64_t round_ = 0;
  Contributions result_;            // of the last complete round
  std::optional<Failure> failure_;  // once set, the group is of no more use
};

class LocalBootstrap final : public Bootstrap {
 public:
  LocalBootstrap(int rank, std::shared_ptr<LocalMeeting> meeting) : rank_(rank), meeting_(std::move(meeting)) {}
  ~LocalBootstrap() override { meeting_->leave(rank_); }
  int rank() const override { return rank_; }
  int size() const override { return meeting_->size(); }
  Contributions all_gather(const std::string& mine) override { return meeting_->all_gather(rank_, mine); }

 private:
  const int rank_;
  const std::shared_ptr<LocalMeeting> meeting_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> make_local_bootstraps(int size, double timeout_s) {
  check_bootstrap_arguments(size, timeout_s);
  const auto meeting = std::make_shared<LocalMeeting>(size, timeout_s);
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (int rank = 0; rank < size; ++rank) bootstraps.push_back(std::make_shared<LocalBootstrap>(rank, meeting));
  return bootstraps;
}

}  // namespace expertwire
