"""One self-contained HTML page of one or more reports: tables and inline SVG, no script, nothing to load."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from expertwire.bench import svg
from expertwire.bench.figures import charts_of
from expertwire.bench.rows import Row, method, ratio_text, rows_of, rows_of_run, sizes, way
from expertwire.bench.schema import LibResult, Report, Run, Status

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { padding: .12rem .6rem; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
tr.last td, td[rowspan] { border-bottom-color: currentColor; }
td[rowspan] { min-width: 11rem; max-width: 26rem; }
td + td:nth-child(2) { white-space: nowrap; }
code { overflow-wrap: anywhere; }
.failed { color: #d55e00; font-weight: 600; }
.legend { max-width: 60rem; }
.wide { overflow-x: auto; }
.wide table { font-size: .85rem; }
.wide td, .wide th { padding: .1rem .45rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.4rem; }
figure { margin: 0; break-inside: avoid; }
@media print {
  body { font-size: 10px; margin: 0; max-width: none; }
  .charts { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .wide { overflow: visible; }
  .wide table { font-size: 7px; }
  .wide td, .wide th { padding: 1px 3px; }
  td[rowspan] { min-width: 7rem; }
  tr, section header { break-inside: avoid; }
  svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()

_LEGEND = (
    "Results were right before they were timed, unless a note says that they were not checked. "
    "Microseconds of the slowest rank of each iteration. fastest: median of the fastest rank, which has not waited "
    "for a late one. GB/s: valid selections * H * 2 bytes of one rank (twice for a pair) over the median. spread: "
    "range of the medians of the rounds over the median. x LIB: this median over that of LIB in the same run; ~ marks "
    "a difference that is within the spread of the two, so that neither is faster."
)


def make_page(reports: Sequence[tuple[str, Report]]) -> str:
    """Return the page; each report stands under its name."""
    sections = "\n".join(_section(name, report) for name, report in reports)
    title = "expertwire bench: " + ", ".join(name for name, _ in reports)
    definitions = (
        f'<svg class="chart" width="0" height="0" style="position: absolute" aria-hidden="true">{svg.hatches()}</svg>'
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n{svg.STYLE}\n</style>\n</head>\n<body>\n{definitions}\n<h1>expertwire bench</h1>\n"
        f'{sections}\n<p class="legend">{escape(_LEGEND)}</p>\n</body>\n</html>\n'
    )


def _section(name: str, report: Report) -> str:
    rows = rows_of(report)
    charts = "\n".join(f"<figure>{svg.draw(chart)}</figure>" for chart in charts_of(rows))
    tables = "\n".join(_run_table(run) for run in report.runs)
    return (
        f"<section>\n<header>\n<h2>{escape(name)}</h2>\n{_facts(report)}\n</header>\n"
        f'<div class="charts">\n{charts}\n</div>\n{tables}\n</section>'
    )


def _facts(report: Report) -> str:
    facts = {
        "date": report.date,
        "command": report.command,
        "machine": {name.replace("_", " "): value for name, value in report.machine.items()},
        "versions": report.versions,
        "method": method(report.settings),
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{_fact(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{rows}</table>"


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{escape(name)} {_fact(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return f"<code>{escape(shlex.join(value))}</code>"
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _run_table(run: Run) -> str:
    rows = rows_of_run(run)
    measured = list(dict.fromkeys(row.lib for row in rows))
    ratios = measured if len(measured) > 1 else []
    headings = ("min", "median", "p99", "max", "fastest", "GB/s", "spread", *(f"x {lib}" for lib in ratios))
    head = "<th>LIB</th><th>phase</th>" + "".join(f'<th class="n">{escape(text)}</th>' for text in headings)
    body = "".join(_row(row, rows, ratios) for row in rows)
    notes = "".join(_note(result) for result in run.results if not result.phases or result.missing)
    table = f"<thead><tr>{head}<th>notes</th></tr></thead><tbody>{body}</tbody>" if rows else ""
    caption = escape(f"{sizes(run.problem)}  {way(run.problem)}")
    return f'<div class="wide"><table><caption>{caption}</caption>{table}</table></div>\n<ul>{notes}</ul>'


def _row(row: Row, rows: list[Row], ratios: list[str]) -> str:
    figures = row.figures
    times = (figures.min_us, figures.median_us, figures.p99_us, figures.max_us, figures.fastest_rank_us)
    cells = [*(f"{time:.1f}" for time in times), f"{figures.gb_per_s:.2f}", f"{figures.spread:.0%}"]
    cells += _ratio_cells(row, rows, ratios)
    numbers = "".join(f'<td class="n">{text}</td>' for text in cells)
    own = list(row.result.phases)
    first, last = row.phase == own[0], row.phase == own[-1]
    notes = f'<td rowspan="{len(own)}">{escape(row.result.notes)}</td>' * first
    kind = ' class="last"' * last
    return f"<tr{kind}><td>{escape(row.lib)}</td><td>{row.phase}</td>{numbers}{notes}</tr>"


def _ratio_cells(row: Row, rows: list[Row], ratios: list[str]) -> Iterable[str]:
    others = {other.lib: other.figures for other in rows if other.phase == row.phase}
    for lib in ratios:
        if lib == row.lib or lib not in others:
            yield "-"
        else:
            yield ratio_text(row.figures, others[lib])


def _note(result: LibResult) -> str:
    if result.status is Status.OK:
        said = "; ".join(f"no {phase}: {why}" for phase, why in result.missing.items())
    else:
        said = f"{'FAILED' if result.status is Status.FAILED else 'no figures'}: {result.reason}"
    return f'<li class="{result.status.value}"><b>{escape(result.lib)}</b>: {escape(said)}</li>'
