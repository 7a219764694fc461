"""docs/benchmarks.md: its tables and figures come from committed results, and its prediction from its formula."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import reports
from expertwire.bench.rows import Row, rows_of
from expertwire.bench.schema import PHASES, Problem
from expertwire.bench.workloads import WORKLOADS
from expertwire.types import DispatchLayout

ROOT = Path(__file__).parents[1]
LATENCY = Problem(num_experts=8, num_tokens=32, num_topk=8)
LAUNCHES = ("dispatch-launch", "combine-launch", "pair-launch")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that renders, and the modules beside it, for one test."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("render_tables")
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def results(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that the script reads in place of the committed results."""
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "CHECKS", tmp_path)
    return tmp_path


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table below its headings."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:] if "|" in line]


def test_tables_and_figures_are_those_of_the_committed_results(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    text, files = script.render(page)
    assert text == page, "run: python benchmarks/render_tables.py"
    readme = script.README.read_text(encoding="utf-8")
    assert script.render(readme)[0] == readme, "run: python benchmarks/render_tables.py"
    assert files == {path.name: path.read_text(encoding="utf-8") for path in script.FIGURES.glob("*.svg")}
    assert page.count("<!-- end -->") == page.count("<!-- table: ") + page.count("<!-- figure: ") > 0


def test_a_table_of_micro_batches_says_what_they_hide(script: ModuleType, results: Path) -> None:
    orders = [phase for phase in PHASES if phase.startswith("batches-")]
    ours = reports.measured("expertwire", 10, (*reports.CPU_PHASES, *orders), noise=0)
    ours = replace(ours, hidden_us={"batches-two-streams": 3.25})
    reports.save(reports.report([(LATENCY, [ours, reports.measured("floor", 8)])]), results / "gpu.json")
    (line,) = cells(script.overlap_table("gpu"))
    assert [cell.partition(" ")[2] for cell in line[2:]] == ["", "", "", "(hides 3.2)", ""]
    reports.save(reports.report([(LATENCY, [reports.measured("floor", 8)])]), results / "cpu.json")
    assert "Not measured yet" in script.overlap_table("cpu")


def test_the_page_names_every_workload() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for w in WORKLOADS.values():
        assert f"| `{w.name}` | {w.num_tokens} | {w.num_experts} | {w.num_topk} | {w.hidden_size} |" in page


def test_the_page_names_every_phase() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert not [phase for phase in PHASES if f"`{phase}`" not in page]


def test_a_table_of_shapes_holds_every_library(script: ModuleType, results: Path) -> None:
    ours = reports.measured("expertwire", 10, (*reports.CPU_PHASES, *LAUNCHES))
    peers = [reports.measured("floor", 8), reports.measured("torch-a2a", 60, LAUNCHES, noise=0)]
    reports.save(reports.report([(LATENCY, [ours, *peers])]), results / "gpu.json")
    fp = replace(LATENCY, layout=DispatchLayout.RANK_MAJOR)
    reports.save(reports.report([(fp, [reports.measured("expertwire", 9)])]), results / "gpu-more.json")
    reports.save(reports.simple(), results / "gpu2.json")
    first, second = cells(script.workloads_table("gpu"))
    assert first == [
        *("mscclpp-latency", "rank-major, rank-local-reduce, bf16", "**9.0**", "9.0", "0%"),
    ]
    assert second[:3] == ["mscclpp-latency", "expert-major, rank-local-reduce, bf16", "**10.0**"]
    assert second[5:] == ["8.0", "1.25", "10.0", "60.0, launches (6.00)"]
    operations = cells(script.operations_table("gpu"))
    assert operations[-1][2:] == ["torch-a2a", "", "", "30", "30"]
    assert script.routings_table("gpu") == "*Not measured yet.*\n"


def test_sweeps_become_tables_and_figures(script: ModuleType, results: Path) -> None:
    runs = [
        (replace(LATENCY, num_blocks=(count,)), [reports.measured("expertwire", 10 + 100 / count, noise=0)])
        for count in (8, 16, 32)
    ]
    reports.save(reports.report(runs), results / "gpu.json")
    page = "<!-- table: gpu num-blocks -->\n<!-- end -->\n<!-- figure: gpu num-blocks -->\nold\n<!-- end -->\n"
    text, files = script.render(page)
    assert "| expertwire | 22.5 | 16.2 | 13.1 |" in text
    assert "](figures/gpu-num-blocks-1.svg)" in text
    assert "old" not in text
    assert files["gpu-num-blocks-1.svg"].startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_grid_sizes_and_bars_are_set_against_the_whole_grid_and_the_floor(script: ModuleType, results: Path) -> None:
    runs = [
        (replace(LATENCY, num_blocks=(count,)), [reports.measured("expertwire", 100 / count, noise=0)])
        for count in (4, 8)
    ]
    runs.append((LATENCY, [reports.measured("expertwire", 10.5, noise=0), reports.measured("floor", 8, noise=0)]))
    reports.save(reports.report(runs), results / "gpu.json")
    assert cells(script.blocks_table("gpu"))[0][2:] == ["25.0 (2.38 x)", "12.5 (1.19 x)", "10.5"]
    assert cells(script.gpu_bars_table("gpu"))[0][2:] == ["10.5", "10.0", "**5% over**", "8.0", "2.5"]


def test_what_has_not_been_measured_says_so(script: ModuleType, results: Path) -> None:
    page = "<!-- table: none workloads -->\n<!-- end -->\n<!-- table: none check -->\n<!-- end -->\n"
    assert not list(results.iterdir())
    assert script.render(page)[0].count("*Not measured yet.*") == 1
    assert script.render(page)[0].count("*Not run yet.*") == 1


def test_a_check_of_gpus_becomes_a_table(script: ModuleType, results: Path) -> None:
    group = {"name": "cases", "passed": 5, "failures": {"a": "b"}, "skipped": {"c": 2}, "seconds": 9, "problem": ""}
    check = {"date": "d", "command": "c", "gpus": ["a"], "driver": "1", "passed": 5, "failed": 1, "skipped": 2}
    check |= {"versions": {"torch": "2"}, "runs": [group]}
    (results / "gpu.json").write_text(json.dumps(check), encoding="utf-8")
    table = script.check_table("gpu")
    assert "| cases | 5 | 1 | 2 | 9 |  |" in table
    assert "| versions | torch 2 |" in table


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (1.1, True)])
def test_a_busy_machine_is_marked(script: ModuleType, results: Path, load: float, busy: bool) -> None:
    reports.save(replace(reports.simple(), machine={"usable_cores": 2, "load_average_1min": load}), results / "m.json")
    assert ("**busy**" in script.machine_table("m")) is busy


def test_the_prediction_is_its_formula(script: ModuleType) -> None:
    prediction = sys.modules["prediction"]
    assert script.predicted
    eight = replace(LATENCY, num_ranks=8)
    assert prediction.rows_sent(eight) == 32 * 7  # a token chooses all eight experts, and so all eight ranks
    assert prediction.megabytes(eight) == pytest.approx(3.21, abs=0.005)
    assert prediction.wire_us(eight) == pytest.approx(17.4, abs=0.05)
    assert prediction.rows_sent(replace(eight, num_topk=1)) == pytest.approx(32 * 7 / 8)

    def pair(problem: Problem, us: float) -> Row:
        (row,) = rows_of(reports.report([(problem, [reports.measured("expertwire", us, ["pair"], noise=0)])]))
        return row

    one = Problem(num_experts=256, num_tokens=1)
    rows = [pair(LATENCY, 12.48), pair(one, 7.08), pair(replace(LATENCY, num_blocks=(8,)), 1)]
    first, second = cells(prediction.prediction_table(rows))
    assert first == [
        *("mscclpp-latency", "expert-major", "12.5", "2.5", "3.21", "17.4", "**24.4 to 27.4**", "27", "51.08"),
    ]
    assert second[0] == "single-token"
