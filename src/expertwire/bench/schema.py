"""What a benchmark measures and what comes out: plain dataclasses, and the JSON that holds every sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    MoECommunicatorConfig,
    QuantConfig,
)

SCHEMA = "expertwire-bench/1"
#: What can be timed, in the order of tables. Alone: on CPUs by the caller's clock, on GPUs by events around a captured
#: graph, per pair. ``-launch``: plain launches, by events. ``-kernel``: what the library's kernels ran, summed.
#: ``-host``: what a call costs its caller, who does not wait for the GPU. ``batches-``: two micro-batches, of each its
#: GEMM, its pair, or both in some order; captured, per two.
PHASES = (
    "dispatch",
    "combine",
    "pair",
    "dispatch-launch",
    "combine-launch",
    "pair-launch",
    "dispatch-kernel",
    "combine-kernel",
    "dispatch-host",
    "combine-host",
    "batches-gemm",
    "batches-pair",
    "batches-sequential",
    "batches-two-streams",
    "batches-two-phases",
)


@dataclass(frozen=True)
class Problem:
    """One shape to exchange; every library gets the same.

    Attributes:
        num_experts: E.
        num_tokens: T of every rank, and the communicator's M.
        hidden_size: H.
        num_topk: K.
        num_ranks: R.
        layout: layout of the dispatch output.
        combine_mode: where expert outputs are summed.
        dispatch_dtype: payload of dispatched rows.
        routing: how tokens choose experts, as given on the command line.
        seed: of tokens, routing and weights.
        num_blocks: grid sizes of dispatch and combine on a GPU, for libraries that can be told; empty: the library's
            own choice.
    """

    num_experts: int = 128
    num_tokens: int = 128
    hidden_size: int = 7168
    num_topk: int = 8
    num_ranks: int = 2
    layout: DispatchLayout = DispatchLayout.EXPERT_MAJOR
    combine_mode: CombineMode = CombineMode.RANK_LOCAL_REDUCE
    dispatch_dtype: DispatchDataType = DispatchDataType.BF16
    routing: str = "uniform"
    seed: int = 1
    num_blocks: tuple[int, ...] = ()

    @property
    def experts_per_rank(self) -> tuple[int, ...]:
        """Experts of each rank; the first ranks take one more where R does not divide E."""
        share, extra = divmod(self.num_experts, self.num_ranks)
        return tuple(share + (rank < extra) for rank in range(self.num_ranks))

    def config(self, timeout_s: float = 100.0, device: str = "cpu") -> MoECommunicatorConfig:
        """Return the configuration of a communicator for this shape."""
        return MoECommunicatorConfig(
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.num_tokens,
            experts_per_rank=self.experts_per_rank if self.num_experts % self.num_ranks else None,
            output_layout=self.layout,
            combine_mode=self.combine_mode,
            quant=QuantConfig(format=self.dispatch_dtype),
            num_blocks=(self.num_blocks[0], self.num_blocks[-1]) if self.num_blocks else None,
            device=device,
            timeout_s=timeout_s,
        )

    def shape(self) -> str:
        """Return sizes and modes in one line, the modes as the options take them."""
        modes = (str(mode.value).replace("_", "-") for mode in (self.layout, self.combine_mode, self.dispatch_dtype))
        return (
            f"T {self.num_tokens}  E {self.num_experts}  K {self.num_topk}  H {self.hidden_size}  R {self.num_ranks}  "
            f"{'  '.join(modes)}"
        )

    def title(self) -> str:
        """Return the shape, the routing and the grid sizes, if any are given, in one line."""
        blocks = f"  blocks {':'.join(map(str, self.num_blocks))}" if self.num_blocks else ""
        return f"{self.shape()}  routing {self.routing}{blocks}"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        warmup: untimed pairs of each library before anything is timed.
        iters: timed pairs of each library; on GPUs also timed replays of its captured graph.
        rounds: the timed pairs are cut into this many parts and the libraries take turns part by part, so that a drift
            of the machine meets all of them alike.
        threads: ranks are threads of one process in place of processes.
        validate: check results outside the timed part, not only before and after: on CPUs of every timed pair, on GPUs
            once in every round.
        timeout_s: bound of every wait, seconds.
        device: ``"cpu"`` or ``"cuda"``; there a rank is a process with a GPU of its own.
        cuda_graph: time captured graphs where a library can be captured.
        iters_per_graph: pairs in a captured graph.
        kernel_rows: time the kernels alone, in processes of their own: whatever looks at kernels slows calls down.
        host_rows: time everything else.
        overlap: ``"gemm"``: time pairs of this library beside a GEMM, too; empty: do not.
        nccl_lib_path: folder of the NCCL libraries that ``nccl_ep_bench`` loads; empty: its own choice.
        nccl_ep_bench: where the user has the benchmark program of NCCL EP; empty: nowhere.
        mscclpp_cpp_bench: where the user has the C++ benchmark program of MSCCL++; empty: nowhere.
    """

    warmup: int = 10
    iters: int = 100
    rounds: int = 5
    threads: bool = False
    validate: bool = False
    timeout_s: float = 100.0
    device: str = "cpu"
    cuda_graph: bool = True
    iters_per_graph: int = 50
    kernel_rows: bool = True
    host_rows: bool = True
    overlap: str = ""
    nccl_lib_path: str = ""
    nccl_ep_bench: str = ""
    mscclpp_cpp_bench: str = ""

    def parts(self) -> list[int]:
        """Return the number of timed pairs of each round."""
        rounds = min(self.rounds, self.iters)
        share, extra = divmod(self.iters, rounds)
        return [share + (part < extra) for part in range(rounds)]


