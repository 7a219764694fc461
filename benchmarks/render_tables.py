"""Make the tables and figures of docs/benchmarks.md, and the table of README.md, from committed JSON.

A table stands between ``<!-- table: PREFIX KIND -->`` and ``<!-- end -->``, a figure between ``<!-- figure: PREFIX SIZE
-->`` and ``<!-- end -->``. PREFIX names the files ``benchmarks/results/PREFIX.json`` and ``PREFIX-*.json`` of
``expertwire bench --json``, whose runs are taken together. ``--check`` changes nothing and fails if something is out of
date.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prediction import prediction_table
from tables import busy_before, code, markdown

from expertwire.bench import svg
from expertwire.bench.charts import Lines, digits
from expertwire.bench.figures import SWEPT, sweep
from expertwire.bench.rows import (
    Row,
    main_rows,
    method,
    ratio_text,
    rows_of,
    rows_of_run,
    sizes,
    two_digits,
    way,
    workload_name,
)
from expertwire.bench.schema import PHASES, Problem, Report
from expertwire.bench.stored import read_report
from expertwire.bench.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
CHECKS = RESULTS / "checks"
BARS = ROOT / "benchmarks" / "cpu_bars.json"
GPU_BARS = ROOT / "benchmarks" / "gpu_bars.json"
_PLACE = re.compile(
    r"(<!-- (?P<what>table|figure): (?P<prefix>[\w-]+) (?P<kind>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)
_NOTHING = "*Not measured yet.*\n"
OURS, FLOOR = "expertwire", "floor"


@functools.cache
def reports(prefix: str) -> list[Report]:
    """Return the reports whose files begin with a prefix."""
    paths = sorted(path for path in RESULTS.glob("*.json") if f"{path.stem}-".startswith(f"{prefix}-"))
    return [read_report(path) for path in paths]


def all_rows(prefix: str) -> list[Row]:
    """Return the rows of all reports of a prefix."""
    return [row for report in reports(prefix) for row in rows_of(report)]


def machine_table(prefix: str) -> str:
    """Return what was measured on, when, how, and with which commands."""
    found = reports(prefix)
    first = found[0]
    facts = {name.replace("_", " "): value for name, value in first.machine.items()}
    rows = [
        ["date", " to ".join(sorted({min(one.date for one in found), max(one.date for one in found)}))],
        *(["command", code(shlex.join(one.command))] for one in found),
        *([name, ", ".join(map(str, value if isinstance(value, list) else [value]))] for name, value in facts.items()),
        ["versions", ", ".join(f"{name} {version}" for name, version in first.versions.items())],
        ["method", "; ".join(dict.fromkeys(method(one.settings) for one in found))],
    ]
    if busy := next(filter(None, (busy_before(one.machine) for one in found)), ""):
        rows.append(["**busy**", busy])
    return markdown(["", ""], rows)


def workloads_table(prefix: str) -> str:
    """Return a row for each named shape and way to run it: a pair of each library."""
    return _pairs_table([row for row in _workload_rows(prefix) if row.operation == "pair"], workload_name)


def _workload_rows(prefix: str) -> list[Row]:
    """Return the rows of named shapes with uniform routing and grid sizes of the library's own."""
    rows = [row for row in all_rows(prefix) if workload_name(row.problem)]
    rows = [row for row in rows if row.problem.routing == "uniform" and not row.problem.num_blocks]
    return sorted(rows, key=lambda row: list(WORKLOADS).index(workload_name(row.problem)))


def routings_table(prefix: str) -> str:
    """Return a row for each problem whose routing is not uniform: a pair of each library."""
    rows = [row for row in all_rows(prefix) if row.operation == "pair" and row.problem.routing != "uniform"]
    return _pairs_table(rows, sizes) if rows else _NOTHING


