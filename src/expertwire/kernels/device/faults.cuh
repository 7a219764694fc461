// Mistakes of the caller that only the device can see: told once to the host, which raises at its next call.
#pragma once

#include "wire.cuh"

namespace expertwire {

// By one thread of one block. Host memory is read here, which only a call with a mistake waits for.
__device__ __noinline__ void report_fault(CallFault* out, const CallFault fault) {
  if (*reinterpret_cast<volatile u32*>(&out->kind) != static_cast<u32>(FaultKind::NONE)) return;
  out->lane = fault.lane;
  out->epoch = fault.epoch;
  out->token = fault.token;
  out->k = fault.k;
  out->id = fault.id;
  out->wanted = fault.wanted;
  out->found = fault.found;
  __threadfence_system();
  *reinterpret_cast<volatile u32*>(&out->kind) = static_cast<u32>(fault.kind);
  __threadfence_system();
}

}  // namespace expertwire
