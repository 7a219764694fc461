"""From options to problems, and from problems to a report."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from importlib import metadata
from typing import Any, TypeVar

from rich.console import Console

from expertwire.bench.adapters import obstacle
from expertwire.bench.gpus import Gpus, find_gpus
from expertwire.bench.inputs import check_problem
from expertwire.bench.measure import measure_all, num_steps
from expertwire.bench.nodes import Nodes
from expertwire.bench.progress import shown
from expertwire.bench.routing import is_trace, read_trace
from expertwire.bench.schema import Problem, Report, Settings
from expertwire.bench.workloads import WORKLOADS
from expertwire.errors import InvalidArgumentError
from expertwire.machine import describe_machine, describe_versions
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

#: Packages whose versions say which library was measured.
_PACKAGES = {
    "nccl-ep": ("nccl4py", "nccl-extensions", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "deepep": ("deep_ep",),
    "mscclpp": ("mscclpp",),
    "flashinfer": ("flashinfer-python",),
    "torch-a2a": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
_Choice = TypeVar("_Choice", bound=Enum)
_DEFAULT_SHAPE = Problem()
_OPERATIONS = 2
#: The largest size, the most ranks of a host, and how long a wait may be, seconds: as ``expertwire-bench`` has them.
_MOST, _MOST_RANKS = 1 << 20, 1024
_SHORTEST_S, _LONGEST_S = 1e-3, 1e6
_LAYOUTS = [DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR]


@dataclass(frozen=True)
class Sweep:
    """The shape options as given, each a comma list or None; every combination is one problem."""

    experts: str | None = None
    tokens: str | None = None
    hidden: str | None = None
    topk: str | None = None
    ranks: str | None = None
    layout: str = "expert-major"
    combine_mode: str = "rank-local-reduce"
    dispatch_dtype: str = "bf16"
    routing: str = "uniform"
    workload: str | None = None
    seed: int = 1
    num_blocks: str | None = None

    def problems(self, num_nodes: int = 1) -> list[Problem]:
        """Return all combinations, the last named option turning fastest; each node has ``--ranks`` ranks.

        A combination that is named twice, such as by workloads of which every size is given, is there once.

        Raises:
            InvalidArgumentError: a value is not allowed.
        """
        problems = (
            replace(problem, num_ranks=problem.num_ranks * num_nodes)
            for routing in _words(self.routing)
            for shape in self._shapes(routing)
            for problem in self._problems_with_routing(routing, shape)
        )
        return list(dict.fromkeys(problems))

    def _shapes(self, routing: str) -> list[Problem]:
        """Return what options that are left out stand for: one shape, or one for each workload."""
        if self.workload is not None:
            names = WORKLOADS if self.workload == "all" else _words(self.workload)
            return [_shape_of_workload(name) for name in names]
        if is_trace(routing):
            trace = read_trace(routing)
            shape = replace(
                _DEFAULT_SHAPE,
                num_experts=trace.info.num_experts,
                num_topk=trace.topk_ids.shape[2],
                hidden_size=trace.info.hidden_size,
                num_ranks=trace.info.num_ranks,
            )
            return [shape]
        return [_DEFAULT_SHAPE]

    def _problems_with_routing(self, routing: str, shape: Problem) -> list[Problem]:
        axes: dict[str, Sequence[Any]] = {
            "num_experts": _integers("-e", self.experts, shape.num_experts),
            "num_topk": _integers("-k", self.topk, shape.num_topk),
            "hidden_size": _integers("-d", self.hidden, shape.hidden_size),
            "num_ranks": _integers("--ranks", self.ranks, shape.num_ranks, _MOST_RANKS),
            "layout": _choices("--layout", self.layout, _LAYOUTS),
            "combine_mode": _choices("--combine-mode", self.combine_mode, list(CombineMode)),
            "dispatch_dtype": _choices("--dispatch-dtype", self.dispatch_dtype, list(DispatchDataType)),
            "num_blocks": _grids(self.num_blocks),
            "num_tokens": _integers("-t", self.tokens, shape.num_tokens),
        }
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return [Problem(routing=routing, seed=self.seed, **chosen) for chosen in combinations]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _shape_of_workload(name: str) -> Problem:
    if name not in WORKLOADS:
        raise InvalidArgumentError(f"--workload {name!r}: must be among {', '.join(WORKLOADS)}, all")
    named = WORKLOADS[name]
    return Problem(named.num_experts, named.num_tokens, named.hidden_size, named.num_topk)


def _grids(text: str | None) -> list[tuple[int, ...]]:
    """Return the grid sizes of a comma list of N, DISPATCH:COMBINE or ``all``, which is the library's own choice."""
    grids = []
    for word in _words(text or "all"):
        sizes = [] if word == "all" else [_whole(size) for size in word.split(":")]
        if len(sizes) > _OPERATIONS or not all(sizes):
            raise InvalidArgumentError(
                f"--num-blocks {text}: must be N, DISPATCH:COMBINE or all, or a comma list of them; N at most {_MOST}"
            )
        grids.append(tuple(sizes))
    return grids


def _integers(option: str, text: str | None, default: int, most: int = _MOST) -> list[int]:
    values = [default] if text is None else [_whole(word, most) for word in _words(text)]
    if not all(values):
        raise InvalidArgumentError(f"{option} {text}: must be a whole number from 1 to {most}, or a comma list of them")
    return values


def _whole(word: str, most: int = _MOST) -> int:
    """Return a whole number from 1 to ``most``; 0 stands for any other word."""
    try:
        value = int(word)
    except ValueError:
        return 0
    return value if 1 <= value <= most else 0


