"""Arrays of any other framework that exports CPU memory through DLPack, such as JAX. What comes out is NumPy."""

from __future__ import annotations

from expertwire._core import DlpackArray
from expertwire.interop.arrays import ArrayFacts, check, refuse
from expertwire.interop.numpy_arrays import NumpyAdapter
from expertwire.types import Array

_DLPACK_CPU = 1


class DlpackAdapter(NumpyAdapter):
    """Objects with ``__dlpack__``; the opened array is a :class:`expertwire._core.DlpackArray`."""

    def open(self, array: Array, name: str, writable: bool = False) -> DlpackArray:
        """Takes the array's memory for reading, without a copy unless the framework makes one."""
        what = f"{type(array).__name__} object"
        if writable:
            refuse(name, what, "must be a NumPy array or a torch tensor: others do not say whether they may be written")
        device_type = int(array.__dlpack_device__()[0])
        if device_type != _DLPACK_CPU:
            refuse(name, f"{what} on DLPack device type {device_type}", "must lie in CPU memory")
        opened = DlpackArray.open(array)
        if opened is None:
            refuse(name, what, "does not export its memory through DLPack; pass a NumPy array or a torch tensor")
        return opened

    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes."""
        shape: tuple[int, ...] = array.shape
        return shape

    def dtype(self, array: Array) -> str:
        """Name of the dtype."""
        dtype: str = array.dtype
        return dtype

    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """See ArrayAdapter. Most frameworks export FP8 as uint8, which is taken for float8_e4m3fn."""
        given = self.dtype(array)
        facts = ArrayFacts(
            dtype="float8_e4m3fn" if (given, dtype) == ("uint8", "float8_e4m3fn") else given,
            shape=array.shape,
            device="cpu",
            contiguous=array.contiguous,
            writable=False,
            address=array.address,
        )
        check(facts, name, dtype, shape, writable)
        return facts.address
