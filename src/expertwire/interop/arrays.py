"""What a communicator asks of an array framework, and the checks that are the same for all of them.

Importing this module imports NumPy and nothing else; an adapter is made when the first array of its framework arrives.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from expertwire.errors import InvalidArgumentError
from expertwire.types import Array, DispatchOutput

#: Bytes of one element, for the dtypes that the API takes and returns. Natural alignment is the same number.
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class ArrayFacts:
    """What an array is, as far as a communicator cares.

    Attributes:
        dtype: name without a framework's prefix, e.g. ``"bfloat16"``.
        shape: sizes.
        device: ``"cpu"``, ``"cuda:3"``, or what else the framework calls it.
        contiguous: row-major without gaps.
        writable: may be written.
        address: of the first element; 0 where it cannot be told.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    contiguous: bool
    writable: bool
    address: int


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a contiguous array."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def shape_text(shape: tuple[int, ...]) -> str:
    """The shape as messages print it: ``[3, 7168]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def refuse(name: str, given: str, allowed: str) -> NoReturn:
    """Raises InvalidArgumentError in the one form that all argument messages have."""
    raise InvalidArgumentError(f"{name} = {given}: {allowed}")


def check(
    facts: ArrayFacts, name: str, dtype: str, shape: tuple[int, ...], writable: bool, device: str = "cpu"
) -> None:
    """Raises InvalidArgumentError for the first thing about an array that is not as an argument must be."""
    what = f"{facts.dtype} {shape_text(facts.shape)} array on {facts.device}"
    if facts.device != device:
        where = "the CPU and takes arrays in CPU memory" if device == "cpu" else f"{device} and takes arrays there"
        refuse(name, what, f"this communicator runs on {where}")
    if facts.dtype != dtype:
        refuse(name, what, f"the dtype must be {dtype}")
    if facts.shape != shape:
        refuse(name, what, f"the shape must be {shape_text(shape)}")
    if not facts.contiguous:
        refuse(name, f"non-contiguous {what}", "must be contiguous (row-major, no gaps)")
    if facts.address % ITEM_BYTES[dtype]:
        refuse(name, f"{what} at address {facts.address:#x}", f"must be aligned to {ITEM_BYTES[dtype]} bytes")
    if writable and not facts.writable:
        refuse(name, f"read-only {what}", "must be writable")


class ArrayAdapter(ABC):
    """Arrays of one framework on one device.

    Attributes:
        framework: whose arrays come out when arrays of this adapter go in: ``"numpy"``, ``"torch"`` or ``"cupy"``.
        device: where a communicator takes and returns arrays: ``"cpu"`` or ``"cuda:3"``.
        plain_type: a type whose instances may be read through DLPack's C functions, if it has them. These do not say
            whether an array may be written, so it is one whose arrays always may.
    """

    framework: str
    plain_type: type | None = None

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def open(self, array: Array, name: str, writable: bool = False) -> Array:  # noqa: ARG002
        """The object on which the other methods work; it must live as long as its address is used."""
        return array

    @abstractmethod
    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes of an opened array."""

    @abstractmethod
    def dtype(self, array: Array) -> str:
        """Name of the dtype of an opened array, without the framework's prefix."""

    @abstractmethod
    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """Address of an opened array that is as asked; otherwise InvalidArgumentError names the argument ``name``."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Array:
        """A new array on the device, contents unspecified, for use on a CUDA stream; ``None``: the current one."""

    def renew(self, output: DispatchOutput) -> DispatchOutput:
        """What a dispatch returns of the lane's arrays: these, where a framework keeps no state with an array."""
        return output

    @abstractmethod
    def over(self, memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """An array over ``memory``, which it keeps alive and which has exactly the bytes needed.

        Args:
            memory: NumPy uint8 on the CPU, a :class:`expertwire.interop.cuda.DeviceMemory` on CUDA.
            shape: of the array.
            dtype: name of its dtype.
        """

    def current_stream(self) -> object:
        """The stream on which the framework works on the device now, or its address if it lives for ever; CUDA only."""
        raise NotImplementedError


def make_adapter(array: Array, name: str, device: str = "cpu") -> ArrayAdapter:
    """The adapter for arrays like this one. Raises InvalidArgumentError naming ``name`` if there is none."""
    if _is_a(array, "torch", "Tensor"):  # whoever holds a tensor has imported torch
        return adapter_of("torch", device)
    if device != "cpu":
        if _is_a(array, "cupy", "ndarray"):
            return adapter_of("cupy", device)
        allowed = f"must be a torch tensor or a CuPy array on {device}, where this communicator runs"
        return refuse(name, f"{type(array).__name__} object", allowed)
    if isinstance(array, np.ndarray):
        return adapter_of("numpy")
    if not isinstance(array, type) and hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        from expertwire.interop.dlpack_arrays import DlpackAdapter

        return DlpackAdapter()
    return refuse(name, f"{type(array).__name__} object", "must be a NumPy array, a torch tensor or support DLPack")


def adapter_of(framework: str, device: str = "cpu") -> ArrayAdapter:
    """The adapter of a framework by name. Raises InvalidArgumentError for one that has no arrays on the device."""
    if framework == "torch":
        from expertwire.interop.torch_arrays import TorchAdapter

        return TorchAdapter(device)
    if framework == "numpy" and device == "cpu":
        from expertwire.interop.numpy_arrays import NumpyAdapter

        return NumpyAdapter()
    if framework == "cupy" and device != "cpu":
        from expertwire.interop.cupy_arrays import CupyAdapter

        return CupyAdapter(device)
    names = '"numpy" or "torch"' if device == "cpu" else '"torch" or "cupy"'
    return refuse("framework", repr(framework), f"must be {names} on {device}, where this communicator runs")


def _is_a(array: Array, module: str, name: str) -> bool:
    framework = sys.modules.get(module)
    return framework is not None and isinstance(array, getattr(framework, name))
