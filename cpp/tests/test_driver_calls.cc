// What the CUDA backend asks of the driver, and in which order: streams, captures, calls that the driver refuses, and the
// end. The driver is a stand-in (stand_in/stand_in.hpp), so this needs no GPU. Events are named by its numbers.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "expertwire/bootstrap.hpp"
#include "expertwire/moe_runtime.hpp"
#include "stand_in/stand_in.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

// Before anything reads the environment.
[[maybe_unused]] const int compiler_is_set =
    setenv("EXPERTWIRE_NVRTC_DIR", STAND_IN_FOLDER, 1) | setenv("EXPERTWIRE_CACHE_DIR", STAND_IN_FOLDER "/kernels", 1);

stand_in::Control& driver() {
  static stand_in::Control* const control = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* const entry = library == nullptr ? nullptr : dlsym(library, stand_in::kGetControl);
    if (entry == nullptr) FAIL("the library that is loaded as libcuda.so.1 is not the stand-in");
    return reinterpret_cast<stand_in::GetControl*>(entry)();
  }();
  return *control;
}

constexpr std::uintptr_t kFirst = 0x10, kSecond = 0x20, kThird = 0x30, kPerThread = 2;
constexpr int kNone = 0, kActive = 1, kInvalidated = 2;

void* stream_of(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

// One rank that dispatches and combines two tokens.
class Rank {
 public:
  explicit Rank(bool two_phase = false, bool placed = false) : x_(2 * kHidden), out_(2 * kHidden), ids_{0, 1} {
    driver();
    RuntimeConfig config;
    config.num_experts = 2;
    config.hidden_size = kHidden;
    config.num_topk = 1;
    config.max_tokens_per_rank = 2;
    config.two_phase = two_phase;
    config.device.type = DeviceType::CUDA;
    if (placed) config.placement = {0, 1};
    const int before = driver().num_events();
    eager_ = std::to_string(before + 1);
    captured_ = std::to_string(before + 2);
    runtime_ = std::make_unique<MoERuntime>(make_local_bootstraps(1).front(), config);
    driver().take_log();
  }
  ~Rank() { runtime_.reset(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  MoERuntime& runtime() { return *runtime_; }

  LatencyDispatchRequest dispatch_on(std::uintptr_t stream) const {
    LatencyDispatchRequest request;
    request.x = x_.data();
    request.topk_ids = ids_.data();
    request.num_tokens = 2;
    request.stream = stream_of(stream);
    return request;
  }
  // What the driver was asked for by a dispatch on the stream. Events count from the first of this rank.
  std::string dispatch(std::uintptr_t stream) {
    handle_ = runtime_->dispatch(dispatch_on(stream));
    return log();
  }
  std::string send(std::uintptr_t stream) {
    handle_ = runtime_->dispatch_send(dispatch_on(stream));
    return log();
  }
  std::string receive(std::uintptr_t stream) {
    runtime_->dispatch_receive(handle_, stream_of(stream));
    return log();
  }
  std::string combine(std::uintptr_t stream) {
    runtime_->combine(combine_on(stream));
    return log();
  }
  std::string send_back(std::uintptr_t stream) {
    runtime_->combine_send(combine_on(stream));
    return log();
  }
  std::string receive_back(std::uintptr_t stream) {
    runtime_->combine_receive(handle_, stream_of(stream));
    return log();
  }
  LatencyCombineRequest combine_on(std::uintptr_t stream) {
    LatencyCombineRequest request;
    request.expert_output = runtime_->combine_input_buffer();
    request.handle = handle_;
    request.out = out_.data();
    request.num_tokens = 2;
    request.stream = stream_of(stream);
    return request;
  }
  std::string end() {
    runtime_.reset();
    return log();
  }
  // With E for the event of eager work, C for that of captured work, and R for those of receives.
  std::string log() const {
    std::istringstream lines(driver().take_log());
    std::ostringstream text;
    for (std::string line; std::getline(lines, line); text << '\n') {
      std::istringstream words(line);
      for (std::string word, before; words >> word; before = word) {
        const bool is_event = before == "record" || before == "for" || before == "sync" || before == "destroy";
        if (!before.empty()) text << ' ';
        if (!is_event || word == "stream")
          text << word;
        else
          text << (word == eager_ ? 'E' : word == captured_ ? 'C' : 'R');
      }
    }
    return text.str();
  }

 private:
  static constexpr int kHidden = 8;
  struct alignas(16) Word {
    std::uint16_t of[8];
  };
  std::vector<Word> x_, out_;
  std::vector<std::int64_t> ids_;
  std::string eager_, captured_;  // numbers of events
  std::unique_ptr<MoERuntime> runtime_;
  DispatchHandle handle_;
};

bool has(const std::string& log, const std::string& part) { return log.find(part) != std::string::npos; }

// In hexadecimal above, in the log in decimal.
const std::string kOrderFirstSecond = "record E on 16\nwait 32 for E\n";

TEST_CASE("work on one stream needs no events") {
  Rank rank;
  for (int i = 0; i < 3; ++i) {
    REQUIRE_EQ(rank.dispatch(kFirst), "launch 16\n");
    REQUIRE_EQ(rank.combine(kFirst), "launch 16\n");
  }
}

TEST_CASE("another stream waits for the last one") {
  Rank rank;
  rank.dispatch(kFirst);
  REQUIRE_EQ(rank.combine(kSecond), kOrderFirstSecond + "launch 32\n");
  REQUIRE_EQ(rank.dispatch(kSecond), "launch 32\n");
  REQUIRE_EQ(rank.combine(kFirst), "record E on 32\nwait 16 for E\nlaunch 16\n");
}

TEST_CASE("a stream that only a launch finds wrong leaves the next call as it was") {
  Rank rank;
  driver().make_foreign(kThird);
  rank.dispatch(kFirst);
  for (int i = 0; i < 2; ++i) {
    check_throws(ErrorCode::Backend, "", [&] { rank.combine(kThird); });
    driver().take_log();
  }
  REQUIRE_EQ(rank.combine(kFirst), "launch 16\n");
  driver().fail("cuLaunchKernelEx", 1);
  check_throws(ErrorCode::Backend, "cuLaunchKernelEx", [&] { rank.dispatch(kSecond); });
  driver().take_log();
  REQUIRE_EQ(rank.dispatch(kFirst), "launch 16\n");
  REQUIRE_EQ(rank.runtime().stats().dispatch_calls, 2U);
}

TEST_CASE("streams of one capture are ordered in it, and the graph keeps the memory once") {
  Rank rank;
  driver().set_capture(kFirst, kActive, 7);
  driver().set_capture(kSecond, kActive, 7);
  REQUIRE_EQ(rank.dispatch(kFirst), "graph keeps\nlaunch 16\n");
  REQUIRE_EQ(rank.combine(kSecond), "record C on 16\nwait 32 for C\nlaunch 32\n");
  REQUIRE_EQ(rank.combine(kSecond), "launch 32\n");
  REQUIRE_EQ(rank.combine(kFirst), "record C on 32\nwait 16 for C\nlaunch 16\n");
  driver().set_capture(kFirst, kActive, 8);
  driver().set_capture(kSecond, kActive, 8);
  REQUIRE_EQ(rank.dispatch(kSecond), "graph keeps\nlaunch 32\n");
  REQUIRE_EQ(rank.combine(kFirst), "record C on 32\nwait 16 for C\nlaunch 16\n");
  driver().set_capture(kFirst, kInvalidated, 8);
  check_throws(ErrorCode::InvalidArgument, "stream: its capture has been invalidated", [&] { rank.dispatch(kFirst); });
  driver().set_capture(kFirst, kNone, 0);
  driver().set_capture(kSecond, kNone, 0);
  REQUIRE_EQ(rank.combine(kFirst), "launch 16\n");
  REQUIRE(!has(rank.end(), "unmap"));  // of what a graph keeps
  driver().destroy_graph();
  Rank next;  // making one releases what graphs have dropped; that log is gone
  REQUIRE_EQ(driver().num_mistakes(), 0);
}

TEST_CASE("after a capture the stream before it may be gone") {
  Rank rank;
  rank.dispatch(kFirst);
  driver().set_capture(kSecond, kActive, 7);
  REQUIRE_EQ(rank.combine(kSecond), "graph keeps\nlaunch 32\nrecord E on 16\n");
  driver().set_capture(kSecond, kNone, 0);
  driver().destroy_stream(kFirst);
  REQUIRE_EQ(rank.dispatch(0x40), "wait 64 for E\nlaunch 64\n");
  rank.end();
  driver().destroy_graph();
  REQUIRE_EQ(driver().num_mistakes(), 0);
}

TEST_CASE("a call that cannot be ordered behind the one before is refused and may be made again") {
  constexpr std::uintptr_t kMain = 0x50, kSide = 0x60;
  Rank rank(true);
  rank.dispatch(kMain);
  driver().set_capture(kMain, kActive, 7);
  const auto refuse = [](const std::function<void()>& call) {
    check_throws(ErrorCode::InvalidArgument, "stream: the call before was made on another stream", call);
  };
  refuse([&] { rank.dispatch(kSide); });
  refuse([&] { rank.combine(kSide); });
  driver().set_capture(kMain, kNone, 0);
  rank.send(kMain);
  driver().set_capture(kMain, kActive, 8);
  refuse([&] { rank.receive(kSide); });
  refuse([&] { rank.receive(kSide); });
  driver().set_capture(kMain, kNone, 0);
  driver().take_log();
  REQUIRE(has(rank.receive(kSide), "launch 96\n"));
}

TEST_CASE("a receive that the driver does not let begin may be made again") {
  Rank rank(true);
  rank.send(0x50);
  driver().fail("cuLaunchKernelEx", 1);
  check_throws(ErrorCode::Backend, "cuLaunchKernelEx", [&] { rank.receive(0x50); });
  driver().take_log();
  REQUIRE(has(rank.receive(0x50), "launch 80\n"));
  check_throws(ErrorCode::InvalidHandle, "", [&] { rank.receive(0x50); });
}

TEST_CASE("the default stream beside a capture that it would disturb") {
  Rank rank;
  driver().set_implicit_capture(true);
  check_throws(ErrorCode::InvalidArgument, "stream: the default stream cannot be used while",
               [&] { rank.dispatch(0); });
  driver().set_implicit_capture(false);
  rank.dispatch(0);
  driver().set_implicit_capture(true);
  check_throws(ErrorCode::InvalidArgument, "stream: the default stream cannot be used while",
               [&] { rank.combine(0x50); });
  driver().set_capture(0x60, kActive, 9);
  REQUIRE_EQ(rank.combine(0x60), "graph keeps\nlaunch 96\n");
  driver().set_capture(0x60, kNone, 0);
  driver().set_implicit_capture(false);
  REQUIRE_EQ(rank.combine(0x50), "record E on 0\nwait 80 for E\nlaunch 80\n");
  rank.end();
  driver().destroy_graph();
}

TEST_CASE("the default stream of a thread is recorded at once") {
  Rank rank;
  REQUIRE_EQ(rank.dispatch(kPerThread), "launch 2\nrecord E on 2\n");
  REQUIRE_EQ(rank.combine(0x50), "wait 80 for E\nlaunch 80\n");
}

TEST_CASE("whatever was done last is what the next waits for") {
  constexpr std::uintptr_t kLast = 0x50, kNext = 0x60;
  const std::string ordered = "record E on 80\nwait 96 for E\nlaunch 96\n";
  for (int which = 0; which < 5; ++which) {
    Rank rank(true, true);
    rank.dispatch(kNext);
    if (which == 0) rank.send(kLast);
    if (which == 1) rank.send(kNext), rank.receive(kLast);
    if (which == 2) rank.send_back(kLast);
    if (which == 3) rank.send_back(kNext), rank.receive_back(kLast);
    if (which == 4) rank.runtime().update_placement({1, 0}, stream_of(kLast)), rank.log();
    if (which == 0)
      REQUIRE_EQ(rank.receive(kNext), ordered + "record R on 96\n");
    else if (which == 2)
      REQUIRE_EQ(rank.receive_back(kNext), ordered + "record R on 96\n");
    else
      REQUIRE_EQ(rank.combine(kNext), ordered);
  }
}

TEST_CASE("fewer blocks are noted with the launch, before the epochs of the others are copied") {
  Rank rank;
  rank.dispatch(0x50);
  LatencyDispatchRequest request = rank.dispatch_on(0x60);
  request.max_num_blocks = 4;
  driver().fail("cuMemcpyDtoDAsync", 1);
  check_throws(ErrorCode::Backend, "cuMemcpyDtoDAsync", [&] { rank.runtime().dispatch(request); });
  driver().take_log();
  REQUIRE_EQ(rank.end().substr(0, 22), "record E on 96\nsync E\n");
  REQUIRE_EQ(driver().num_mistakes(), 0);
}

TEST_CASE("a placement that cannot be updated stays") {
  Rank rank(false, true);
  rank.dispatch(0x50);
  const auto update = [&] { rank.runtime().update_placement({1, 0}, stream_of(0x60)); };
  driver().set_capture(0x50, kActive, 7);
  check_throws(ErrorCode::InvalidArgument, "stream: the call before was made on another stream", update);
  driver().set_capture(0x50, kNone, 0);
  driver().fail("cuStreamSynchronize", 1);
  check_throws(ErrorCode::Backend, "cuStreamSynchronize", update);
  REQUIRE(rank.runtime().config().placement == std::vector<int>{0, 1});
  driver().set_global_capture(true);
  update();
  driver().set_global_capture(false);
  REQUIRE(rank.runtime().config().placement == std::vector<int>{1, 0});
  REQUIRE_EQ(driver().num_mistakes(), 0);
}

TEST_CASE("the end waits for the last work, and disturbs no capture") {
  Rank rank;
  rank.dispatch(0x50);
  driver().set_global_capture(true);
  rank.runtime().stats();
  driver().take_log();
  rank.runtime().close();
  REQUIRE_EQ(rank.log(), "record E on 80\n");
  driver().destroy_stream(0x50);  // the caller's again
  const std::string log = rank.end();
  driver().set_global_capture(false);
  REQUIRE_EQ(log.substr(0, 27), "sync E\ndestroy E\ndestroy C\n");
  REQUIRE(has(log, "unmap\n"));
  REQUIRE(!driver().is_relaxed());
  REQUIRE_EQ(driver().num_mistakes(), 0);
}

TEST_CASE("memory of work that cannot be waited for is not released") {
  for (const char* call : {"cuEventSynchronize", "cuEventRecord"}) {
    Rank rank;
    rank.dispatch(0x70);
    driver().fail(call, 1);
    REQUIRE(!has(rank.end(), "unmap"));
  }
  Rank rank;
  rank.dispatch(0x70);
  driver().set_capture(0x70, kActive, 7);
  REQUIRE(!has(rank.end(), "unmap"));
  driver().set_capture(0x70, kNone, 0);
}

}  // namespace
}  // namespace expertwire::test