def operations_table(prefix: str) -> str:
    """Return a row for each named shape, way and library: the median of each phase but the pairs."""
    rows = _workload_rows(prefix)
    phases = [phase for phase in PHASES if any(row.phase == phase for row in rows) and not phase.startswith("pair")]
    medians = {(row.problem, row.lib, row.phase): row.figures.median_us for row in rows}
    lines = [
        [workload_name(problem), way(problem), lib]
        + [digits(medians[problem, lib, phase]) if (problem, lib, phase) in medians else "" for phase in phases]
        for problem, lib in dict.fromkeys((row.problem, row.lib) for row in rows)
    ]
    return markdown(["shape", "layout, combine, payload", "LIB", *phases], lines) if phases else _NOTHING


def _pairs_table(rows: list[Row], name: Callable[[Problem], str]) -> str:
    others = [lib for lib in dict.fromkeys(row.lib for row in rows) if lib not in (OURS, FLOOR)]
    launched = any(row.is_launch for row in rows)
    compared = any(row.lib == FLOOR for row in rows)
    headings = ["shape", "layout, combine, payload", "expertwire", "p99", "spread", *(["floor", "x floor"] * compared)]
    headings += ["launches"] * launched + [f"{lib} (times expertwire)" for lib in others]
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows):
        own = {(row.lib, row.phase): row for row in rows if row.problem == problem}
        ours, floor = own.get((OURS, "pair")), own.get((FLOOR, "pair"))
        if ours is None:
            continue
        figures = ours.figures
        cells = [name(problem), way(problem), f"**{figures.median_us:.1f}**"]
        cells += [f"{figures.p99_us:.1f}", f"{figures.spread:.0%}"]
        cells += (
            [f"{floor.figures.median_us:.1f}", ratio_text(ours.figures, floor.figures)] if floor else ["", ""]
        ) * compared
        launch = own.get((OURS, "pair-launch"))
        cells += [f"{launch.figures.median_us:.1f}" if launch else ""] * launched
        lines.append(cells + [_times_ours(own, lib) for lib in others])
    return markdown(headings, lines)


def _times_ours(own: dict[tuple[str, str], Row], lib: str) -> str:
    """Return a library's median, and how many times ours that is, both captured or both launched."""
    for phase in ("pair", "pair-launch"):
        if (lib, phase) in own:
            row, ours = own[lib, phase], own.get((OURS, phase))
            how = ", launches" if phase == "pair-launch" else ""
            return f"{row.figures.median_us:.1f}{how}" + (f" ({ratio_text(row.figures, ours.figures)})" if ours else "")
    return ""


def phases_table(prefix: str) -> str:
    """Return every library and phase of every run."""
    headings = [
        "R",
        "T",
        "layout",
        "LIB",
        "phase",
        "min",
        "median",
        "p99",
        "max",
        "fastest",
        "GB/s",
        "spread",
        "x floor",
    ]
    lines = []
    for report in reports(prefix):
        for run in report.runs:
            for row in rows_of_run(run):
                figures = row.figures
                times = (figures.min_us, figures.median_us, figures.p99_us, figures.max_us, figures.fastest_rank_us)
                ratio = figures.ratio_to.get(FLOOR)
                problem = run.problem
                lines.append([
                    *(str(problem.num_ranks), str(problem.num_tokens), problem.layout.value, row.lib, row.phase),
                    *map(digits, times),
                    *(f"{figures.gb_per_s:.2f}", f"{figures.spread:.0%}", "" if ratio is None else two_digits(ratio)),
                ])  # fmt: skip
    return markdown(headings, lines)


def sweep_table(prefix: str, size: str) -> str:
    """Return a table for each set of problems that differ in one size alone: a row for each library."""
    text = ""
    for chart in _sweeps(prefix, size):
        values = chart.x_ticks
        lines = []
        for series in chart.series:
            known = dict(series.points)
            lines.append([series.name, *(f"{known[value]:.1f}" if value in known else "" for value in values)])
        text += f"{chart.title}\n\n" + markdown(["", *(f"{value:g}" for value in values)], lines) + "\n"
    return text.rstrip("\n") + "\n" if text else _NOTHING


def _sweeps(prefix: str, size: str) -> list[Lines]:
    """Return the lines over one size; two shapes that happen to differ in it alone are no sweep."""
    return [chart for chart in sweep(_pairs(prefix), size) if len(chart.x_ticks) > 2]


