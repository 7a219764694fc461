"""A producer on a GPU: a kernel that copies expert rows block by block, in any order, and publishes each."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cuda_driving import settle, to_device
from expertwire.bench.gpu_module import Driver, compile_source

torch = pytest.importorskip("torch")

#: Thread blocks: few, so that they find room beside combines that wait for them.
GRID = (4, 128)
#: How long all of it takes at least: combine is there before the last block is.
WORK_NS = 1_000_000

SOURCE = r"""
struct Params {
  const int4* answer;  // rows as they shall be
  int4* rows;
  int* ready_signal;
  const int* order;  // of words of ready_signal
  long long pause_ns;
  int num_words, words_of_group, rows_of_group, words_of_row, block_size, parts;
};

extern "C" __global__ void produce(const Params p) {
  for (int item = blockIdx.x; item < p.num_words * p.parts; item += gridDim.x) {
    const int word = p.order[item / p.parts], part = item % p.parts;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < p.pause_ns);
    const int first = word % p.words_of_group * p.block_size;
    const int left = p.rows_of_group - first, count = left < p.block_size ? left : p.block_size;
    const long long begin = (word / p.words_of_group * (long long)p.rows_of_group + first) * p.words_of_row;
    for (int i = part * blockDim.x + threadIdx.x; i < count * p.words_of_row; i += p.parts * blockDim.x)
      p.rows[begin + i] = p.answer[begin + i];
    __syncthreads();
    if (threadIdx.x == 0)
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.ready_signal + word) : "memory");
  }
}
"""


class Params(ctypes.Structure):
    """The structure of that name above."""

    _fields_ = [
        ("answer", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("ready_signal", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("pause_ns", ctypes.c_int64),
        ("num_words", ctypes.c_int32),
        ("words_of_group", ctypes.c_int32),
        ("rows_of_group", ctypes.c_int32),
        ("words_of_row", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("parts", ctypes.c_int32),
    ]


@cache
def _image(architecture: str) -> bytes:
    return compile_source(SOURCE, architecture)


class Producer:
    """Makes answers on a stream of its own. It is loaded when this returns: no launch waits for the device.

    Args:
        device: such as ``"cuda:0"``, which is current.
    """

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device
        to_device(np.zeros(1, np.int32), device)  # makes the context current in this thread
        self._driver = Driver()
        architecture = self._driver.architecture(torch.device(device).index)
        self._entry = self._driver.kernel(_image(architecture), "produce")
        self._launch(Params(num_words=0, parts=1))
        self.stream.synchronize()
        self._held: list[Any] = []

    def prepare(
        self, answer: np.ndarray, rows: Any, block: ew.BlockOverlapConfig, seed: int, parts: int = 1, but: int = -1
    ) -> Params:
        """Return what to launch: every block of ``answer`` in random order, each made by ``parts`` thread blocks.

        A word grows by ``parts``. ``but`` is a word that is never published, if there is one.
        """
        *groups, words_of_group = block.ready_signal.shape
        order = np.random.default_rng(seed).permutation(block.ready_signal.numel()).astype(np.int32)
        order = order[order != but]
        on_device = [to_device(array, self._device) for array in (answer, order)]
        settle(self._device)
        self._held = [*on_device, rows, block.ready_signal]
        num_groups = int(np.prod(groups))
        num_rows = answer.shape[0] * answer.shape[1] if groups else answer.shape[0]
        return Params(
            answer=on_device[0].data_ptr(),
            rows=rows.data_ptr(),
            ready_signal=block.ready_signal.data_ptr(),
            order=on_device[1].data_ptr(),
            pause_ns=WORK_NS * GRID[0] // max(len(order) * parts, 1),
            num_words=len(order),
            words_of_group=words_of_group,
            rows_of_group=num_rows // max(num_groups, 1),
            words_of_row=answer.nbytes // max(num_rows, 1) // 16,
            block_size=block.block_size_m,
            parts=parts,
        )

    def start(self, params: Params) -> None:
        """Launch."""
        self._launch(params)

    def _launch(self, params: Params) -> None:
        self._driver.launch(self._entry, GRID, params, self.stream.cuda_stream)
