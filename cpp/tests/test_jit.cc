// Kernels are compiled and kept, without a GPU. The environment and the compiler library are read once per process, so each
// case runs in processes of its own. Cases that compile need libnvrtc: where EXPERTWIRE_NVRTC_DIR says, or found.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/embedded_kernels.hpp"
#include "backend/cuda/jit.hpp"
#include "process.hpp"
#include "support.hpp"

namespace expertwire::test {
namespace {

namespace fs = std::filesystem;
using cuda::compile_source;

const std::string kSource = "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n";

// A folder of the test's own, empty at first and gone at the end.
class Folder {
 public:
  Folder() : path_((fs::temp_directory_path() / "expertwire-jit-XXXXXX").string()) {
    REQUIRE(mkdtemp(path_.data()) != nullptr);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  fs::path path() const { return path_; }
  std::vector<fs::path> files() const {
    std::vector<fs::path> result;
    for (const auto& entry : fs::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) result.push_back(entry.path());
    }
    return result;
  }
  fs::path only_file(const Location& where = Location::current()) const {
    const std::vector<fs::path> found = files();
    if (found.size() != 1) fail_at(where, std::to_string(found.size()) + " files, wanted one");
    return found.front();
  }

 private:
  std::string path_;
};

// Compiles in a process of its own that keeps kernels in `cache_dir`; they must be the right ones in any case.
void compile_check_process(const fs::path& cache_dir, bool from_cache, const Location& where = Location::current()) {
  check_process(
      [&] {
        setenv("EXPERTWIRE_CACHE_DIR", cache_dir.c_str(), 1);
        const KernelImage image = compile_source(kSource, "sm_90a");
        REQUIRE_EQ(image.from_cache, from_cache);
        REQUIRE_EQ(image.cubin.substr(1, 3), "ELF");
        REQUIRE_MESSAGE(image.resources.at("twice").registers > 0, image.log);
      },
      where);
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

TEST_CASE("headers include only each other") {
  std::set<std::string> names;
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) names.insert(header.name);
  REQUIRE(names.contains("dispatch.cuh"));
  REQUIRE(names.contains("shared/layout.cuh"));
  REQUIRE_EQ(names.size(), cuda::embedded_headers().size());
  const std::string mark = "#include \"";
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) {
    const std::string text = header.text;
    REQUIRE_MESSAGE(text.find("#include <") == std::string::npos, header.name);
    for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
      at += mark.size();
      const std::string target = text.substr(at, text.find('"', at) - at);
      REQUIRE_MESSAGE(names.contains(target), header.name, " includes ", target);
    }
  }
}

TEST_CASE("resources are read from the log") {
  const auto found = cuda::kernel_resources(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
      "ptxas         .     816 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
      "ptxas info    : Used 32 registers, used 1 barriers, 816 bytes cumulative stack size\n"
      "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
      "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 0 barriers\n");
  REQUIRE_EQ(found.size(), 2U);
  REQUIRE_EQ(found.at("a").registers, 168);
  REQUIRE_EQ(found.at("a").stack_bytes, 0);
  REQUIRE_EQ(found.at("a").spill_bytes, 0);
  REQUIRE_EQ(found.at("b").registers, 32);
  REQUIRE_EQ(found.at("b").stack_bytes, 816);
  REQUIRE_EQ(found.at("b").spill_bytes, 40);
  REQUIRE(cuda::kernel_resources("").empty());
}

TEST_CASE("wrong architectures are refused") {
  for (const char* wrong : {"", "sm_", "sm_90b", "compute_90", "sm_9 0", "sm_-90", "90"}) {
    check_throws(ErrorCode::InvalidArgument, std::string("architecture = \"") + wrong + "\": must be such as sm_90a",
                 [&] { compile_source(kSource, wrong); });
  }
  check_throws(ErrorCode::Unsupported, "architecture = \"sm_75\": must be sm_80 or newer",
               [] { compile_source(kSource, "sm_75"); });
}

TEST_CASE("a missing compiler is told with what to do") {
  check_process([] {
    setenv("EXPERTWIRE_NVRTC_DIR", "/nowhere", 1);
    const Error error =
        check_throws(ErrorCode::Unsupported, "in /nowhere; pip install", [] { compile_source(kSource, "sm_90a"); });
    REQUIRE_MESSAGE(std::string(error.what()).find("EXPERTWIRE_NVRTC_DIR") != std::string::npos, error.what());
  });
  const Folder folder;  // a library that is none
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) write(folder.path() / name, "no library");
  check_process([&] {
    setenv("EXPERTWIRE_NVRTC_DIR", folder.path().c_str(), 1);
    check_throws(ErrorCode::Unsupported, folder.path().string() + "/libnvrtc.so.1",
                 [] { compile_source(kSource, "sm_90a"); });
  });
}