def _pairs(prefix: str) -> list[Row]:
    return [row for row in main_rows(all_rows(prefix)) if row.operation == "pair"]


def figure(prefix: str, size: str) -> tuple[str, dict[str, str]]:
    """Return links to the lines over one size, and the files that they lead to by name."""
    files = {}
    links = ""
    for number, chart in enumerate(_sweeps(prefix, size), 1):
        name = f"{prefix}-{size.replace('_', '-')}-{number}.svg"
        files[name] = svg.draw(chart, standalone=True)
        links += f"![{chart.title}](figures/{name})\n"
    return links or _NOTHING, files


def bars_table(prefix: str) -> str:
    """Return each figure of the CPU backend with its bar."""
    del prefix
    lines = []
    for bar in json.loads(BARS.read_text(encoding="utf-8")):
        bound = f"{'at most' if bar['at_most'] else 'at least'} {bar['bar']:g} {bar['unit']}"
        met, spread = "yes" if bar["met"] else "**no**", f"{bar['spread']:.0%}" if bar.get("spread") else ""
        lines.append([bar["what"], f"{bar['measured']:.3g} {bar['unit']}", spread, bound, met])
    return markdown(["what", "measured", "spread", "bar", "met"], lines)


def gpu_bars_table(prefix: str) -> str:
    """Return the captured pair of each shape and way for which there is a bar, with the bar and the floor."""
    rows = [row for row in _workload_rows(prefix) if row.phase == "pair"]
    medians = {(way(row.problem), workload_name(row.problem), row.lib): row.figures.median_us for row in rows}
    lines = []
    for how, bars in json.loads(GPU_BARS.read_text(encoding="utf-8")).items():
        for name, bar in bars.items():
            ours, floor = (medians.get((how, name, lib)) for lib in (OURS, FLOOR))
            if ours is None or floor is None:
                continue
            met = "yes" if round(ours, 1) <= bar else f"**{ours / bar - 1:.0%} over**"
            lines.append([how, name, f"{ours:.1f}", f"{bar:.1f}", met, f"{floor:.1f}", f"{ours - floor:.1f}"])
    headings = ["layout, combine, payload", "shape", "expertwire", "bar", "met", "floor", "above the floor"]
    return markdown(headings, lines)


def headline_table(prefix: str) -> str:
    """Return the captured pair of each named shape in both layouts, beside the slower of their floors."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in _workload_rows(prefix):
        if row.phase == "pair" and way(row.problem).endswith("-major, rank-local-reduce, bf16"):
            found.setdefault(sizes(row.problem), {})[row.problem.layout.name, row.lib] = row.figures.median_us
    layouts = ("RANK_MAJOR", "EXPERT_MAJOR")
    whole = {name: own for name, own in found.items() if {(layout, OURS) for layout in layouts} <= own.keys()}
    lines = [
        [
            name,
            *(f"{own[layout, OURS]:.1f}" for layout in layouts),
            f"{max(own[layout, FLOOR] for layout in layouts):.1f}",
        ]
        for name, own in whole.items()
    ]
    return markdown(["", *(f"`{layout}`" for layout in layouts), "raw copies of the rows"], lines)


def blocks_table(prefix: str) -> str:
    """Return a row for each shape and way that was measured with several grid sizes, the communicator's own last."""
    by_problem: dict[Problem, dict[int, float]] = {}
    for row in _pairs(prefix):
        if row.lib == OURS and not row.is_launch:
            size = max(row.problem.num_blocks, default=0)
            by_problem.setdefault(replace(row.problem, num_blocks=()), {})[size] = row.figures.median_us
    swept = {problem: own for problem, own in by_problem.items() if 0 in own and len(own) > 1}
    sizes_given = sorted({size for own in swept.values() for size in own if size})
    lines = []
    for problem, own in swept.items():
        cells = [f"{own[size]:.1f} ({two_digits(own[size] / own[0])} x)" if size in own else "" for size in sizes_given]
        lines.append([sizes(problem), way(problem), *cells, f"{own[0]:.1f}"])
    headings = ["shape", "layout, combine, payload", *map(str, sizes_given), "all"]
    return markdown(headings, lines) if lines else sweep_table(prefix, "num_blocks")


