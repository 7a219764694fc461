"""expertwire: expert-parallel dispatch and combine for Mixture-of-Experts models.

Importing the package does no work: what needs NumPy or the C++ core is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from expertwire.errors import (
    BackendError,
    Error,
    HandleError,
    InvalidArgumentError,
    PeerLostError,
    UnsupportedError,
)
from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchLayoutInfo,
    DispatchOutput,
    MoECommunicatorConfig,
    MoEMemoryBytes,
    MoEMode,
    MoEStats,
    PeerLossPolicy,
    QuantConfig,
    ScaleFormat,
    ScaleLayout,
)

__version__: str

if TYPE_CHECKING:
    from expertwire._core import DispatchHandle
    from expertwire.communicator import MoECommunicator
    from expertwire.groups import Group, local_group, spawn
    from expertwire.overlap import BlockOverlapConfig, OperationOverlapConfig, OverlapConfig
    from expertwire.placement import place_experts
    from expertwire.requests import MoERequest

_LAZY = {
    "DispatchHandle": "expertwire._core",
    "Group": "expertwire.groups",
    "MoECommunicator": "expertwire.communicator",
    "MoERequest": "expertwire.requests",
    "BlockOverlapConfig": "expertwire.overlap",
    "OperationOverlapConfig": "expertwire.overlap",
    "OverlapConfig": "expertwire.overlap",
    "local_group": "expertwire.groups",
    "place_experts": "expertwire.placement",
    "spawn": "expertwire.groups",
}

__all__ = [
    "BackendError",
    "BlockOverlapConfig",
    "CombineMode",
    "DispatchDataType",
    "DispatchHandle",
    "DispatchLayout",
    "DispatchLayoutInfo",
    "DispatchOutput",
    "Error",
    "Group",
    "HandleError",
    "InvalidArgumentError",
    "MoECommunicator",
    "MoECommunicatorConfig",
    "MoEMemoryBytes",
    "MoEMode",
    "MoERequest",
    "MoEStats",
    "OperationOverlapConfig",
    "OverlapConfig",
    "PeerLossPolicy",
    "PeerLostError",
    "QuantConfig",
    "ScaleFormat",
    "ScaleLayout",
    "UnsupportedError",
    "__version__",
    "local_group",
    "place_experts",
    "spawn",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        version: str = importlib.import_module("expertwire._core").version()
        return version
    if name in _LAZY:
        value: object = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'expertwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
