// Row operations for x86-64 with AVX2. Build with -mavx2; nothing but rows.cc may refer to this file.
#include "backend/cpu/rows_impl.hpp"

#if !defined(__AVX2__) || defined(__AVX512F__)
#error "rows_avx2.cc: compile with -mavx2 and nothing above"
#endif

namespace expertwire::cpu {

extern constinit const RowOps kAvx2Rows = {"avx2", reduce, quantize, copy};

}  // namespace expertwire::cpu
