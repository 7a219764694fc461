// Row operations for what every processor of the architecture has: SSE2 on x86-64, NEON on AArch64.
#include "backend/cpu/rows_impl.hpp"

namespace expertwire::cpu {

#if defined(__aarch64__)
extern constinit const RowOps kPlainRows = {"neon", reduce, quantize, copy};
#else
extern constinit const RowOps kPlainRows = {"plain", reduce, quantize, copy};
#endif

}  // namespace expertwire::cpu
