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
#include <set>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/embedded_kernels.hpp"
#include "backend/cuda/jit.hpp"
#include "check.hpp"
#include "process.hpp"

namespace expertwire::test {
namespace {

namespace fs = std::filesystem;
using cuda::compile_source;

const std::string kSource = "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n";

// A folder of the test's own, empty at first and gone at the end.
class Folder {
 public:
  Folder() : path_((fs::temp_directory_path() / "expertwire-jit-XXXXXX").string()) {
    check(mkdtemp(path_.data()) != nullptr, "mkdtemp failed");
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
    check_equal(found.size(), 1U, where);
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
        check_equal(image.from_cache, from_cache, where);
        check_equal(image.cubin.substr(1, 3), "ELF", where);
        check(image.resources.at("twice").registers > 0, image.log, where);
      },
      where);
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

void headers_include_only_each_other() {
  std::set<std::string> names;
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) names.insert(header.name);
  check(names.contains("dispatch.cuh") && names.contains("shared/layout.cuh"));
  check_equal(names.size(), cuda::embedded_headers().size());
  const std::string mark = "#include \"";
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) {
    const std::string text = header.text;
    check(text.find("#include <") == std::string::npos, header.name);
    for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
      at += mark.size();
      const std::string target = text.substr(at, text.find('"', at) - at);
      check(names.contains(target), std::string(header.name) + " includes " + target);
    }
  }
}

void resources_are_read_from_the_log() {
  const auto found = cuda::kernel_resources(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
      "ptxas         .     816 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
      "ptxas info    : Used 32 registers, used 1 barriers, 816 bytes cumulative stack size\n"
      "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
      "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 0 barriers\n");
  check_equal(found.size(), 2U);
  check_equal(found.at("a").registers, 168);
  check_equal(found.at("a").stack_bytes, 0);
  check_equal(found.at("a").spill_bytes, 0);
  check_equal(found.at("b").registers, 32);
  check_equal(found.at("b").stack_bytes, 816);
  check_equal(found.at("b").spill_bytes, 40);
  check(cuda::kernel_resources("").empty());
}

void wrong_architectures_are_refused() {
  for (const char* wrong : {"", "sm_", "sm_90b", "compute_90", "sm_9 0", "sm_-90", "90"}) {
    check_throws(ErrorCode::InvalidArgument, std::string("architecture = \"") + wrong + "\": must be such as sm_90a",
                 [&] { compile_source(kSource, wrong); });
  }
  check_throws(ErrorCode::Unsupported, "architecture = \"sm_75\": must be sm_80 or newer",
               [] { compile_source(kSource, "sm_75"); });
}

void missing_compiler_is_told_with_what_to_do() {
  check_process([] {
    setenv("EXPERTWIRE_NVRTC_DIR", "/nowhere", 1);
    const Error error =
        check_throws(ErrorCode::Unsupported, "in /nowhere; pip install", [] { compile_source(kSource, "sm_90a"); });
    check(std::string(error.what()).find("EXPERTWIRE_NVRTC_DIR") != std::string::npos, error.what());
  });
  const Folder folder;  // a library that is none
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) write(folder.path() / name, "no library");
  check_process([&] {
    setenv("EXPERTWIRE_NVRTC_DIR", folder.path().c_str(), 1);
    check_throws(ErrorCode::Unsupported, folder.path().string() + "/libnvrtc.so.1",
                 [] { compile_source(kSource, "sm_90a"); });
  });
}

void driver_says_why_it_is_unusable() {
  check_process([] {
    const std::optional<std::string> why = cuda::why_unusable();
    try {
      int count = 0;
      cuda::check(cuda::driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
      check(count > 0, "a driver without a GPU");
      check_throws(ErrorCode::Backend, "cuDeviceGetCount: CUDA_ERROR_INVALID_VALUE: ", [] {
        cuda::check(cuda::CUDA_ERROR_INVALID_VALUE, "cuDeviceGetCount");
      });
    } catch (const Error& error) {
      check(error.code() == ErrorCode::Unsupported, error.what());
      check(why.has_value() && error.what() == "device = cuda: " + *why, error.what());
    }
  });
}

void kernels_are_kept() {
  const Folder folder;
  compile_check_process(folder.path() / "new" / "folder", false);
  compile_check_process(folder.path() / "new" / "folder", true);
  folder.only_file();
}

void whatever_the_result_depends_on_makes_another_entry() {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    for (const char* architecture : {"sm_80", "sm_90", "sm_90a"}) {
      check(!compile_source(kSource, architecture).from_cache);
      check(!compile_source(kSource + "// another\n", architecture).from_cache);
      check(compile_source(kSource, architecture).from_cache);
    }
  });
  check_equal(folder.files().size(), 6U);
}

