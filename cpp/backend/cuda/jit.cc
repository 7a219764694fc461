#include "backend/cuda/jit.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <vector>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/embedded_kernels.hpp"
#include "base/env.hpp"
#include "base/file_limit.hpp"
#include "expertwire/error.hpp"
#include "expertwire/version.hpp"

namespace expertwire::cuda {
namespace {

constexpr std::string_view kSchema = "expertwire kernels 1";
constexpr int kOldestArchitecture = 80;
// Sums are part of the contract: no contraction to fused multiply-add. The log tells registers and spills.
constexpr const char* kOptions[] = {"--std=c++20", "-fmad=false", "-lineinfo", "--ptxas-options=-v"};

// FNV-1a of 128 bits: names entries and finds damaged ones; it keeps nobody out.
class Digest {
 public:
  // Every part ends with its length, so that ("a", "bc") differs from ("ab", "c").
  Digest& add(std::string_view part) {
    mix(part);
    mix(std::to_string(part.size()));
    return *this;
  }

  std::string to_string() const {
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4)
      text += "0123456789abcdef"[static_cast<unsigned>(state_ >> shift) & 15];
    return text;
  }

 private:
  using Word = unsigned __int128;
  static constexpr Word kPrime = (Word{1} << 88) + 0x13b;

  void mix(std::string_view bytes) {
    for (const char byte : bytes) state_ = (state_ ^ static_cast<unsigned char>(byte)) * kPrime;
  }

  Word state_ = (Word{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
};

void note(const std::string& text) {
  if (env().log == "info") std::fprintf(stderr, "expertwire: %s\n", text.c_str());
}

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

std::optional<std::string> read_file(const std::filesystem::path& path) {
  const File file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) return std::nullopt;
  std::string bytes;
  char part[1 << 16];
  while (const std::size_t count = std::fread(part, 1, sizeof part, file.get())) bytes.append(part, count);
  if (std::ferror(file.get()) != 0) return std::nullopt;
  return bytes;
}

bool write_file(const std::filesystem::path& path, const std::string& bytes) {
  if (bytes.size() > largest_file_bytes()) return false;
  File file(std::fopen(path.c_str(), "wb"), &std::fclose);
  if (file == nullptr) return false;
  const bool is_written = std::fwrite(bytes.data(), 1, bytes.size(), file.get()) == bytes.size();
  return std::fclose(file.release()) == 0 && is_written;
}

// The entries are files of one folder. A reader sees a whole entry or none; a damaged one counts as none.
class KernelCache {
 public:
  explicit KernelCache(const std::string& key) : key_(key) {
    if (!env().cache_dir.empty()) path_ = std::filesystem::path(env().cache_dir) / (key + ".kernels");
  }

  std::optional<KernelImage> load() const {
    const std::optional<std::string> entry = read_file(path_);
    if (!entry) return std::nullopt;
    // schema, then checksum and sizes, each a line; then the log and the image
    const std::size_t first = entry->find('\n');
    const std::size_t second = first == std::string::npos ? first : entry->find('\n', first + 1);
    if (second == std::string::npos || entry->compare(0, first, kSchema) != 0) return std::nullopt;
    char checksum[40];
    std::size_t log_bytes = 0, cubin_bytes = 0;
    const std::string header = entry->substr(first + 1, second - first - 1);
    if (std::sscanf(header.c_str(), "%39s %zu %zu", checksum, &log_bytes, &cubin_bytes) != 3) return std::nullopt;
    const std::size_t bytes = entry->size() - second - 1;
    if (log_bytes > bytes || cubin_bytes != bytes - log_bytes) return std::nullopt;
    KernelImage image{entry->substr(second + 1 + log_bytes), entry->substr(second + 1, log_bytes), {}, true, true};
    if (checksum != this->checksum(image)) return std::nullopt;
    return image;
  }

