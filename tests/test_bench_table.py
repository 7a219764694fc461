"""The table that a benchmark prints: whole on every terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

import reports
from expertwire.bench.page import make_page
from expertwire.bench.report import print_report
from expertwire.bench.rows import two_digits
from expertwire.bench.schema import PHASES, Problem, Report


def printed(report: Report, width: int) -> list[str]:
    console = Console(file=(text := io.StringIO()), width=width)
    print_report(report, console)
    return text.getvalue().splitlines()


def table(report: Report, width: int) -> list[list[str]]:
    """The cells of the first table, its headings first; columns are two spaces apart."""
    lines = [re.split(r" {2,}", line.strip()) for line in printed(report, width)]
    first = next(index for index, cells in enumerate(lines) if cells[0] == "LIB")
    return [cells for cells in lines[first:] if len(cells) == len(lines[first])]


def three_libs(phases: tuple[str, ...] = reports.CPU_PHASES) -> Report:
    times = {"expertwire": 1234.5, "torch-a2a": 12345.6, "floor": 12.3}
    return reports.report([(Problem(), [reports.measured(lib, us, phases) for lib, us in times.items()])])


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (80, ["median", "spread"]),
        (100, ["median", "p99", "GB/s", "spread"]),
        (150, ["min", "median", "p99", "max", "fastest", "GB/s", "spread"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_those_are_whole(width: int, figures: list[str]) -> None:
    ratios = ["x expertwire", "x torch-a2a", "x floor"]
    headings, *rows = table(three_libs(), width)
    assert headings == ["LIB", "phase", *figures, *ratios, "notes"]
    assert [row[:2] for row in rows] == [
        [lib, phase] for lib in ("expertwire", "torch-a2a", "floor") for phase in reports.CPU_PHASES
    ]
    whole = table(three_libs(), 1000)
    kept = [whole[0].index(name) for name in headings]
    assert [headings, *rows] == [[row[index] for index in kept] for row in whole]
    assert max(map(len, printed(three_libs(), width))) <= width
    told = "\n".join(printed(three_libs(), width))
    assert ("not shown at this width: max, fastest" in told) == (len(figures) < 7)


def test_what_no_terminal_holds_is_as_wide_as_it_needs() -> None:
    headings, *rows = table(three_libs(PHASES), 40)
    assert headings[:4] == ["LIB", "phase", "median", "spread"]
    assert len(rows) == 3 * len(PHASES)
    assert {row[1] for row in rows} == set(PHASES)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0.00"), (0.00123, "0.0012"), (0.0996, "0.10"), (0.123, "0.12"), (1.0, "1.00"), (45.594, "45.59")],
)
def test_ratios_have_two_significant_digits_at_least(ratio: float, text: str) -> None:
    assert two_digits(ratio) == text


def test_small_ratios_are_the_same_in_the_table_and_on_the_page() -> None:
    floor = next(row for row in table(three_libs(), 150) if row[:2] == ["floor", "pair"])
    assert floor[-4:-1] == ["0.010", "0.0010", "-"]
    page = make_page([("a.json", three_libs())])
    assert page.count(f'<td class="n">{floor[-4]}</td><td class="n">{floor[-3]}</td><td class="n">-</td>') > 0
