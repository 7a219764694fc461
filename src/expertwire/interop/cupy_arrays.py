"""CuPy arrays on CUDA.

CuPy calculates with bfloat16 from version 14 on, that of ml_dtypes, and not with FP8. What it cannot calculate with
comes out as unsigned integers of the same size: uint8 for float8_e4m3fn, and before version 14 uint16 for bfloat16.
Going in, the integers and the dtypes of ml_dtypes are both taken, in every version.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import cupy
import ml_dtypes
import numpy as np

from expertwire.interop.arrays import ArrayAdapter, ArrayFacts, check, num_bytes
from expertwire.types import Array

_FIRST_WITH_BFLOAT16 = 14
_NAMES = {
    np.dtype(np.uint16): "bfloat16",
    np.dtype(np.uint8): "float8_e4m3fn",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
    np.dtype(np.float32): "float32",
    np.dtype(np.int32): "int32",
    np.dtype(np.int64): "int64",
}


class CupyAdapter(ArrayAdapter):
    """``cupy.ndarray`` and its subclasses."""

    framework = "cupy"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._index = int(device.removeprefix("cuda:"))
        has_bfloat16 = int(cupy.__version__.partition(".")[0]) >= _FIRST_WITH_BFLOAT16
        self._dtypes = {
            "bfloat16": np.dtype(ml_dtypes.bfloat16 if has_bfloat16 else np.uint16),
            "float8_e4m3fn": np.dtype(np.uint8),
            "float32": np.dtype(np.float32),
            "int32": np.dtype(np.int32),
        }

    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes."""
        shape: tuple[int, ...] = array.shape
        return shape

    def dtype(self, array: Array) -> str:
        """Name of the dtype, or of the one that it stands for."""
        dtype: np.dtype[np.generic] = array.dtype
        return _NAMES.get(dtype) or dtype.name

    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """See ArrayAdapter. CuPy arrays may be written always."""
        pointer = array.data
        facts = ArrayFacts(
            dtype=self.dtype(array),
            shape=array.shape,
            device=f"cuda:{pointer.device_id}",
            contiguous=array.flags.c_contiguous,
            writable=True,
            address=pointer.ptr,
        )
        if array.size == 0:  # memory of no size may say that it is of any device
            facts = replace(facts, device=self.device)
        check(facts, name, dtype, shape, writable, self.device)
        return facts.address

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Array:
        """A new array. Its memory belongs to the stream, as with torch."""
        with cupy.cuda.Device(self._index), contextlib.nullcontext() if stream is None else _current(stream):
            return cupy.empty(shape, self._dtypes[dtype])

    def over(self, memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """An array over ``memory``."""
        if num_bytes(shape, dtype) == 0:
            return self.empty(shape, dtype)
        held = cupy.cuda.UnownedMemory(memory.address, memory.num_bytes, memory, self._index)
        return cupy.ndarray(shape, self._dtypes[dtype], memptr=cupy.cuda.MemoryPointer(held, 0))

    def current_stream(self) -> object:
        """See ArrayAdapter. CuPy's streams end with their objects."""
        stream: object = cupy.cuda.get_current_stream(self._index)
        return stream


@dataclass(frozen=True)
class _Stream:
    """A stream in the form in which libraries hand each other theirs."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _current(stream: int) -> Array:
    """Makes a stream CuPy's current one while the result is entered."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # from version 14 on, where the other way is deprecated
        return cupy.cuda.Stream.from_external(_Stream(stream))
    return cupy.cuda.ExternalStream(stream)
