#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <utility>

namespace expertwire::bench {
namespace {

template <typename T>
using Choices = std::vector<std::pair<std::string, T>>;

const Choices<DispatchLayout> kLayouts{{"expert-major", DispatchLayout::EXPERT_MAJOR},
                                       {"rank-major", DispatchLayout::RANK_MAJOR}};
const Choices<CombineMode> kCombineModes{{"rank-local-reduce", CombineMode::RANK_LOCAL_REDUCE},
                                         {"direct-send", CombineMode::DIRECT_SEND}};
const Choices<DispatchDataType> kDataTypes{
    {"bf16", DispatchDataType::BF16}, {"fp8-e4m3", DispatchDataType::FP8_E4M3}, {"mxfp8", DispatchDataType::MXFP8}};
const Choices<DeviceType> kBackends{{"cpu", DeviceType::CPU}, {"cuda", DeviceType::CUDA}};
const Choices<std::string> kRoutings{{"uniform", "uniform"}};

// What parsing fills in. Options that mean different things together are settled at the end.
struct Parsed {
  Options options;
  std::optional<bool> cuda_graph;
  std::optional<std::string> iters_per_graph, num_blocks, ranks;
};

struct Option {
  std::vector<std::string> names;
  std::string value;  // how help names it; empty: the option takes none
  std::string help;
  std::function<void(Parsed&, const std::string& name, const std::string& value)> apply;
};

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& allowed) {
  throw UsageError(name + " " + value + ": " + allowed);
}

template <typename T>
T number(const std::string& name, const std::string& value, T least, T most) {
  T result{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error == std::errc() && end == value.data() + value.size() && result >= least && result <= most) return result;
  if constexpr (std::is_integral_v<T>)
    refuse(name, value, "must be a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  refuse(name, value, "must be a number above 0 and at most 1e6");
}

int at_least(int least, const std::string& name, const std::string& value, int most = 1 << 20) {
  return number<int>(name, value, least, most);
}

template <typename T>
std::string listed(const Choices<T>& choices) {
  std::string text;
  for (const auto& [word, meaning] : choices) text += (text.empty() ? "" : ", ") + word;
  return text;
}

template <typename T>
T choice(const Choices<T>& choices, const std::string& name, std::string value) {
  std::string word = value;
  std::transform(word.begin(), word.end(), word.begin(), [](char c) {
    return c == '_' ? '-' : (c >= 'A' && c <= 'Z') ? static_cast<char>(c - 'A' + 'a') : c;
  });
  for (const auto& [known, meaning] : choices) {
    if (known == word) return meaning;
  }
  refuse(name, value, "must be " + std::string(choices.size() > 1 ? "among " : "") + listed(choices));
}

template <typename T>
std::string word_of(const Choices<T>& choices, T meaning) {
  return std::find_if(choices.begin(), choices.end(), [&](const auto& one) { return one.second == meaning; })->first;
}

Option integer(std::vector<std::string> names, const std::string& help, int Options::* field, int least = 1) {
  const std::string standard = std::to_string(Options{}.*field);
  return {std::move(names), "N", help + " [" + standard + "]",
          [field, least](Parsed& parsed, const std::string& name, const std::string& value) {
            parsed.options.*field = at_least(least, name, value);
          }};
}

template <typename T>
Option one_of(const std::string& name, const Choices<T>& choices, T Options::* field) {
  return {{name},
          "NAME",
          listed(choices) + " [" + choices.front().first + "]",
          [&choices, field](Parsed& parsed, const std::string& given, const std::string& value) {
            parsed.options.*field = choice(choices, given, value);
          }};
}

Option text(const std::string& name, const std::string& value, const std::string& help, std::string Options::* field) {
  return {{name}, value, help, [field](Parsed& parsed, const std::string& given, const std::string& word) {
            if (word.empty()) refuse(given, "''", "must be a path");
            parsed.options.*field = word;
          }};
}

Option flag(std::vector<std::string> names, const std::string& help, std::function<void(Parsed&)> apply) {
  return {std::move(names), "", help,
          [apply = std::move(apply)](Parsed& parsed, const std::string&, const std::string&) { apply(parsed); }};
}

std::vector<Option> shape_options() {
  return {integer({"-e", "--experts"}, "experts of all ranks", &Options::num_experts),
          integer({"-t", "--tokens"}, "tokens of a rank", &Options::num_tokens),
          integer({"-d", "--hidden"}, "elements of a row", &Options::hidden_size),
          integer({"-k", "--topk"}, "experts of a token", &Options::num_topk),
          {{"--ranks"},
           "N",
           "ranks, a thread each [2]",
           [](Parsed& parsed, const std::string& name, const std::string& value) {
             parsed.options.num_ranks = at_least(1, name, value, 1024);
             parsed.ranks = value;
           }},
          one_of("--layout", kLayouts, &Options::layout),
          one_of("--combine-mode", kCombineModes, &Options::combine_mode),
          one_of("--dispatch-dtype", kDataTypes, &Options::dispatch_dtype),
          one_of("--routing", kRoutings, &Options::routing),
          integer({"--seed"}, "of tokens, routing and weights", &Options::seed, 0),
          text("--inputs", "FOLDER",
               "take them from its files RANK.x (BF16 [T, H]), RANK.topk_ids (int64 [T, K]) and RANK.weights "
               "(float32 [T, K]), raw and little-endian, instead of drawing them",
               &Options::inputs)};
}

std::vector<Option> method_options() {
  return {integer({"-w", "--warmup"}, "untimed pairs", &Options::warmup, 0),
          integer({"-i", "--iters"}, "timed pairs, or timed replays of the graph", &Options::iters),
          integer({"--rounds"}, "parts of these, whose medians show the spread", &Options::rounds),
          one_of("--backend", kBackends, &Options::backend),
          flag({"--cuda-graph"}, "replay a captured graph of pairs [with --backend cuda]",
               [](Parsed& parsed) { parsed.cuda_graph = true; }),
          flag({"--no-cuda-graph"}, "launch each operation, and time both phases",
               [](Parsed& parsed) { parsed.cuda_graph = false; }),
          {{"--iters-per-graph"},
           "N",
           "pairs in the graph [50]",
           [](Parsed& parsed, const std::string& name, const std::string& value) {
             parsed.options.iters_per_graph = at_least(1, name, value, 10000);
             parsed.iters_per_graph = value;
           }},
          {{"--num-blocks"},
           "N[,N]",
           "blocks of the CUDA kernels of dispatch and combine [the library chooses]",
           [](Parsed& parsed, const std::string& name, const std::string& value) {
             const std::size_t comma = value.find(',');
             parsed.options.dispatch_num_blocks = at_least(1, name, value.substr(0, comma));
             parsed.options.combine_num_blocks = comma == std::string::npos
                                                     ? parsed.options.dispatch_num_blocks
                                                     : at_least(1, name, value.substr(comma + 1));
             parsed.num_blocks = value;
           }},
          flag({"--validate"}, "check every timed pair, on CUDA every round, not only the first and the last",
               [](Parsed& parsed) { parsed.options.validate = true; }),
          text("--nvrtc-dir", "FOLDER", "look for the CUDA compiler library there, too", &Options::nvrtc_dir),
          flag({"--mpi"}, "ranks are the processes that mpirun has started",
               [](Parsed& parsed) { parsed.options.mpi = true; }),
          {{"--timeout"},
           "S",
           "longest wait for a rank, seconds [100]",
           [](Parsed& parsed, const std::string& name, const std::string& value) {
             parsed.options.timeout_s = number<double>(name, value, 1e-3, 1e6);
           }},
          text("--json", "FILE", "write every sample to this file", &Options::json),
          flag({"--version"}, "print the version", [](Parsed& parsed) { parsed.options.version = true; }),
          flag({"-h", "--help"}, "print this", [](Parsed& parsed) { parsed.options.help = true; })};
}

void apply(Parsed& parsed, const std::vector<Option>& known, const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& given = arguments[i];
    const std::size_t equals = given.starts_with("--") ? given.find('=') : std::string::npos;
    const std::string name = given.substr(0, equals);
    const auto option = std::find_if(known.begin(), known.end(), [&](const Option& one) {
      return std::find(one.names.begin(), one.names.end(), name) != one.names.end();
    });
    if (option == known.end()) throw UsageError("'" + given + "' is no option; --help lists them");
    if (option->value.empty() && equals != std::string::npos) throw UsageError(name + ": takes no value");
    if (option->value.empty()) {
      option->apply(parsed, name, "");
    } else if (equals != std::string::npos) {
      option->apply(parsed, name, given.substr(equals + 1));
    } else if (++i < arguments.size()) {
      option->apply(parsed, name, arguments[i]);
    } else {
      throw UsageError(name + ": needs a value");
    }
  }
}

Options settled(const Parsed& parsed) {
  Options options = parsed.options;
  const bool cuda = options.backend == DeviceType::CUDA;
  if (!cuda && parsed.cuda_graph) throw UsageError("--cuda-graph, --no-cuda-graph: need --backend cuda");
  if (!cuda && parsed.num_blocks) refuse("--num-blocks", *parsed.num_blocks, "needs --backend cuda");
  if (options.mpi && parsed.ranks) refuse("--ranks", *parsed.ranks, "not with --mpi: mpirun -n says how many");
  options.cuda_graph = cuda && parsed.cuda_graph.value_or(true);
  if (!options.cuda_graph && parsed.iters_per_graph)
    refuse("--iters-per-graph", *parsed.iters_per_graph, "needs --backend cuda and a graph");
  return options;
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  std::vector<Option> known = shape_options();
  for (Option& option : method_options()) known.push_back(std::move(option));
  Parsed parsed;
  apply(parsed, known, arguments);
  return settled(parsed);
}

std::string help_text() {
  std::string help =
      "expertwire-bench [options]\n\n"
      "Checks dispatch and combine of the C++ runtime against a plain reference, then times them.\n"
      "Exit status 1: wrong or broken. 2: an option cannot be used.\n";
  for (const auto& [title, options] : {std::pair{"Shape", shape_options()}, std::pair{"Method", method_options()}}) {
    help += std::string("\n") + title + ":\n";
    for (const Option& option : options) {
      std::string left = "  ";
      for (const std::string& name : option.names) left += (left.size() > 2 ? ", " : "") + name;
      if (!option.value.empty()) left += " " + option.value;
      left.resize(std::max<std::size_t>(left.size() + 2, 26), ' ');
      help += left + option.help + "\n";
    }
  }
  return help;
}

RuntimeConfig Options::config() const {
  RuntimeConfig config;
  config.num_experts = num_experts;
  config.hidden_size = hidden_size;
  config.num_topk = num_topk;
  config.max_tokens_per_rank = num_tokens;
  for (int rank = 0; rank < num_ranks; ++rank)
    config.experts_per_rank.push_back(num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0));
  config.output_layout = layout;
  config.combine_mode = combine_mode;
  config.quant.format = dispatch_dtype;
  config.dispatch_num_blocks = dispatch_num_blocks;
  config.combine_num_blocks = combine_num_blocks;
  config.timeout_s = timeout_s;
  return config;
}

std::vector<int> Options::parts() const {
  const int count = std::min(rounds, iters);
  std::vector<int> parts;
  for (int part = 0; part < count; ++part) parts.push_back(iters / count + (part < iters % count ? 1 : 0));
  return parts;
}

std::string option_text(DispatchLayout layout) { return word_of(kLayouts, layout); }
std::string option_text(CombineMode mode) { return word_of(kCombineModes, mode); }
std::string option_text(DispatchDataType format) { return word_of(kDataTypes, format); }

}  // namespace expertwire::bench
