// Row operations for x86-64 with AVX-512. Build with -mavx512f -mavx512bw -mavx512dq -mavx512vl; nothing but rows.cc may
// refer to this file.
#include "backend/cpu/rows_impl.hpp"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "rows_avx512.cc: compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif

namespace expertwire::cpu {

extern constinit const RowOps kAvx512Rows = {"avx512", reduce, quantize, copy};

}  // namespace expertwire::cpu
