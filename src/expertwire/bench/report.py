"""What a benchmark shows in the terminal: a table per problem, a row per library and phase, and the notes under it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from expertwire.bench.rows import ratio_text
from expertwire.bench.schema import LibResult, PhaseSummary, Report, Run, Status

_LEGEND = (
    "Results were right before they were timed, unless a note says that they were not checked. us per call of the "
    "slowest rank of each iteration; fastest: median of the fastest rank, which has not waited for a late one; GB/s: "
    "valid selections * H * 2 bytes of one rank (twice for the pair) over the median; spread: range of the medians of "
    "the rounds over the median; x LIB: this median over that of LIB, ~ where the two differ by no more than their "
    "spread."
)
#: Libraries of one run up to which each is compared with each other; files and pages always hold all ratios.
_MOST_COMPARED = 3
_FIGURES = ("min", "median", "p99", "max", "fastest", "GB/s", "spread")
#: What a narrow terminal goes without, the first first. What is left is shown whole, if need be beyond the edge.
_LEFT_OUT_FIRST = ("max", "fastest", "min", "GB/s", "p99")


def print_report(report: Report, console: Console) -> None:
    """Print all runs of a report."""
    for run in report.runs:
        _print_run(run, console)
    console.print(_LEGEND, style="dim", highlight=False)


def _print_run(run: Run, console: Console) -> None:
    console.print(run.problem.title(), style="bold", highlight=False, markup=False)
    table, left_out = _fitting(run, console)
    console.print(table, crop=False)
    if left_out:
        told = f"not shown at this width: {', '.join(left_out)} (--json holds them)"
        console.print(told, style="dim", highlight=False)
    for result in run.results:
        if result.status is not Status.OK:
            console.print(f"{result.lib}: {_why(result)}", style=_style(result), highlight=False, markup=False)
    for number, result in enumerate(run.results, 1):
        if result.status is Status.OK:
            told = f"{number} {result.lib}: {result.notes}"
            console.print(told, style="dim", highlight=False, markup=False)
            for phase, why in result.missing.items():
                console.print(f"{result.lib}: no {phase}: {why}", style="dim", highlight=False, markup=False)
            if result.hidden_us:
                console.print(_hidden(run, result), highlight=False, markup=False)
    console.print()


def _fitting(run: Run, console: Console) -> tuple[Table, Sequence[str]]:
    """Return a table that fits the console, if one does, and the figures that it has not."""
    for count in range(len(_LEFT_OUT_FIRST) + 1):
        left_out = _LEFT_OUT_FIRST[:count]
        table = _table(run, left_out)
        if widen(table, console) <= console.width:
            break
    return table, left_out


def widen(table: Table, console: Console) -> int:
    """Make a table as wide as its cells need, be that beyond the edge of the console, and return how wide that is."""
    table.width = Measurement.get(console, console.options.update(width=10_000), table).maximum
    return table.width


def _table(run: Run, left_out: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("LIB", "phase"):
        table.add_column(heading, no_wrap=True)
    shown = [index for index, name in enumerate(_FIGURES) if name not in left_out]
    for heading in (*(_FIGURES[index] for index in shown), *(f"x {lib}" for lib in _compared(run)), "notes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, result in enumerate(run.results, 1):
        for phase, summary in result.phases.items():
            figures = _cells(summary)
            ratios = [_ratio(summary, run.result(other).phases.get(phase), other) for other in _compared(run)]
            table.add_row(result.lib, phase, *(figures[index] for index in shown), *ratios, str(number))
    return table


def _hidden(run: Run, result: LibResult) -> str:
    """Return in one line how much of their pairs two micro-batches hide behind their GEMMs."""
    problem, pairs = run.problem, result.phases.get("batches-pair")
    if pairs is None:
        return ""
    pair = pairs.median_us
    saved = (
        f"{time:.1f} us ({time / pair if pair else 0:.0%}) in {phase.removeprefix('batches-').replace('-', ' ')}"
        for phase, time in result.hidden_us.items()
    )
    return (
        f"{result.lib}: of {pair:.1f} us for two pairs, GEMMs of {problem.num_tokens * problem.num_topk} x "
        f"{problem.hidden_size} x {problem.hidden_size} each hide {', '.join(saved)}"
    )


def _compared(run: Run) -> list[str]:
    """Return the libraries that others are held against; of many, which would not fit, this one and the floor."""
    measured = [result.lib for result in run.results if result.phases]
    if len(measured) > _MOST_COMPARED:
        return [lib for lib in measured if lib in ("expertwire", "floor")]
    return measured if len(measured) > 1 else []


def _cells(summary: PhaseSummary) -> list[str]:
    """Return what stands under _FIGURES."""
    times = (summary.min_us, summary.median_us, summary.p99_us, summary.max_us, summary.fastest_rank_us)
    return [*(f"{time:.1f}" for time in times), f"{summary.gb_per_s:.2f}", f"{summary.spread:.0%}"]


def _ratio(summary: PhaseSummary, others: PhaseSummary | None, other: str) -> str:
    return "-" if others is None or other not in summary.ratio_to else ratio_text(summary, others)


def _why(result: LibResult) -> str:
    return f"FAILED: {result.reason}" if result.status is Status.FAILED else f"no figures: {result.reason}"


def _style(result: LibResult) -> str:
    return "bold red" if result.status is Status.FAILED else "yellow"
