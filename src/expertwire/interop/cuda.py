"""CUDA as array frameworks see it: which device and stream are current, and memory of a GPU that others may wrap.

None of this calls CUDA. Frameworks are asked if they are loaded, and never loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from expertwire import _core
from expertwire.interop.arrays import refuse

_STREAMS = "must be None, an address, a torch.cuda.Stream, a CuPy stream or an object with __cuda_stream__"


class DeviceMemory:
    """Bytes in the memory of a GPU, offered to array frameworks through ``__cuda_array_interface__``.

    A framework keeps this object for as long as an array over the bytes lives, and this object keeps their owner.

    Attributes:
        owner: what the memory goes with.
        address: of the first byte.
        num_bytes: how many there are.
    """

    def __init__(self, owner: object, address: int, num_bytes: int) -> None:
        self.owner = owner
        self.address = address
        self.num_bytes = num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; no stream, since whoever takes the bytes need not wait for anything."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


def current_device() -> int:
    """Index of the device that torch works on in this thread, if it has begun to, else CuPy's, else 0."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.cuda.is_available():
        return int(cupy.cuda.runtime.getDevice())
    return 0


def current_stream(device: str) -> object:
    """Torch's current stream of ``device`` in this thread, if torch works on GPUs, else CuPy's, else the default."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        stream: object = torch.cuda.current_stream(device)
        return stream
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.cuda.is_available():
        return cupy.cuda.get_current_stream(int(device.removeprefix("cuda:")))
    return 0


class HeldStreams:
    """Streams of one communicator that must live, for its next call on another one comes back to the last.

    Held are the last stream that was used, if it was given as an object, and those that calls have named since.

    Args:
        device: whose streams they are.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._held: list[object] = []

    def address(self, stream: object) -> int:
        """Address of a stream, which is held from now on. Raises InvalidArgumentError, as :func:`stream_address`."""
        address = stream_address(stream, self._device)
        if not isinstance(stream, int) and not (self._held and self._held[-1] is stream):
            self._held.append(stream)
        return address

    def used(self) -> None:
        """The last one has been used: the others may go. Not so in a capture, after which the core looks back."""
        if len(self._held) > 1 and not _core.is_stream_capturing(stream_address(self._held[-1], self._device)):
            del self._held[:-1]


def stream_address(stream: object, device: str) -> int:
    """Address of a stream of ``device``.

    Raises:
        InvalidArgumentError: it is no stream, or one of another device.
    """
    where = _device_of(stream)
    if where not in ("", device):
        refuse("stream", f"{type(stream).__name__} of {where}", f"must be of {device}, where this communicator runs")
    address = _address_of(stream)
    if not isinstance(address, int) or isinstance(address, bool):
        refuse("stream", f"{type(stream).__name__} object", _STREAMS)
    if address < 0:
        refuse("stream", str(address), _STREAMS)
    return address


def event_address(event: Any) -> int:
    """Address of a CUDA event that has been recorded. Raises InvalidArgumentError."""
    address = event
    if _is_of(event, "torch"):
        address = getattr(event, "cuda_event", None)
    elif _is_of(event, "cupy"):
        address = getattr(event, "ptr", None)
    if not isinstance(address, int) or isinstance(address, bool) or address <= 0:
        allowed = "must be None, an address, or a torch.cuda.Event or CuPy event that has been recorded"
        refuse("wait_event", f"{type(event).__name__} object", allowed)
    return address


def _address_of(stream: Any) -> object:
    if isinstance(stream, int):
        return stream
    if _is_of(stream, "torch"):
        return getattr(stream, "cuda_stream", None)
    protocol = None if isinstance(stream, type) else getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol  # (version of the protocol, address)
        return pair[1]
    return stream.ptr if _is_of(stream, "cupy") and hasattr(stream, "device_id") else None


def _device_of(stream: Any) -> str:
    """``"cuda:3"``, or nothing where a stream does not say."""
    if _is_of(stream, "torch"):
        return str(getattr(stream, "device", ""))
    index = getattr(stream, "device_id", -1) if _is_of(stream, "cupy") else -1
    return f"cuda:{index}" if index >= 0 else ""


def _is_of(thing: object, module: str) -> bool:
    return type(thing).__module__.partition(".")[0] == module
