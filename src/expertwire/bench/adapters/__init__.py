"""The libraries that ``--ep-lib`` knows, by name."""

from __future__ import annotations

from expertwire.bench.adapters.base import Adapter, Program, RankContext
from expertwire.bench.adapters.deepep import DeepEp
from expertwire.bench.adapters.expertwire import Expertwire
from expertwire.bench.adapters.expertwire_cpp import ExpertwireCpp
from expertwire.bench.adapters.expertwire_gpu import ExpertwireOnGpu
from expertwire.bench.adapters.flashinfer import FlashInfer
from expertwire.bench.adapters.floor import Floor
from expertwire.bench.adapters.floor_gpu import FloorOnGpu
from expertwire.bench.adapters.mscclpp import Mscclpp
from expertwire.bench.adapters.nccl_ep import NcclEp
from expertwire.bench.adapters.peer import Peer
from expertwire.bench.adapters.prebuilt import MscclppCppBench, NcclEpBench
from expertwire.bench.adapters.torch_a2a import TorchAllToAll
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Settings
from expertwire.errors import InvalidArgumentError

__all__ = [
    "ADAPTERS",
    "ON_GPUS",
    "PROGRAMS",
    "Adapter",
    "Program",
    "RankContext",
    "adapter_of",
    "adapters_of_others",
    "notes_of",
    "obstacle",
    "parse_libs",
]


def _by_name(*adapters: type[Adapter]) -> dict[str, type[Adapter]]:
    return {adapter.name: adapter for adapter in adapters}


#: What runs on CPUs.
ADAPTERS = _by_name(Expertwire, TorchAllToAll, Floor)
#: What runs on GPUs.
ON_GPUS = _by_name(ExpertwireOnGpu, NcclEp, DeepEp, Mscclpp, FlashInfer, TorchAllToAll, FloorOnGpu)
#: Libraries that programs of their own measure, on either.
PROGRAMS: dict[str, type[Program]] = {one.name: one for one in (ExpertwireCpp, NcclEpBench, MscclppCppBench)}
#: The order in which ``all`` takes them.
_NAMES = (
    *("expertwire", "expertwire-cpp", "nccl-ep", "nccl-ep-bench", "deepep", "mscclpp", "mscclpp-cpp-bench"),
    *("flashinfer", "torch-a2a", "floor"),
)


def adapters_of_others() -> list[type[Peer]]:
    """Return the adapters of libraries that are not this package's, nor a plain exchange."""
    return [adapter for adapter in ON_GPUS.values() if issubclass(adapter, Peer)]


def adapter_of(lib: str, settings: Settings) -> type[Adapter]:
    """Return the adapter of a library that has no obstacle."""
    return (ON_GPUS if settings.device == "cuda" else ADAPTERS)[lib]


def notes_of(lib: str, settings: Settings) -> str:
    """Return what is timed of a library that has no obstacle, and what is left out."""
    return PROGRAMS[lib].notes if lib in PROGRAMS else adapter_of(lib, settings).notes


def obstacle(lib: str, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> str:
    """Return in one line why a library has no figures for the problem, or an empty string."""
    if lib in PROGRAMS:
        return PROGRAMS[lib].obstacle(problem, settings, nodes)
    if settings.device == "cpu" and lib not in ADAPTERS:
        return "needs NVIDIA GPUs: --device cuda"
    return adapter_of(lib, settings).obstacle(problem, settings)


def parse_libs(text: str) -> list[str]:
    """Return the library names of ``LIB[,LIB...]`` without repeats. Raises InvalidArgumentError for an unknown name."""
    known = dict.fromkeys([*_NAMES, *ADAPTERS, *ON_GPUS, *PROGRAMS])
    names = [name.strip() for name in text.split(",")]
    if "all" in names:
        return list(known)
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"--ep-lib {name!r}: must be among {', '.join(known)}, all")
    return list(dict.fromkeys(names))
