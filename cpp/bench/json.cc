#include <stdlib.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <fstream>
#include <thread>
#include <utility>

#include "expertwire/version.hpp"
#include "report.hpp"

namespace expertwire::bench {
namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      result += c;
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      result.append("\\u00").append({kDigits[c >> 4], kDigits[c & 15]});
    }
  }
  return result + "\"";
}

std::string number(double value) {  // the shortest text that gives the same value back
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}
std::string number(int value) { return std::to_string(value); }
std::string truth(bool value) { return value ? "true" : "false"; }

std::string enclosed(char open, const std::vector<std::string>& parts, char close) {
  std::string text(1, open);
  for (const std::string& part : parts) text.append(text.size() > 1 ? ", " : "").append(part);
  return text + close;
}

std::string array(const std::vector<std::string>& items) { return enclosed('[', items, ']'); }

using Members = std::vector<std::pair<std::string, std::string>>;

std::string object(const Members& members) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : members) parts.push_back(quoted(name) + ": " + value);
  return enclosed('{', parts, '}');
}

std::string enum_value(std::string option) {
  std::replace(option.begin(), option.end(), '-', '_');
  return quoted(option);
}

std::string problem_json(const Options& options) {
  std::vector<std::string> blocks;  // none: the library chose
  for (const int count : {options.dispatch_num_blocks, options.combine_num_blocks}) {
    if (count > 0) blocks.push_back(number(count));
  }
  return object({{"num_experts", number(options.num_experts)},
                 {"num_tokens", number(options.num_tokens)},
                 {"hidden_size", number(options.hidden_size)},
                 {"num_topk", number(options.num_topk)},
                 {"num_ranks", number(options.num_ranks)},
                 {"layout", enum_value(option_text(options.layout))},
                 {"combine_mode", enum_value(option_text(options.combine_mode))},
                 {"dispatch_dtype", enum_value(option_text(options.dispatch_dtype))},
                 {"routing", quoted(options.inputs.empty() ? options.routing : options.inputs)},
                 {"seed", number(options.seed)},
                 {"num_blocks", array(blocks)}});
}

std::string settings_json(const Options& options) {
  return object({{"warmup", number(options.warmup)},
                 {"iters", number(options.iters)},
                 {"rounds", number(options.rounds)},
                 {"threads", truth(!options.mpi)},
                 {"validate", truth(options.validate)},
                 {"timeout_s", number(options.timeout_s)},
                 {"device", quoted(options.backend == DeviceType::CUDA ? "cuda" : "cpu")},
                 {"cuda_graph", truth(options.cuda_graph)},
                 {"iters_per_graph", number(options.iters_per_graph)},
                 {"kernel_rows", "false"},
                 {"host_rows", "true"}});
}

// What the figures were measured on: no host name, no user, no path.
std::string machine_json() {
  utsname system{};
  ::uname(&system);
  const std::string release = system.release;  // major.minor.patch of it
  std::string cpu = system.machine;
  std::ifstream facts("/proc/cpuinfo");
  for (std::string line; std::getline(facts, line);) {
    if (!line.starts_with("model name")) continue;
    cpu = line.substr(line.find(':') + 2);
    break;
  }
  double load = 0.0;
  ::getloadavg(&load, 1);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return object({{"cpu", quoted(cpu)},
                 {"architecture", quoted(system.machine)},
                 {"usable_cores", number(static_cast<int>(std::thread::hardware_concurrency()))},
                 {"logical_cpus", number(static_cast<int>(::sysconf(_SC_NPROCESSORS_CONF)))},
                 {"memory_gib", number(std::round(memory / 0x1p30 * 10) / 10)},
                 {"kernel", quoted(std::string(system.sysname) + " " +
                                   release.substr(0, release.find_first_not_of("0123456789.")))},
                 {"load_average_1min", number(std::round(load * 100) / 100)}});
}

std::string samples_json(const Result& result) {
  Members phases;
  for (const std::string& phase : phases_of(result)) {
    std::vector<std::string> ranks;
    for (const RankTimes& rank : result.ranks) {
      std::vector<std::string> values;
      for (const std::int64_t value : rank.at(phase)) values.push_back(std::to_string(value));
      ranks.push_back(array(values));
    }
    phases.emplace_back(phase, array(ranks));
  }
  return object(phases);
}

std::string phases_json(const Result& result) {
  Members phases;
  for (const std::string& phase : phases_of(result)) {
    const Figures figures = summarize(result, phase);
    phases.emplace_back(phase, object({{"min_us", number(figures.min_us)},
                                       {"median_us", number(figures.median_us)},
                                       {"p99_us", number(figures.p99_us)},
                                       {"max_us", number(figures.max_us)},
                                       {"fastest_rank_us", number(figures.fastest_rank_us)},
                                       {"gb_per_s", number(figures.gb_per_s)},
                                       {"spread", number(figures.spread)},
                                       {"ratio_to", "{}"}}));
  }
  return object(phases);
}

std::string date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[40];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S+00:00", &utc);
  return text;
}

}  // namespace

std::string json(const Result& result) {
  const bool ok = result.failure.empty();
  std::vector<std::string> command;
  for (const std::string& word : result.command) command.push_back(quoted(word));
  const std::string lib = object({{"lib", quoted("expertwire-cpp")},
                                  {"status", quoted(ok ? "ok" : "failed")},
                                  {"reason", quoted(result.failure)},
                                  {"notes", quoted(notes(result.options))},
                                  {"samples", ok ? samples_json(result) : "null"},
                                  {"phases", ok ? phases_json(result) : "{}"},
                                  {"missing", "{}"}});
  const std::string run = object({{"problem", problem_json(result.options)},
                                  {"bytes_per_rank", number(result.bytes_per_rank)},
                                  {"results", array({lib})}});
  return object({{"schema", quoted("expertwire-bench/1")},
                 {"command", array(command)},
                 {"date", quoted(date())},
                 {"machine", machine_json()},
                 {"versions", object({{"expertwire", quoted(std::string(kVersion))}})},
                 {"settings", settings_json(result.options)},
                 {"runs", array({run})}}) +
         "\n";
}

}  // namespace expertwire::bench
