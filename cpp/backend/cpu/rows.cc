// Chooses among the instruction sets at run time.
#include "backend/cpu/rows.hpp"

#include <string>

#include "base/env.hpp"
#include "expertwire/error.hpp"

namespace expertwire::cpu {

extern const RowOps kPlainRows;
#if defined(__x86_64__)
extern const RowOps kAvx2Rows;
extern const RowOps kAvx512Rows;
#endif

namespace {

const RowOps& choose_row_ops(const std::string& wanted) {
  const std::vector<const RowOps*> available = all_row_ops();
  if (wanted == "auto") return *available.back();
  if (wanted == "plain") return *available.front();
  std::string names = "auto, plain";
  for (const RowOps* ops : available) {
    if (ops->name == wanted) return *ops;
    if (ops->name != "plain") names += ", " + std::string(ops->name);
  }
  throw Error(ErrorCode::Unsupported,
              "EXPERTWIRE_CPU_ISA = " + wanted + ": this build on this processor can run " + names);
}

}  // namespace

std::vector<const RowOps*> all_row_ops() {
  std::vector<const RowOps*> available = {&kPlainRows};
#if defined(__x86_64__)
  // These also ask the operating system whether it saves the wide registers.
  if (__builtin_cpu_supports("avx2")) available.push_back(&kAvx2Rows);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    available.push_back(&kAvx512Rows);
#endif
  return available;
}

const RowOps& row_ops() {
  static const RowOps& chosen = choose_row_ops(env().cpu_isa);
  return chosen;
}

}  // namespace expertwire::cpu