def _choices(option: str, text: str, members: list[_Choice]) -> list[_Choice]:
    """Return the members named by a comma list; hyphens and underscores are alike."""
    by_name = {member.value: member for member in members}
    names = [word.lower().replace("-", "_") for word in _words(text)]
    for name in names:
        if name not in by_name:
            allowed = ", ".join(value.replace("_", "-") for value in by_name)
            raise InvalidArgumentError(f"{option} {text}: must be among {allowed}")
    return [by_name[name] for name in names]


def parse_device(name: str, gpu_options: dict[str, Any]) -> str:
    """Return the device of ``--device``; ``auto`` is ``cuda`` where that can be measured.

    Raises:
        InvalidArgumentError: there is no such device, or it is the CPU and an option for GPUs is given.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise InvalidArgumentError(f"--device {name}: must be auto, cpu or cuda")
    device = name
    if name == "auto":
        gpus = find_gpus()
        device = "cuda" if gpus.names and not gpus.problem else "cpu"
    if device == "cpu" and (given := [option for option, value in gpu_options.items() if value is not None]):
        raise InvalidArgumentError(f"--{given[0]}: needs NVIDIA GPUs and --device cuda")
    return device


def parse_overlap(name: str | None, libs: list[str], *, cuda_graph: bool, host_rows: bool) -> str:
    """Return what ``--overlap`` names, or an empty string.

    Raises:
        InvalidArgumentError: there is no such work, or other options leave out what it takes.
    """
    if name is None:
        return ""
    if name != "gemm":
        raise InvalidArgumentError(f"--overlap {name}: must be gemm")
    if "expertwire" not in libs:
        raise InvalidArgumentError("--overlap gemm: measures expertwire, which --ep-lib leaves out")
    if not (cuda_graph and host_rows):
        option = "--kernel-only" if cuda_graph else "--no-cuda-graph"
        raise InvalidArgumentError(f"--overlap gemm: times captured graphs, which {option} leaves out")
    return name


@dataclass(frozen=True)
class Request:
    """One benchmark command. ``nodes``: where mpirun starts the ranks; None: processes or threads of this host."""

    libs: list[str]
    problems: list[Problem]
    settings: Settings
    command: tuple[str, ...]
    nodes: Nodes | None = None

    def check(self, gpus: Gpus) -> None:
        """Raise InvalidArgumentError if a problem cannot be, or this machine has not the memory or GPUs for it."""
        if not _SHORTEST_S <= self.settings.timeout_s <= _LONGEST_S:  # false for NaN, too
            raise InvalidArgumentError(
                f"--timeout {self.settings.timeout_s:g}: must be a number of seconds from {_SHORTEST_S:g} to "
                f"{_LONGEST_S:g}"
            )
        for problem in self.problems:
            check_problem(problem)
        if self.settings.device == "cpu":
            if any(problem.num_blocks for problem in self.problems):
                raise InvalidArgumentError("--num-blocks: needs --device cuda")
            return
        if gpus.problem:
            raise InvalidArgumentError(f"--device cuda: {gpus.problem}")
        if self.settings.threads:
            raise InvalidArgumentError("--threads: on GPUs a rank is a process with a GPU of its own")
        most = max(problem.num_ranks for problem in self.problems)
        if most > len(gpus.names):
            raise InvalidArgumentError(
                f"--ranks {most}: this machine shows {len(gpus.names)} GPU(s), and every rank takes one"
            )


def run_request(request: Request, errors: Console) -> Report:
    """Measure every problem, and show on ``errors`` where that is.

    Raises:
        InvalidArgumentError: a problem cannot be, or a routing file not be read; nothing has been measured then.
    """
    settings = request.settings
    gpus = find_gpus() if settings.device == "cuda" else Gpus()
    request.check(gpus)
    if request.nodes is not None:
        request.nodes.check(threads=settings.threads)
    machine = {**describe_machine(), **(gpus.describe() if gpus.names else {})}
    total = sum(num_steps(problem, settings, request.libs) for problem in request.problems)
    with shown(errors, total) as listener:
        runs = measure_all(request.problems, settings, request.libs, listener, request.nodes)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(request.command, date, machine, _versions(request.libs), settings, tuple(runs))


def _versions(libs: list[str]) -> dict[str, str]:
    """Return the versions of what takes part, as far as it is installed."""
    versions = describe_versions()
    for package in (name for lib in libs for name in _PACKAGES.get(lib, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def print_plan(request: Request, console: Console) -> None:
    """Print what would be measured, and measure nothing.

    Raises what :func:`run_request` would before it measures, but goes on for ranks on other hosts.
    """
    settings = request.settings
    request.check(find_gpus() if settings.device == "cuda" else Gpus())
    if request.nodes is not None:
        request.nodes.check(threads=settings.threads, elsewhere=True)
    kind = "threads" if settings.threads else "processes"
    where = "" if settings.device == "cpu" else f", {settings.device}"
    console.print(
        f"{settings.warmup} warm-up and {settings.iters} timed pairs, {settings.rounds} rounds, {kind}{where}"
    )
    if request.nodes is not None:
        plan = request.nodes.plan(max(one.num_ranks for one in request.problems))
        console.print(plan, markup=False, highlight=False, soft_wrap=True)
    for problem in request.problems:
        console.print(problem.title(), markup=False, highlight=False)
        for lib in request.libs:
            state = obstacle(lib, problem, settings, request.nodes) or "would be checked and timed"
            console.print(f"  {lib}: {state}", markup=False, highlight=False)