TEST_CASE("the driver says why it is unusable") {
  check_process([] {
    const std::optional<std::string> why = cuda::why_unusable();
    try {
      int count = 0;
      cuda::check(cuda::driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
      REQUIRE(count > 0);
      check_throws(ErrorCode::Backend, "cuDeviceGetCount: CUDA_ERROR_INVALID_VALUE: ", [] {
        cuda::check(cuda::CUDA_ERROR_INVALID_VALUE, "cuDeviceGetCount");
      });
    } catch (const Error& error) {
      REQUIRE_MESSAGE(error.code() == ErrorCode::Unsupported, error.what());
      REQUIRE(why.has_value());
      REQUIRE_EQ(error.what(), "device = cuda: " + *why);
    }
  });
}

TEST_SUITE_BEGIN("that compile");

TEST_CASE("kernels are kept") {
  const Folder folder;
  compile_check_process(folder.path() / "new" / "folder", false);
  compile_check_process(folder.path() / "new" / "folder", true);
  folder.only_file();
}

TEST_CASE("whatever the result depends on makes another entry") {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    for (const char* architecture : {"sm_80", "sm_90", "sm_90a"}) {
      REQUIRE(!compile_source(kSource, architecture).from_cache);
      REQUIRE(!compile_source(kSource + "// another\n", architecture).from_cache);
      REQUIRE(compile_source(kSource, architecture).from_cache);
    }
  });
  REQUIRE_EQ(folder.files().size(), 6U);
}

TEST_CASE("damaged entries are made anew") {
  const Folder folder;
  compile_check_process(folder.path(), false);
  const fs::path entry = folder.only_file();
  const std::string whole = read(entry);
  const auto changed = [&](std::size_t at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    return bytes;
  };
  const std::string cases[] = {"",
                               whole.substr(0, whole.size() / 2),
                               whole + "x",
                               changed(whole.size() - 1),
                               changed(whole.size() / 2),
                               changed(3),
                               changed(whole.find('\n') + 2),
                               "expertwire kernels 1\nx 99999999999999999999 1\n",
                               "expertwire kernels 1\n0 18446744073709551615 2\nx"};
  for (const std::string& damaged : cases) {
    write(entry, damaged);
    compile_check_process(folder.path(), false);
    compile_check_process(folder.path(), true);
  }
  // The whole entry of other kernels is not this one's.
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    compile_source(kSource + "// another\n", "sm_90a");
  });
  for (const fs::path& other : folder.files()) {
    if (other != entry) fs::rename(other, entry);
  }
  compile_check_process(folder.path(), false);
}

TEST_CASE("processes may compile at once") {
  const Folder folder;
  check_processes(4, [&](int) {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    REQUIRE_EQ(compile_source(kSource, "sm_90a").cubin.substr(1, 3), "ELF");
  });
  folder.only_file();  // nothing written aside is left
  compile_check_process(folder.path(), true);
}

TEST_CASE("threads compile once") {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    std::atomic<int> compiled{0};
    run_ranks(4, [&](int) { compiled += compile_source(kSource, "sm_90a").from_cache ? 0 : 1; });
    REQUIRE_EQ(compiled.load(), 1);
  });
}

TEST_CASE("an unwritable folder costs time alone") {
  const Folder folder;
  write(folder.path() / "file", "");
  compile_check_process(folder.path() / "file" / "below", false);
  compile_check_process(folder.path() / "file" / "below", false);
  check_process([] {  // nowhere to keep anything
    for (const char* name : {"EXPERTWIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) unsetenv(name);
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
  });
}

// The signal that ends who writes beyond the limit is not ignored here.
TEST_CASE("a limit on files costs time alone") {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    compile_source("// the compiler itself may write where it likes\n", "sm_90a");
    const rlimit limit{100, 100};  // bytes of a file
    REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
  });
  folder.only_file();
  compile_check_process(folder.path(), false);
}

// Needs the right to mount.
TEST_CASE("a full disk costs time alone") {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", folder.path().c_str(), "tmpfs", 0, "size=4k") != 0) {
      std::fputs("not tried: this user may not mount\n", stderr);
      return;
    }
    write(folder.path() / "file", std::string(3000, 'x'));  // the one page there is
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
    REQUIRE(!compile_source(kSource, "sm_90a").from_cache);
    REQUIRE_EQ(folder.files().size(), 1U);
  });
}

TEST_CASE("errors carry the compiler's words") {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    const Error error = check_throws(ErrorCode::Backend, "kernels do not compile for sm_90a",
                                     [] { compile_source("int x = no_such_name;", "sm_90a"); });
    REQUIRE_MESSAGE(std::string(error.what()).find("no_such_name") != std::string::npos, error.what());
    check_throws(ErrorCode::Unsupported, "compiles for sm_", [] { compile_source(kSource, "sm_81"); });
  });
  REQUIRE(folder.files().empty());
}

TEST_CASE("sources reach every header") {
  std::string source = "namespace expertwire::config {}\n";
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) {
    if (std::string(header.name).starts_with("shared/")) source += std::string("#include \"") + header.name + "\"\n";
  }
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    compile_source(source, "sm_80");
  });
}

TEST_SUITE_END();

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) {
  using namespace expertwire::test;
  if (Process([] { expertwire::cuda::nvrtc(); }).wait()) return run_test_cases(argc, argv);
  return run_test_cases(argc, argv, "that compile", "no libnvrtc, whose folder EXPERTWIRE_NVRTC_DIR names");
}
