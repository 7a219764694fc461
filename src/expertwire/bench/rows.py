"""A report as flat rows: one for each problem, library and phase that has figures. What pages and comparisons read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertwire.bench.schema import PHASES, LibResult, PhaseSummary, Problem, Report, Run, Settings
from expertwire.bench.workloads import WORKLOADS


@dataclass(frozen=True, eq=False)
class Row:
    """One phase of one library on one problem.

    Attributes:
        problem: the shape.
        result: the library's result, of which this is a phase.
        phase: one of PHASES.
    """

    problem: Problem
    result: LibResult
    phase: str

    @property
    def lib(self) -> str:
        """The library."""
        return self.result.lib

    @property
    def operation(self) -> str:
        """Dispatch, combine or pair, however it was timed."""
        return self.phase.partition("-")[0]

    @property
    def is_launch(self) -> bool:
        """Whether launches were timed one by one, where others are captured in a graph."""
        return self.phase.endswith("-launch")

    @property
    def figures(self) -> PhaseSummary:
        """The figures of this phase."""
        return self.result.phases[self.phase]

    @property
    def slowest_us(self) -> NDArray[np.float64]:
        """Microseconds of the slowest rank of each iteration."""
        samples = self.result.samples
        return np.zeros(0) if samples is None else np.asarray(samples[self.phase].max(axis=0) / 1e3)


def rows_of(report: Report) -> list[Row]:
    """Return all rows that have figures, in the order of the report."""
    return [row for run in report.runs for row in rows_of_run(run)]


def rows_of_run(run: Run) -> list[Row]:
    """Return the rows of one run that have figures."""
    return [Row(run.problem, result, phase) for result in run.results for phase in PHASES if phase in result.phases]


def main_rows(rows: list[Row]) -> list[Row]:
    """Return dispatch, combine and pair of each library and problem: of plain launches where no graph was captured."""
    timed = {(row.problem, row.lib, row.phase) for row in rows}
    return [
        row
        for row in rows
        if row.phase == row.operation or (row.is_launch and (row.problem, row.lib, row.operation) not in timed)
    ]


def within_spread(ratio: float, figures: Sequence[PhaseSummary]) -> bool:
    """Whether a ratio of medians is no further from 1 than the medians of the rounds are from each other."""
    further = max(ratio, 1 / ratio) if ratio > 0 else math.inf  # the same whichever of the two is named first
    return further - 1 <= max(one.spread for one in figures)


def ratio_of(one: PhaseSummary, other: PhaseSummary) -> float:
    """Return one median over another; over 0, which a clock may show, 1 of 0 and infinity of all else."""
    if other.median_us > 0:
        return one.median_us / other.median_us
    return math.inf if one.median_us > 0 else 1.0


def ratio_text(one: PhaseSummary, other: PhaseSummary) -> str:
    """Return one median over another in words of tables: after ``~`` if they differ within their spread."""
    ratio = ratio_of(one, other)
    return ("~ " if within_spread(ratio, [one, other]) else "") + two_digits(ratio)


def two_digits(ratio: float) -> str:
    """Return a ratio with two decimals, or, if it is small, with two significant digits."""
    return f"{ratio:#.2g}" if 0 < ratio < 0.1 else f"{ratio:.2f}"


def workload_name(problem: Problem) -> str:
    """Return the name of the workload that has this shape, or an empty string."""
    shape = (problem.num_tokens, problem.num_experts, problem.num_topk, problem.hidden_size)
    for workload in WORKLOADS.values():
        if (workload.num_tokens, workload.num_experts, workload.num_topk, workload.hidden_size) == shape:
            return workload.name
    return ""


def sizes(problem: Problem) -> str:
    """Return the sizes of a problem in a few words, its workload's name first."""
    name = workload_name(problem)
    numbers = (
        f"T {problem.num_tokens}  E {problem.num_experts}  K {problem.num_topk}  H {problem.hidden_size}  "
        f"R {problem.num_ranks}"
    )
    routing = "" if problem.routing == "uniform" else f"  routing {problem.routing}"
    return f"{name}: {numbers}{routing}" if name else f"{numbers}{routing}"


def blocks(problem: Problem) -> str:
    """Return the grid sizes of dispatch and combine, or an empty string if the library chooses them."""
    return ":".join(map(str, problem.num_blocks))


def method(settings: Settings) -> str:
    """Return in one line how was measured."""
    on_gpus = settings.device == "cuda"
    words = [
        f"{settings.warmup} warm-up pairs",
        f"{settings.iters} timed pairs in {settings.rounds} round{'s' * (settings.rounds > 1)}",
        "ranks are threads" if settings.threads else "ranks are processes",
        *([f"graphs of {settings.iters_per_graph} pairs"] if on_gpus and settings.cuda_graph else []),
        *([f"every {'round' if on_gpus else 'timed pair'} checked"] if settings.validate else []),
        f"at most {settings.timeout_s:g} s for a wait",
    ]
    return ", ".join(words)


def way(problem: Problem) -> str:
    """Return layout, combine mode, payload and grid sizes, as the options take them."""
    modes = (problem.layout, problem.combine_mode, problem.dispatch_dtype)
    words = [str(mode.value).replace("_", "-") for mode in modes]
    return ", ".join([*words, *([f"{blocks(problem)} blocks"] if problem.num_blocks else [])])