class Status(Enum):
    """Whether a library's figures exist: measured, not able to run here, or wrong or broken."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


#: Nanoseconds of every timed call on every rank, int64 [R, n], by phase. A pair spans both operations; one of a
#: captured graph is its share of the replay.
Samples: TypeAlias = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Minimum:
    """Stands beside the type of a number in a file that must be at least this."""

    value: float


NonNegative: TypeAlias = Annotated[float, Minimum(0)]


@dataclass(frozen=True)
class PhaseSummary:
    """Figures of one phase of one library, over the iterations, of the slowest rank of each iteration.

    Attributes:
        min_us, median_us, p99_us, max_us: microseconds.
        fastest_rank_us: median over the iterations of the fastest rank; a rank that waits for a late one is not slow.
        gb_per_s: payload of one rank (valid selections * H * 2 bytes, twice for the pair) over the median; 0 where the
            caller alone is timed, and for micro-batches.
        spread: (largest - smallest) / median over the medians of the rounds.
        ratio_to: this median over the median of each other library of the same run.
    """

    min_us: NonNegative
    median_us: NonNegative
    p99_us: NonNegative
    max_us: NonNegative
    fastest_rank_us: NonNegative
    gb_per_s: NonNegative
    spread: NonNegative
    ratio_to: dict[str, NonNegative] = field(default_factory=dict)


@dataclass(frozen=True)
class LibResult:
    """One library on one problem. With status OK it has ``samples`` and ``phases``, else ``reason`` says why not.

    Attributes:
        lib: the library, as ``--ep-lib`` names it.
        status: whether there are figures.
        reason: why there are none.
        notes: what is timed and what is left out.
        samples: nanoseconds of every timed call, [rank][iteration], by phase.
        phases: the figures of each phase that was timed.
        missing: phases that were asked for and have no figures, and why.
        hidden_us: microseconds that each overlapped phase saves over ``batches-sequential``, both being medians.
    """

    lib: str
    status: Status
    reason: str = ""
    notes: str = ""
    samples: Samples | None = None
    phases: dict[str, PhaseSummary] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    hidden_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """All libraries on one problem.

    Attributes:
        problem: the shape.
        bytes_per_rank: valid selections * H * 2 of one way, the mean over the ranks.
        results: one for each library that was asked for.
    """

    problem: Problem
    bytes_per_rank: NonNegative
    results: tuple[LibResult, ...]

    def result(self, lib: str) -> LibResult:
        """Return the result of one library. Raises KeyError."""
        return {result.lib: result for result in self.results}[lib]


@dataclass(frozen=True)
class Report:
    """Everything one command measured, with what is needed to repeat it.

    Attributes:
        command: its words.
        date: when it was done, UTC, ISO 8601.
        machine: hardware, kernel, driver, and the load before the start.
        versions: of Python and of the packages that took part.
        settings: how was measured.
        runs: one for each problem.
    """

    command: tuple[str, ...]
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: Settings
    runs: tuple[Run, ...]

    @property
    def failed(self) -> bool:
        """Whether any library returned a wrong result or broke."""
        return any(result.status is Status.FAILED for run in self.runs for result in run.results)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; samples are integers, nanoseconds, [rank][iteration]."""
        values = {name: to_plain(value) for name, value in asdict(self).items()}
        return {"schema": SCHEMA, **values}


def to_plain(value: Any) -> Any:
    """Return a value as JSON holds it."""
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value
