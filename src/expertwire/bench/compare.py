"""``expertwire bench compare``: what got faster or slower between two reports, beyond what the rounds differ anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertwire.bench.report import widen
from expertwire.bench.rows import Row, ratio_of, rows_of, sizes, way, within_spread
from expertwire.bench.schema import Problem, Report, Status
from expertwire.errors import InvalidArgumentError

#: What a machine may have otherwise and still be the same machine: its load, and software, which is worth comparing.
_MAY_DIFFER = ("load", "kernel", "driver", "memory")
#: Settings that change what is timed.
_MUST_BE_EQUAL = ("device", "threads", "cuda_graph", "iters_per_graph")


@dataclass(frozen=True)
class Change:
    """One row of both reports."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float:
        """The median after over the median before."""
        return ratio_of(self.after.figures, self.before.figures)

    @property
    def spread(self) -> float:
        """The larger spread of the two: the range of the medians of the rounds over the median."""
        return max(self.before.figures.spread, self.after.figures.spread)

    @property
    def word(self) -> str:
        """Whether it got "faster" or "slower", or is the "same": within the spread."""
        if within_spread(self.ratio, [self.before.figures, self.after.figures]):
            return "same"
        return "faster" if self.ratio < 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """What two reports share.

    Attributes:
        changes: rows of both.
        gone: results that the first has and that failed in the second, and why.
        num_alone: rows that one of them has alone.
        differences: settings, versions and other facts of the machine that differ.
    """

    changes: tuple[Change, ...]
    gone: tuple[str, ...]
    num_alone: int
    differences: tuple[str, ...]

    def regressions(self, threshold: float) -> list[Change]:
        """Return what is slower by more than ``threshold``, a share, and beyond the spread."""
        return [change for change in self.changes if change.word == "slower" and change.ratio - 1 > threshold]


def compare(
    before: Report, after: Report, *, libs: Sequence[str] | None = None, any_machine: bool = False
) -> Comparison:
    """Compare the rows that two reports share: the same problem, library and phase.

    Args:
        before: what to compare with.
        after: what is compared.
        libs: compare these libraries alone.
        any_machine: compare even if the machines differ.

    Raises:
        InvalidArgumentError: the reports are of different machines, share no row, or were measured so that their times
            are of different things: by other settings, or with another routing under the same name.
    """
    _check_settings(before, after)
    differing = [name for name in _machine_facts(before, after) if not name.startswith(_MAY_DIFFER)]
    if differing and not any_machine:
        name = differing[0]
        raise InvalidArgumentError(
            f"different machines: {name} is {before.machine.get(name)!r} in the first file and "
            f"{after.machine.get(name)!r} in the second: --allow-different-machines compares them nevertheless"
        )
    old, new = ({_key(row): row for row in rows_of(report) if _wanted(row, libs)} for report in (before, after))
    changes = tuple(Change(row, new[key]) for key, row in old.items() if key in new)
    if not changes:
        named = "" if libs is None else f" of {', '.join(libs)}"
        raise InvalidArgumentError(f"the two files share no problem, library and phase{named}: nothing to compare")
    _check_routing(before, after, {change.before.problem for change in changes})
    had = {(row.problem, row.lib) for row in old.values()}
    gone = tuple(
        f"{sizes(run.problem)}  {way(run.problem)}  {result.lib}: {result.reason}"
        for run in after.runs
        for result in run.results
        if result.status is not Status.OK and (run.problem, result.lib) in had
    )
    return Comparison(changes, gone, len(old.keys() ^ new.keys()), tuple(_differences(before, after)))


def _check_settings(before: Report, after: Report) -> None:
    old, new = asdict(before.settings), asdict(after.settings)
    old["ranks over MPI"], new["ranks over MPI"] = _over_mpi(before), _over_mpi(after)
    for name in (*_MUST_BE_EQUAL, "ranks over MPI"):
        if old[name] != new[name]:
            raise InvalidArgumentError(
                f"different settings: {name} is {old[name]!r} in the first file and {new[name]!r} in the second"
            )


def _over_mpi(report: Report) -> bool:
    return any(word.partition("=")[0] == "--nodes" for word in report.command)


def _check_routing(before: Report, after: Report, shared: Set[Problem]) -> None:
    """Refuse a problem of which other rows move: a trace is named by its path, which may hold another one by now."""
    new = {run.problem: run.bytes_per_rank for run in after.runs}
    for run in before.runs:
        if run.problem in shared and not math.isclose(run.bytes_per_rank, new[run.problem]):
            raise InvalidArgumentError(
                f"different routings: {sizes(run.problem)}: bytes_per_rank is {run.bytes_per_rank:.10g} in the first "
                f"file and {new[run.problem]:.10g} in the second"
            )


def _wanted(row: Row, libs: Sequence[str] | None) -> bool:
    return libs is None or row.result.lib in libs


def _key(row: Row) -> tuple[Any, ...]:
    return (row.problem, row.lib, row.phase)


def _machine_facts(before: Report, after: Report) -> list[str]:
    """Return the names of all facts in which two machines differ."""
    names = dict.fromkeys((*before.machine, *after.machine))
    return [name for name in names if before.machine.get(name) != after.machine.get(name)]


def _differences(before: Report, after: Report) -> list[str]:
    old, new = ({**asdict(one.settings), **one.machine, **one.versions} for one in (before, after))
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return [f"{name} {_said(old, name)} -> {_said(new, name)}" for name in names if name[:4] != "load"]


def _said(facts: dict[str, Any], name: str) -> Any:
    value = facts.get(name, "")
    return "none" if value == "" else value


def print_comparison(comparison: Comparison, threshold: float, console: Console) -> None:
    """Print a table for each problem, what differs around it, and the verdict in the last line."""
    slower = comparison.regressions(threshold)
    for problem in dict.fromkeys(change.before.problem for change in comparison.changes):
        console.print(f"{sizes(problem)}  {way(problem)}", style="italic", highlight=False, markup=False)
        table = Table(box=None, pad_edge=False)
        for heading in ("LIB", "phase"):
            table.add_column(heading, min_width=15, no_wrap=True)
        for heading in ("before us", "after us", "change", "spread"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for change in comparison.changes:
            if change.before.problem == problem:
                table.add_row(*_cells(change, is_regression=change in slower))
        widen(table, console)
        console.print(table, highlight=False, crop=False)
    for line in comparison.differences:
        console.print(f"differs: {line}", highlight=False, markup=False)
    for line in comparison.gone:
        console.print(f"no figures any more: {line}", style="bold red", highlight=False, markup=False)
    words = [change.word for change in comparison.changes]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("faster", "slower", "same"))
    alone = f"; {comparison.num_alone} rows in one file alone" if comparison.num_alone else ""
    last = f"{counts} (within the spread){alone}; {len(slower)} slower by more than {threshold:.1%}"
    console.print(last, highlight=False)


def _cells(change: Change, *, is_regression: bool) -> list[str]:
    word = "[bold red]REGRESSION" if is_regression else change.word
    before, after = change.before.figures.median_us, change.after.figures.median_us
    numbers = [f"{before:.1f}", f"{after:.1f}", f"{change.ratio - 1:+.1%}", f"{change.spread:.1%}"]
    return [escape(change.before.lib), change.before.phase, *numbers, word]