void damaged_entries_are_made_anew() {
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

void processes_may_compile_at_once() {
  const Folder folder;
  check_processes(4, [&](int) {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    check_equal(compile_source(kSource, "sm_90a").cubin.substr(1, 3), "ELF");
  });
  folder.only_file();  // nothing written aside is left
  compile_check_process(folder.path(), true);
}

void threads_compile_once() {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    std::atomic<int> compiled{0};
    run_ranks(4, [&](int) { compiled += compile_source(kSource, "sm_90a").from_cache ? 0 : 1; });
    check_equal(compiled.load(), 1);
  });
}

void unwritable_folder_costs_time_alone() {
  const Folder folder;
  write(folder.path() / "file", "");
  compile_check_process(folder.path() / "file" / "below", false);
  compile_check_process(folder.path() / "file" / "below", false);
  check_process([] {  // nowhere to keep anything
    for (const char* name : {"EXPERTWIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) unsetenv(name);
    check(!compile_source(kSource, "sm_90a").from_cache);
    check(!compile_source(kSource, "sm_90a").from_cache);
  });
}

// The signal that ends who writes beyond the limit is not ignored here.
void limit_on_files_costs_time_alone() {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    compile_source("// the compiler itself may write where it likes\n", "sm_90a");
    const rlimit limit{100, 100};  // bytes of a file
    check_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    check(!compile_source(kSource, "sm_90a").from_cache);
    check(!compile_source(kSource, "sm_90a").from_cache);
  });
  folder.only_file();
  compile_check_process(folder.path(), false);
}

// Needs the right to mount.
void full_disk_costs_time_alone() {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", folder.path().c_str(), "tmpfs", 0, "size=4k") != 0) {
      std::fputs("not tried: this user may not mount\n", stderr);
      return;
    }
    write(folder.path() / "file", std::string(3000, 'x'));  // the one page there is
    check(!compile_source(kSource, "sm_90a").from_cache);
    check(!compile_source(kSource, "sm_90a").from_cache);
    check_equal(folder.files().size(), 1U);
  });
}

void errors_carry_the_compilers_words() {
  const Folder folder;
  check_process([&] {
    setenv("EXPERTWIRE_CACHE_DIR", folder.path().c_str(), 1);
    const Error error = check_throws(ErrorCode::Backend, "kernels do not compile for sm_90a",
                                     [] { compile_source("int x = no_such_name;", "sm_90a"); });
    check(std::string(error.what()).find("no_such_name") != std::string::npos, error.what());
    check_throws(ErrorCode::Unsupported, "compiles for sm_", [] { compile_source(kSource, "sm_81"); });
  });
  check(folder.files().empty());
}

void sources_reach_every_header() {
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

bool has_compiler() {
  try {
    check_process([] { cuda::nvrtc(); });
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace expertwire::test

int main(int argc, char** argv) {
  using namespace expertwire::test;
  std::vector<Test> tests{{"headers_include_only_each_other", headers_include_only_each_other},
                          {"resources_are_read_from_the_log", resources_are_read_from_the_log},
                          {"wrong_architectures_are_refused", wrong_architectures_are_refused},
                          {"missing_compiler_is_told_with_what_to_do", missing_compiler_is_told_with_what_to_do},
                          {"driver_says_why_it_is_unusable", driver_says_why_it_is_unusable}};
  const std::vector<Test> compiling{
      {"kernels_are_kept", kernels_are_kept},
      {"whatever_the_result_depends_on_makes_another_entry", whatever_the_result_depends_on_makes_another_entry},
      {"damaged_entries_are_made_anew", damaged_entries_are_made_anew},
      {"processes_may_compile_at_once", processes_may_compile_at_once},
      {"threads_compile_once", threads_compile_once},
      {"unwritable_folder_costs_time_alone", unwritable_folder_costs_time_alone},
      {"limit_on_files_costs_time_alone", limit_on_files_costs_time_alone},
      {"full_disk_costs_time_alone", full_disk_costs_time_alone},
      {"errors_carry_the_compilers_words", errors_carry_the_compilers_words},
      {"sources_reach_every_header", sources_reach_every_header}};
  if (has_compiler()) {
    tests.insert(tests.end(), compiling.begin(), compiling.end());
  } else {
    std::cout << "left out, for want of libnvrtc (EXPERTWIRE_NVRTC_DIR names its folder): " << compiling.size()
              << " tests that compile" << std::endl;
  }
  return run_tests(argc, argv, tests);
}
