// What differs between g++ and NVRTC: the host/device qualifier and the fixed-width integers. Neither compiler needs an
// include path for this folder's headers, so they can be shipped as source.
#pragma once

#ifdef __CUDACC__
#define EW_HOST_DEVICE __host__ __device__
#else
#define EW_HOST_DEVICE
#endif

namespace expertwire {

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(u16) == 2);

}  // namespace expertwire
