// Row operations for what every processor of the architecture has: SSE2 on x86-64, NEON on AArch64.
#include "backend/cpu/rows_impl.hpp"

namespace expertwire::cpu {

#if defined(__aarch64__)
extern constinit const RowOps kPlainRows = {"neon", reduce, quantize, copy, copy_streaming};
#else
extern constinit const RowOps kPlainRows = {"plain", reduce, quantize, copy, copy_streaming};
#endif

}  // namespace expertwire::cpu
