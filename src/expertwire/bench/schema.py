"""What a benchmark measures and what comes out: plain dataclasses, and the JSON that holds every sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

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
PHASES = ("dispatch", "combine", "pair")


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

    @property
    def experts_per_rank(self) -> tuple[int, ...]:
        """Experts of each rank; the first ranks take one more where R does not divide E."""
        share, extra = divmod(self.num_experts, self.num_ranks)
        return tuple(share + (rank < extra) for rank in range(self.num_ranks))

    def config(self, timeout_s: float = 100.0, validate: bool | None = None) -> MoECommunicatorConfig:
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
            validate=validate,
            device="cpu",
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
        """Return the shape and the routing in one line."""
        return f"{self.shape()}  routing {self.routing}"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        warmup: untimed pairs of each library before anything is timed.
        iters: timed pairs of each library.
        rounds: the timed pairs are cut into this many parts and the libraries take turns part by part, so that a drift
            of the machine meets all of them alike.
        threads: ranks are threads of one process in place of processes.
        validate: check the result of every timed pair, outside the timed part, not only before and after.
        timeout_s: bound of every wait, seconds.
    """

    warmup: int = 10
    iters: int = 100
    rounds: int = 5
    threads: bool = False
    validate: bool = False
    timeout_s: float = 100.0

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


@dataclass(frozen=True)
class Samples:
    """Nanoseconds of every timed pair on every rank, int64 [R, iters] each; ``pair`` spans both phases."""

    dispatch: NDArray[np.int64]
    combine: NDArray[np.int64]
    pair: NDArray[np.int64]

    def of(self, phase: str) -> NDArray[np.int64]:
        """Return the samples of one of :data:`PHASES`."""
        return {"dispatch": self.dispatch, "combine": self.combine, "pair": self.pair}[phase]


@dataclass(frozen=True)
class PhaseSummary:
    """Figures of one phase of one library, over the iterations, of the slowest rank of each iteration.

    Attributes:
        min_us, median_us, p99_us, max_us: microseconds.
        fastest_rank_us: median over the iterations of the fastest rank; a rank that waits for a late one is not slow.
        gb_per_s: payload of one rank (valid selections * H * 2 bytes, twice for the pair) over the median.
        spread: (largest - smallest) / median over the medians of the rounds.
        ratio_to: this median over the median of each other library of the same run.
    """

    min_us: float
    median_us: float
    p99_us: float
    max_us: float
    fastest_rank_us: float
    gb_per_s: float
    spread: float
    ratio_to: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LibResult:
    """One library on one problem. With status OK it has ``samples`` and ``phases``, else ``reason`` says why not."""

    lib: str
    status: Status
    reason: str = ""
    notes: str = ""
    samples: Samples | None = None
    phases: dict[str, PhaseSummary] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """All libraries on one problem. ``bytes_per_rank`` is valid selections * H * 2, the mean over the ranks."""

    problem: Problem
    bytes_per_rank: float
    results: tuple[LibResult, ...]

    def result(self, lib: str) -> LibResult:
        """Return the result of one library. Raises KeyError."""
        return {result.lib: result for result in self.results}[lib]


@dataclass(frozen=True)
class Report:
    """Everything one command measured, with what is needed to repeat it."""

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
        values = {name: _plain(value) for name, value in asdict(self).items()}
        return {"schema": SCHEMA, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value
