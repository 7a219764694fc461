"""What a benchmark shows in the terminal: a table per problem, a row per library and phase, and the notes under it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from expertwire.bench.schema import PHASES, LibResult, PhaseSummary, Report, Run, Status

_LEGEND = (
    "us per call of the slowest rank of each iteration; fastest: median of the fastest rank, which has not waited for "
    "a late one; GB/s: valid selections * H * 2 bytes of one rank (twice for the pair) over the median; "
    "x LIB: this median over that of LIB; spread: of the medians of the rounds."
)


def print_report(report: Report, console: Console) -> None:
    """Print all runs of a report."""
    for run in report.runs:
        _print_run(run, console)
    console.print(_LEGEND, style="dim", highlight=False)


def _print_run(run: Run, console: Console) -> None:
    measured = [result.lib for result in run.results if result.phases]
    table = Table(title=run.problem.title(), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("LIB")
    table.add_column("phase")
    for heading in ("min", "median", "p99", "max", "fastest", "GB/s", "spread", *_ratio_headings(measured)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in run.results:
        for phase in PHASES if result.phases else ():
            table.add_row(result.lib, phase, *_cells(result.lib, result.phases[phase], measured))
    console.print(table)
    for result in run.results:
        if result.status is not Status.OK:
            console.print(f"{result.lib}: {_why(result)}", style=_style(result), highlight=False, markup=False)
    for result in run.results:
        if result.status is Status.OK:
            console.print(f"{result.lib}: checked; {result.notes}", style="dim", highlight=False, markup=False)
    console.print()


def _ratio_headings(measured: list[str]) -> list[str]:
    return [f"x {lib}" for lib in measured] if len(measured) > 1 else []


def _cells(lib: str, summary: PhaseSummary, measured: list[str]) -> list[str]:
    times = (summary.min_us, summary.median_us, summary.p99_us, summary.max_us, summary.fastest_rank_us)
    cells = [*(f"{time:.1f}" for time in times), f"{summary.gb_per_s:.2f}", f"{summary.spread:.0%}"]
    if len(measured) > 1:
        cells += [_ratio(summary, lib, other) for other in measured]
    return cells


def _ratio(summary: PhaseSummary, lib: str, other: str) -> str:
    return "-" if lib == other or other not in summary.ratio_to else f"{summary.ratio_to[other]:.2f}"


def _why(result: LibResult) -> str:
    return f"FAILED: {result.reason}" if result.status is Status.FAILED else f"no figures: {result.reason}"


def _style(result: LibResult) -> str:
    return "bold red" if result.status is Status.FAILED else "yellow"
