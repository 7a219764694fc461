"""The libraries that ``--ep-lib`` knows, by name."""

from __future__ import annotations

from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.adapters.expertwire import Expertwire
from expertwire.bench.adapters.floor import Floor
from expertwire.bench.adapters.torch_a2a import TorchAllToAll
from expertwire.errors import InvalidArgumentError

__all__ = ["ADAPTERS", "NOT_HERE", "Adapter", "RankContext", "parse_libs"]

ADAPTERS: dict[str, type[Adapter]] = {adapter.name: adapter for adapter in (Expertwire, TorchAllToAll, Floor)}

#: Libraries that this version knows by name alone, and why they have no figures.
NOT_HERE: dict[str, str] = {
    "expertwire-cpp": "not supported in this version: the benchmark program without Python is not part of it",
    "nccl-ep": "not supported in this version on the CPU: needs NVIDIA GPUs",
    "deepep": "not supported in this version on the CPU: needs NVIDIA GPUs",
    "mscclpp": "not supported in this version on the CPU: needs NVIDIA GPUs",
    "flashinfer": "not supported in this version on the CPU: needs NVIDIA GPUs",
}


def parse_libs(text: str) -> list[str]:
    """Return the library names of ``LIB[,LIB...]`` without repeats. Raises InvalidArgumentError for an unknown name."""
    known = [*ADAPTERS, *NOT_HERE]
    names = [name.strip() for name in text.split(",")]
    if "all" in names:
        return known
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"--ep-lib {name!r}: must be among {', '.join(known)}, all")
    return list(dict.fromkeys(names))
