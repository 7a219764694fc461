"""Make the tables of docs/benchmarks.md from the JSON files in benchmarks/results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``python benchmarks/render_tables.py --check``
changes nothing and fails if one is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Json = dict[str, Any]


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def machine_table(result: Json) -> str:
    """Return what was measured on, when, and with which command."""
    machine, versions = result["machine"], result["versions"]
    rows = [
        ["date", result["date"]],
        ["command", f"`{' '.join(result['command'])}`"],
        ["CPU", f"{machine['cpu']} ({machine['architecture']}), {machine['usable_cores']} cores"],
        ["memory", f"{machine['memory_gib']} GiB"],
        ["kernel", machine["kernel"]],
        ["load before", _load(result)],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
    ]
    return _markdown(["", ""], rows)


def _load(result: Json) -> str:
    load = result.get("load_before")
    if load is None:
        return str(result["machine"]["load_average_1min"])
    return f"{load['load_average_1min']}" + ("" if load["quiet"] else f" (**busy**: above {load['most']:g})")


def bars_table(result: Json) -> str:
    """Return each figure with its bar."""
    rows = []
    for bar in result["bars"]:
        bound = f"{'at most' if bar['at_most'] else 'at least'} {bar['bar']:g} {bar['unit']}"
        met, spread = "yes" if bar["met"] else "**no**", f"{bar['spread']:.0%}" if bar.get("spread") else ""
        rows.append([bar["what"], f"{bar['measured']:.3g} {bar['unit']}", spread, bound, met])
    return _markdown(["what", "measured", "spread", "bar", "met"], rows)


def runs_table(result: Json) -> str:
    """Return every library and phase of every run, microseconds of the slowest rank."""
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
        "fastest rank",
        "GB/s",
        "spread",
        "x floor",
    ]
    rows = []
    for run in result["runs"]:
        problem = run["problem"]
        shape = [str(problem["num_ranks"]), str(problem["num_tokens"]), problem["layout"]]
        for lib in run["results"]:
            for phase, figures in lib["phases"].items():
                times = [
                    f"{figures[name]:.0f}" for name in ("min_us", "median_us", "p99_us", "max_us", "fastest_rank_us")
                ]
                ratio = figures["ratio_to"].get("floor")
                rest = [
                    f"{figures['gb_per_s']:.2f}",
                    f"{figures['spread']:.0%}",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
                rows.append([*shape, lib["lib"], phase, *times, *rest])
    return _markdown(headings, rows)


def gpu_table(result: Json) -> str:
    """Return the medians of a GPU run: a row for each way to run, a column for each shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    ways = list(dict.fromkeys(row["variant"] for row in result["rows"]))
    medians = {(row["variant"], row["shape"]): f"{row['median_us']:.1f}" for row in result["rows"]}
    return _markdown(["", *shapes], [[way, *(medians.get((way, shape), "") for shape in shapes)] for way in ways])


def gpus_table(result: Json) -> str:
    """Return which GPUs were measured, when, and with which command."""
    machine, versions = result["machine"], result["versions"]
    rows = [
        ["date", result["date"]],
        ["command", f"`{result['command']}`"],
        ["GPUs", machine["gpus"]],
        ["driver", machine["driver"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["method", result["method"]],
    ]
    return _markdown(["", ""], rows)


TABLES: dict[str, Callable[[Json], str]] = {
    "machine": machine_table,
    "bars": bars_table,
    "runs": runs_table,
    "gpu": gpu_table,
    "gpus": gpus_table,
}


def render(page: str, results: dict[str, Json]) -> str:
    """Return the page with every table made anew. A table is named RESULT-TABLE, such as ``cpu-bars``."""

    def table(found: re.Match[str]) -> str:
        result, _, kind = found["name"].rpartition("-")
        return f"{found[1]}\n{TABLES[kind](results[result])}\n{found[3]}"

    return _TABLE.sub(table, page)


def main() -> int:
    """Render or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    page = PAGE.read_text(encoding="utf-8")
    made = render(page, results)
    if options.check:
        if made != page:
            print("docs/benchmarks.md is out of date: run benchmarks/render_tables.py", file=sys.stderr)
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
