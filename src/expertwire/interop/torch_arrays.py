"""torch tensors in CPU memory. The only module of the package, the torch group aside, that imports torch."""

from __future__ import annotations

import numpy as np
import torch

from expertwire.interop.arrays import ITEM_BYTES, ArrayAdapter, ArrayFacts, check
from expertwire.types import Array

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchAdapter(ArrayAdapter):
    """``torch.Tensor`` and its subclasses. Calls are outside autograd: outputs never require gradients."""

    framework = "torch"

    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes; a ``torch.Size`` is a tuple."""
        shape: tuple[int, ...] = array.shape
        return shape

    def dtype(self, array: Array) -> str:
        """Name of the dtype without ``torch.``."""
        return _NAMES.get(array.dtype) or str(array.dtype).removeprefix("torch.")

    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """See ArrayAdapter."""
        good = array.is_cpu and array.dtype is DTYPES[dtype] and array.shape == shape and array.is_contiguous()
        address: int = array.data_ptr() if good else 1
        if address % ITEM_BYTES[dtype]:
            facts = self._facts(array)
            check(facts, name, dtype, shape, writable)
            address = facts.address
        return address

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new tensor."""
        return torch.empty(shape, dtype=DTYPES[dtype])

    def over(self, memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """A tensor over ``memory``. NumPy knows no bfloat16 that torch would take, hence the way through bytes."""
        if memory.size == 0:
            return self.empty(shape, dtype)
        return torch.from_numpy(memory.view(np.uint8)).view(DTYPES[dtype]).view(shape)

    def _facts(self, array: Array) -> ArrayFacts:
        strided = array.layout is torch.strided
        on_cpu = array.device.type == "cpu"
        return ArrayFacts(
            dtype=self.dtype(array),
            shape=tuple(array.shape),
            device="cpu" if on_cpu else str(array.device),
            contiguous=strided and array.is_contiguous(),
            writable=True,
            address=array.data_ptr() if strided and on_cpu else 0,
        )