  bool store(const KernelImage& image) const {
    if (path_.empty()) return false;
    std::error_code error;
    std::filesystem::create_directories(path_.parent_path(), error);
    // Written aside under a name of this call's own and renamed: whoever comes last wins with the same content.
    static std::atomic<unsigned> calls{0};
    const std::filesystem::path aside =
        path_.string() + "." + std::to_string(getpid()) + "." + std::to_string(calls.fetch_add(1)) + ".tmp";
    const bool is_written =
        write_file(aside, std::string(kSchema) + '\n' + checksum(image) + ' ' + std::to_string(image.log.size()) + ' ' +
                              std::to_string(image.cubin.size()) + '\n' + image.log + image.cubin);
    if (is_written) std::filesystem::rename(aside, path_, error);
    if (is_written && !error) return true;
    note("compiled kernels could not be kept in " + path_.parent_path().string());
    std::filesystem::remove(aside, error);
    return false;
  }

 private:
  // Of the key too, so that an entry under another's name is no entry.
  std::string checksum(const KernelImage& image) const {
    return Digest().add(key_).add(image.log).add(image.cubin).to_string();
  }

  std::string key_;
  std::filesystem::path path_;  // empty: there is no folder to keep anything in
};

// A program of NVRTC and the results it holds.
class Program {
 public:
  Program(const Nvrtc& nvrtc, const std::string& source) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (const EmbeddedHeader& header : embedded_headers()) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    require(nvrtc_.nvrtcCreateProgram(&program_, source.c_str(), "expertwire.cu", static_cast<int>(names.size()),
                                      texts.data(), names.data()),
            "nvrtcCreateProgram");
  }
  ~Program() { nvrtc_.nvrtcDestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void compile(const std::string& architecture) {
    const std::string target = "--gpu-architecture=" + architecture;
    std::vector<const char*> options(std::begin(kOptions), std::end(kOptions));
    options.push_back(target.c_str());
    const nvrtcResult result = nvrtc_.nvrtcCompileProgram(program_, static_cast<int>(options.size()), options.data());
    if (result == 0) return;
    throw Error(ErrorCode::Backend, "kernels do not compile for " + architecture + ": " +
                                        nvrtc_.nvrtcGetErrorString(result) + "\n" + log());
  }

  std::string log() const {
    std::size_t bytes = 0;
    require(nvrtc_.nvrtcGetProgramLogSize(program_, &bytes), "nvrtcGetProgramLogSize");
    std::string text(bytes, '\0');
    require(nvrtc_.nvrtcGetProgramLog(program_, text.data()), "nvrtcGetProgramLog");
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }

  std::string cubin() const {
    std::size_t bytes = 0;
    require(nvrtc_.nvrtcGetCUBINSize(program_, &bytes), "nvrtcGetCUBINSize");
    std::string image(bytes, '\0');
    require(nvrtc_.nvrtcGetCUBIN(program_, image.data()), "nvrtcGetCUBIN");
    return image;
  }

 private:
  void require(nvrtcResult result, const char* call) const {
    if (result != 0) throw Error(ErrorCode::Backend, std::string(call) + ": " + nvrtc_.nvrtcGetErrorString(result));
  }

  const Nvrtc& nvrtc_;
  nvrtcProgram program_ = nullptr;
};

Error wrong_architecture(ErrorCode code, const std::string& architecture, const std::string& why) {
  return Error(code, "architecture = \"" + architecture + "\": " + why);
}

std::string version_text(const Nvrtc& nvrtc) {
  int major = 0, minor = 0;
  nvrtc.nvrtcVersion(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

void check_compiler_knows(const Nvrtc& nvrtc, int wanted, const std::string& architecture) {
  int count = 0;
  nvrtc.nvrtcGetNumSupportedArchs(&count);
  std::vector<int> known(static_cast<std::size_t>(count));
  nvrtc.nvrtcGetSupportedArchs(known.data());
  std::string list;
  for (const int number : known) {
    if (number == wanted) return;
    list += " sm_" + std::to_string(number);
  }
  throw wrong_architecture(ErrorCode::Unsupported, architecture,
                           "NVRTC " + version_text(nvrtc) + " compiles for" + list);
}

KernelImage compile(const Nvrtc& nvrtc, const std::string& source, const std::string& architecture) {
  const auto start = std::chrono::steady_clock::now();
  Program program(nvrtc, source);
  program.compile(architecture);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  note("kernels compiled for " + architecture + " with NVRTC " + version_text(nvrtc) + " in " +
       std::to_string(elapsed.count()) + " s");
  return {program.cubin(), program.log(), {}, false, false};
}

// Everything that the result depends on.
std::string cache_key(const std::string& source, const std::string& architecture, const std::string& compiler) {
  Digest digest;
  digest.add(kSchema).add(kVersion).add(compiler).add(architecture).add(source);
  for (const char* option : kOptions) digest.add(option);
  for (const EmbeddedHeader& header : embedded_headers()) digest.add(header.name).add(header.text);
  return digest.to_string();
}

// Ranks that are threads of one process ask for the same kernels at once: one compiles, the others find them kept.
class Turn {
 public:
  explicit Turn(const std::string& key) : key_(key) {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return !compiling_.contains(key); });
    compiling_.insert(key);
  }
  ~Turn() {
    {
      const std::lock_guard lock(mutex_);
      compiling_.erase(key_);
    }
    ended_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  static inline std::mutex mutex_;
  static inline std::condition_variable ended_;
  static inline std::set<std::string> compiling_;
  std::string key_;
};

// The number before `mark` in a line; 0 if it is not there.
int number_before(const std::string& line, std::string_view mark) {
  const std::size_t end = line.find(mark);
  if (end == std::string::npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

}  // namespace

int architecture_number(const std::string& architecture) {
  constexpr std::string_view prefix = "sm_";
  std::string_view digits = architecture;
  if (digits.starts_with(prefix)) digits.remove_prefix(prefix.size());
  if (digits.ends_with('a') || digits.ends_with('f')) digits.remove_suffix(1);
  int number = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (!architecture.starts_with(prefix) || error != std::errc() || stop != end || number < 0) {
    throw wrong_architecture(ErrorCode::InvalidArgument, architecture, "must be such as sm_90a");
  }
  if (number < kOldestArchitecture) {
    throw wrong_architecture(ErrorCode::Unsupported, architecture, "must be sm_80 or newer");
  }
  return number;
}

KernelImage compile_source(const std::string& source, const std::string& architecture) {
  const int number = architecture_number(architecture);
  const Nvrtc& compiler = nvrtc();
  check_compiler_knows(compiler, number, architecture);
  const std::string key = cache_key(source, architecture, version_text(compiler));
  const KernelCache cache(key);
  const Turn turn(key);
  std::optional<KernelImage> image = cache.load();
  if (!image) {
    image = compile(compiler, source, architecture);
    image->is_kept = cache.store(*image);
  }
  image->resources = kernel_resources(image->log);
  return *image;
}

std::vector<KernelImage> compile_sources(const std::vector<std::string>& sources, const std::string& architecture) {
  std::vector<std::future<KernelImage>> compilations;
  for (const std::string& source : sources)
    compilations.push_back(std::async(std::launch::async, [&] { return compile_source(source, architecture); }));
  std::vector<KernelImage> images;
  for (std::future<KernelImage>& compilation : compilations) images.push_back(compilation.get());
  return images;
}

std::map<std::string, KernelResources> kernel_resources(const std::string& log) {
  std::map<std::string, KernelResources> result;
  std::string kernel;
  for (std::size_t start = 0; start < log.size();) {
    const std::size_t stop = std::min(log.find('\n', start), log.size());
    const std::string line = log.substr(start, stop - start);
    start = stop + 1;
    const std::string_view mark = "Compiling entry function '";
    if (const std::size_t at = line.find(mark); at != std::string::npos) {
      const std::size_t begin = at + mark.size();
      kernel = line.substr(begin, line.find('\'', begin) - begin);
    }
    if (kernel.empty()) continue;
    KernelResources& found = result[kernel];
    found.stack_bytes += number_before(line, " bytes stack frame");
    found.spill_bytes += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    if (const int registers = number_before(line, " registers"); registers != 0) found.registers = registers;
  }
  return result;
}

}  // namespace expertwire::cuda
