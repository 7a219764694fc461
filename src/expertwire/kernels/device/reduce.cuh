// Eight float32 sums for one word of BF16 rows. Product and sum are each rounded: docs/numerics.md.
#pragma once

#include "ptx.cuh"

namespace expertwire {

struct Sum {
  float s[8] = {0, 0, 0, 0, 0, 0, 0, 0};

  __device__ void add_product(float w, Word v) {
    s[0] = expertwire::add_product(s[0], w, bf16_low(v.x));
    s[1] = expertwire::add_product(s[1], w, bf16_high(v.x));
    s[2] = expertwire::add_product(s[2], w, bf16_low(v.y));
    s[3] = expertwire::add_product(s[3], w, bf16_high(v.y));
    s[4] = expertwire::add_product(s[4], w, bf16_low(v.z));
    s[5] = expertwire::add_product(s[5], w, bf16_high(v.z));
    s[6] = expertwire::add_product(s[6], w, bf16_low(v.w));
    s[7] = expertwire::add_product(s[7], w, bf16_high(v.w));
  }
  __device__ void add(Word v) {
    s[0] = __fadd_rn(s[0], bf16_low(v.x));
    s[1] = __fadd_rn(s[1], bf16_high(v.x));
    s[2] = __fadd_rn(s[2], bf16_low(v.y));
    s[3] = __fadd_rn(s[3], bf16_high(v.y));
    s[4] = __fadd_rn(s[4], bf16_low(v.z));
    s[5] = __fadd_rn(s[5], bf16_high(v.z));
    s[6] = __fadd_rn(s[6], bf16_low(v.w));
    s[7] = __fadd_rn(s[7], bf16_high(v.w));
  }
  __device__ Word round() const {
    return Word{to_bf16_pair(s[0], s[1]), to_bf16_pair(s[2], s[3]), to_bf16_pair(s[4], s[5]), to_bf16_pair(s[6], s[7])};
  }
};

}  // namespace expertwire
