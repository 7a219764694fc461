// Epochs: the numbers by which ranks tell one operation from the next. They go round, leaving out 0, which no operation has.
//
// A communicator begins two operations before its last epoch, so that everything that uses one crosses the wrap. Beginning
// at 1, none would but after days of service.
#pragma once

#include "platform.cuh"

namespace expertwire {

struct Epochs {
  u32 last;  // a multiple of the numbers of buffers, so that these alternate across the wrap, too

  EW_HOST_DEVICE constexpr u32 before_first() const { return last - 2; }
  EW_HOST_DEVICE constexpr u32 after(u32 epoch) const { return epoch == last ? 1u : epoch + 1u; }
  // For people: which operation of its kind on its lane, from 1.
  EW_HOST_DEVICE constexpr u32 number(u32 epoch) const {
    return epoch > before_first() ? epoch - before_first() : epoch + 2;
  }
};

}  // namespace expertwire
