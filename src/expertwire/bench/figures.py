"""What is drawn of a report: bars for each workload, lines over every size that was swept, and distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from expertwire.bench.charts import Bar, Bars, Chart, Lines, Look, Series
from expertwire.bench.rows import Row, main_rows, sizes, way
from expertwire.bench.schema import Problem

FLOOR = "floor"
#: Each library looks the same on every page.
_NUMBERS = {
    FLOOR: 0,
    "expertwire": 1,
    "torch-a2a": 2,
    "expertwire-cpp": 3,
    "nccl-ep": 4,
    "deepep": 5,
    "mscclpp": 6,
    "flashinfer": 7,
    # Programs of two of these libraries.
    "nccl-ep-bench": 4,
    "mscclpp-cpp-bench": 6,
}
_OTHER = 7
#: Sizes over which a line can run, and what they are called.
SWEPT = {
    "num_tokens": "T, tokens of a rank",
    "num_experts": "E, experts",
    "num_topk": "K, experts of a token",
    "hidden_size": "H, elements of a row",
    "num_ranks": "R, ranks",
    "num_blocks": "thread blocks, of each kernel",
}
_TIME = "us of a dispatch+combine pair, median of the slowest rank"


def charts_of(rows: list[Row]) -> list[Chart]:
    """Return all charts of the rows of one report."""
    rows = main_rows(rows)
    pairs = [row for row in rows if row.operation == "pair"]
    return [*_workload_bars(rows), *(chart for name in SWEPT for chart in sweep(pairs, name)), *_distributions(pairs)]


def _needs_log(times: Sequence[float]) -> bool:
    """Whether the smallest of several times would be next to nothing beside the largest."""
    return max(times) > 20 * min(times) > 0


def _look(row: Row) -> Look:
    dashes = "dotted" if row.lib.endswith("-bench") else "dashed" if row.is_launch else ""
    return Look(_NUMBERS.get(row.lib, _OTHER), dashes)


def _name(row: Row) -> str:
    return f"{row.lib}, launches" if row.is_launch else row.lib


def _workload_bars(rows: list[Row]) -> Iterable[Bars]:
    """A chart for each shape: a group for each way to run it, or, if there is one way only, for each phase."""
    for shape in dict.fromkeys(sizes(row.problem) for row in rows):
        own, title = [row for row in rows if sizes(row.problem) == shape], shape
        if len({way(row.problem) for row in own}) > 1:
            own = [row for row in own if row.operation == "pair"]
            groups = [way(row.problem) for row in own]
            label = f"{_TIME}; whisker: half of the pairs"
        else:
            groups = [row.operation for row in own]
            title = f"{shape}  {way(own[0].problem)}"
            label = "us, median of the slowest rank; whisker: half of the pairs"
        bars = [_bar(row, group) for row, group in zip(own, groups, strict=True)]
        log = _needs_log([bar.value for bar in bars]) and min(bar.low for bar in bars) > 0
        yield Bars(title, label, tuple(sorted(bars, key=lambda bar: groups.index(bar.group))), log)


def _bar(row: Row, group: str) -> Bar:
    low, high = np.percentile(row.slowest_us, (25, 75)).tolist()
    return Bar(group, _name(row), _look(row), row.figures.median_us, low, high, row.lib == FLOOR)


def sweep(pairs: list[Row], name: str) -> Iterable[Lines]:
    """A chart for each set of problems that differ in ``name``, one of SWEPT, alone."""
    families: dict[Problem, list[Row]] = {}
    for row in pairs:
        if _value(row, name) > 0:  # grid sizes may be left to the library
            families.setdefault(_without(row.problem, name), []).append(row)
    for rows in families.values():
        values = sorted({_value(row, name) for row in rows})
        if len(values) < 2:
            continue
        series = [_swept(named, rows, name) for named in dict.fromkeys(_name(row) for row in rows)]
        times = [y for one in series for _, y in one.points]
        title = f"Time over {SWEPT[name].split(',')[0]}: {_others(rows[0].problem, name)}"
        log_x = values[-1] >= 4 * values[0]
        log_y = _needs_log(times)
        yield Lines(title, SWEPT[name], _TIME, tuple(series), log_x, log_y, tuple(values))


def _without(problem: Problem, name: str) -> Problem:
    nothing: dict[str, Any] = {name: () if name == "num_blocks" else 0}
    return replace(problem, **nothing)


def _value(row: Row, name: str) -> float:
    value = getattr(row.problem, name)
    return float(max(value, default=0) if isinstance(value, tuple) else value)


def _swept(named: str, rows: list[Row], name: str) -> Series:
    own = [row for row in rows if _name(row) == named]
    points = sorted((_value(row, name), row.figures.median_us) for row in own)
    return Series(named, _look(own[0]), tuple(points), own[0].lib == FLOOR)


def _others(problem: Problem, name: str) -> str:
    """Return a problem's title without the size that varies."""
    letters = {field: said.split(",")[0] for field, said in SWEPT.items() if field not in (name, "num_blocks")}
    kept = [f"{letter} {getattr(problem, field)}" for field, letter in letters.items()]
    routing = "" if problem.routing == "uniform" else f"  routing {problem.routing}"
    return f"{'  '.join(kept)}{routing}  {way(_without(problem, name))}"


def _distributions(pairs: list[Row]) -> Iterable[Lines]:
    """A chart for each problem: the share of iterations that took at most so long."""
    for problem in dict.fromkeys(row.problem for row in pairs):
        own = [row for row in pairs if row.problem == problem]
        series = []
        for row in own:
            times = np.sort(row.slowest_us)
            shares = 100 * np.arange(1, times.size + 1) / times.size
            points = tuple(zip(times.tolist(), shares.tolist(), strict=True))
            series.append(Series(_name(row), _look(row), points, row.lib == FLOOR))
        low, high = (edge(one.points[end][0] for one in series) for edge, end in ((min, 0), (max, -1)))
        title = f"Distribution: {sizes(problem)}  {way(problem)}"
        label = "us of a pair, slowest rank"
        yield Lines(title, label, "% of the pairs took at most", tuple(series), high > 20 * low > 0, steps=True)