def overlap_table(prefix: str) -> str:
    """Return a row for each problem that was measured with ``--overlap gemm``: every order of two micro-batches."""
    lines = []
    for run in (run for report in reports(prefix) for run in report.runs):
        for result in run.results:
            if result.hidden_us:
                figures = {phase: result.phases[phase].median_us for phase in PHASES if phase.startswith("batches-")}
                hidden = {phase: f" (hides {time:.1f})" for phase, time in result.hidden_us.items()}
                cells = [f"{time:.1f}{hidden.get(phase, '')}" for phase, time in figures.items()]
                lines.append([sizes(run.problem), way(run.problem), *cells])
    names = (phase.removeprefix("batches-").replace("-", " ") for phase in PHASES if phase.startswith("batches-"))
    return markdown(["shape", "layout, combine, payload", *names], lines) if lines else _NOTHING


def check_table(prefix: str) -> str:
    """Return what tools/gpu_check.sh found."""
    path = CHECKS / f"{prefix}.json"
    if not path.exists():
        return "*Not run yet.*\n"
    check = json.loads(path.read_text(encoding="utf-8"))
    facts = [["date", check["date"]], ["command", code(check["command"])], ["GPUs", ", ".join(check["gpus"])]]
    facts += [["driver", check["driver"]], ["versions", ", ".join(" ".join(one) for one in check["versions"].items())]]
    groups = [
        [
            *(one["name"], str(one["passed"]), str(len(one["failures"]))),
            *(str(sum(one["skipped"].values())), str(one["seconds"]), one["problem"]),
        ]
        for one in check["runs"]
    ]
    total = ["all", *(str(check[name]) for name in ("passed", "failed", "skipped")), "", ""]
    headings = ["group", "passed", "failed", "skipped", "seconds", ""]
    return markdown(["", ""], facts) + "\n" + markdown(headings, [*groups, total])


def predicted(prefix: str) -> str:
    """Return what eight GPUs are predicted to need."""
    return prediction_table(_pairs(prefix))


TABLES: dict[str, Callable[[str], str]] = {
    "machine": machine_table,
    "workloads": workloads_table,
    "routings": routings_table,
    "operations": operations_table,
    "phases": phases_table,
    "bars": bars_table,
    "check": check_table,
    "prediction": predicted,
    **{size.replace("_", "-"): functools.partial(sweep_table, size=size) for size in SWEPT},
    "num-blocks": blocks_table,
    "gpu-bars": gpu_bars_table,
    "headline": headline_table,
    "overlap": overlap_table,
}
_WITHOUT_REPORTS = {"bars", "check"}


def render(page: str) -> tuple[str, dict[str, str]]:
    """Return the page with every table and link made anew, and the files of figures by name."""
    files: dict[str, str] = {}

    def made(found: re.Match[str]) -> str:
        prefix, kind = found["prefix"], found["kind"]
        if kind not in _WITHOUT_REPORTS and not reports(prefix):
            text = _NOTHING
        elif found["what"] == "table":
            text = TABLES[kind](prefix)
        else:
            text, drawn = figure(prefix, kind.replace("-", "_"))
            files.update(drawn)
        return f"{found[1]}\n{text}\n{found[5]}"

    return _PLACE.sub(made, page), files


def main() -> int:
    """Render or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page, readme = (path.read_text(encoding="utf-8") for path in (PAGE, README))
    text, files = render(page)
    front, _ = render(readme)
    stored = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    if options.check:
        is_old = (text, files, front) != (page, stored, readme)
        if is_old:
            print(
                "README.md, docs/benchmarks.md or docs/figures is out of date: run benchmarks/render_tables.py",
                file=sys.stderr,
            )
        return int(is_old)
    PAGE.write_text(text, encoding="utf-8")
    README.write_text(front, encoding="utf-8")
    FIGURES.mkdir(exist_ok=True)
    for name in stored.keys() - files.keys():
        (FIGURES / name).unlink()
    for name, drawing in files.items():
        (FIGURES / name).write_text(drawing, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
