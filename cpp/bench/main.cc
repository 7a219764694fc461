// expertwire-bench: times the C++ runtime, with no Python in the process.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>

#include "backend/cuda/driver.hpp"
#include "cuda_place.hpp"
#include "expertwire/error.hpp"
#include "expertwire/version.hpp"
#include "inputs.hpp"
#include "ranks.hpp"
#include "report.hpp"

namespace {

using namespace expertwire;
using namespace expertwire::bench;

enum Status { RIGHT = 0, WRONG = 1, BAD_USAGE = 2 };

void check_shape(const Options& options) {
  const auto refuse = [](const char* name, int value, const std::string& allowed) {
    throw UsageError(std::string(name) + " " + std::to_string(value) + ": must be " + allowed);
  };
  const int topk = std::min(options.num_experts, 32);
  if (options.num_topk > topk) refuse("-k", options.num_topk, "at most min(-e, 32) = " + std::to_string(topk));
  const bool fp8 = options.dispatch_dtype != DispatchDataType::BF16;
  if (options.hidden_size % (fp8 ? 128 : 8) != 0)
    refuse("-d", options.hidden_size, "a multiple of " + std::string(fp8 ? "128" : "8"));
  if (options.backend == DeviceType::CUDA && options.num_ranks > num_cuda_devices())
    refuse("--ranks", options.num_ranks, "at most the number of GPUs here, " + std::to_string(num_cuda_devices()));
}

// Written aside and renamed at the end. Made before anything is measured, so that a path that cannot be written costs
// nothing; under mpirun by every process, of which one keeps it.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path), aside_(path + "." + std::to_string(::getpid()) + ".part") {
    std::error_code ignored;  // what cannot be looked at cannot be written either
    if (std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored))
      throw UsageError("--json " + path + ": is no regular file");
    if (!std::ofstream(aside_))
      throw UsageError("--json " + path + ": cannot write there (" + std::strerror(errno) + ")");
  }
  ~JsonFile() { std::remove(aside_.c_str()); }
  JsonFile(const JsonFile&) = delete;
  JsonFile& operator=(const JsonFile&) = delete;

  void keep(const std::string& text) const {
    std::ofstream file(aside_);
    file << text;
    file.close();
    if (!file || std::rename(aside_.c_str(), path_.c_str()) != 0) {
      throw Error(ErrorCode::Backend, "--json " + path_ + ": cannot write it (" + std::strerror(errno) + ")");
    }
  }

 private:
  std::string path_, aside_;
};

bool is_bad_usage(const Error& error) {
  return error.code() == ErrorCode::InvalidArgument || error.code() == ErrorCode::Unsupported;
}

Result measure_all(const Options& options, const MpiRanks* mpi) {
  Result result;
  result.options = options;
  const std::vector<RankInput> inputs = make_inputs(options);
  const RuntimeConfig config = options.config();
  result.bytes_per_rank =
      static_cast<double>(Reference(config, inputs).num_selections()) * options.hidden_size * 2 / options.num_ranks;
  try {
    result.ranks = mpi != nullptr ? mpi->measure(options, inputs) : measure_by_threads(options, inputs);
  } catch (const Error& error) {
    if (is_bad_usage(error)) throw;
    result.failure = error.what();
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
  return result;
}

int run(int argc, char** argv) {
  Options options = parse_options({argv + 1, argv + argc});
  if (options.help || options.version) {
    std::cout << (options.help ? help_text() : "expertwire-bench " + std::string(kVersion) + "\n");
    return RIGHT;
  }
  if (!options.nvrtc_dir.empty()) cuda::set_nvrtc_search_path({options.nvrtc_dir});
  std::optional<MpiRanks> mpi;
  if (options.mpi) {
    mpi.emplace(argc, argv);
    options.num_ranks = mpi->size();
  }
  check_shape(options);
  std::optional<JsonFile> file;
  if (!options.json.empty()) file.emplace(options.json);
  Result result = measure_all(options, mpi ? &*mpi : nullptr);
  result.command.assign(argv, argv + argc);
  result.command.front() = "expertwire-bench";
  if (!mpi || mpi->rank() == 0) {
    std::cout << table(result) << std::flush;
    if (file) file->keep(json(result));
  }
  return result.failure.empty() ? RIGHT : WRONG;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const UsageError& error) {
    std::cerr << "expertwire-bench: " << error.what() << '\n';
    return BAD_USAGE;
  } catch (const Error& error) {
    std::cerr << "expertwire-bench: " << error.what() << '\n';
    return is_bad_usage(error) ? BAD_USAGE : WRONG;
  } catch (const std::exception& error) {
    std::cerr << "expertwire-bench: " << error.what() << '\n';
    return WRONG;
  }
}
