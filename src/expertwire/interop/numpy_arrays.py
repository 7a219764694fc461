"""NumPy arrays, with the dtypes of ml_dtypes for bfloat16 and float8_e4m3fn."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from expertwire._core import buffer_address
from expertwire.interop.arrays import ArrayAdapter, ArrayFacts, check
from expertwire.types import Array

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NumpyAdapter(ArrayAdapter):
    """``numpy.ndarray`` and its subclasses."""

    framework = "numpy"

    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes."""
        shape: tuple[int, ...] = array.shape
        return shape

    def dtype(self, array: Array) -> str:
        """Name of the dtype; one of another byte order is named with it."""
        dtype: np.dtype[np.generic] = array.dtype
        return _NAMES.get(dtype) or (dtype.name if dtype.isnative else f"{dtype.name} of foreign byte order")

    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """See ArrayAdapter."""
        flags = array.flags
        good = array.dtype == DTYPES[dtype] and array.shape == shape and flags.c_contiguous and flags.aligned
        if not good or (writable and not flags.writeable):
            check(self._facts(array), name, dtype, shape, writable)
        return buffer_address(array)

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Array:  # noqa: ARG002
        """A new array."""
        return np.empty(shape, DTYPES[dtype])

    def over(self, memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """A view of ``memory``."""
        return memory.view(DTYPES[dtype]).reshape(shape)

    def _facts(self, array: Array) -> ArrayFacts:
        return ArrayFacts(
            dtype=self.dtype(array),
            shape=array.shape,
            device="cpu",
            contiguous=array.flags.c_contiguous,
            writable=array.flags.writeable,
            address=array.__array_interface__["data"][0],
        )
