"""What is done with benchmark files: reading them back, the page and the pictures, and comparisons."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import reports
from expertwire.bench import stored
from expertwire.bench.charts import Axis, Bars, Lines
from expertwire.bench.figures import charts_of
from expertwire.bench.page import make_page
from expertwire.bench.report import print_report
from expertwire.bench.rows import method, rows_of
from expertwire.bench.schema import LibResult, Problem, Report, Status
from expertwire.bench.summary import hidden_us, summarize
from expertwire.errors import InvalidArgumentError
from expertwire.types import DispatchLayout

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
LAUNCHES = ("dispatch-launch", "combine-launch", "pair-launch")


def validate(values: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(stored.SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(values)


def gpu_report() -> Report:
    """Two layouts of one shape, a sweep of T, and a sweep of grid sizes; one library is launched alone."""

    def libs(base: float) -> list[LibResult]:
        ours = reports.measured("expertwire", 1.3 * base, (*reports.CPU_PHASES, *LAUNCHES))
        other = reports.measured("torch-a2a", 9 * base, LAUNCHES)
        return [ours, reports.measured("floor", base), other]

    shape = Problem(num_experts=256, num_tokens=128)
    runs = [(replace(shape, num_tokens=tokens), libs(5 + tokens / 10)) for tokens in (1, 8, 64)]
    runs += [(replace(shape, layout=layout), libs(10)) for layout in list(DispatchLayout)[:2]]
    runs += [(replace(shape, num_blocks=(count,)), libs(5 + 100 / count)) for count in (16, 32)]
    return reports.report(runs)


# Files


def test_the_schema_that_is_shipped_is_that_of_the_dataclasses() -> None:
    assert json.loads(stored.SCHEMA_FILE.read_text(encoding="utf-8")) == stored.json_schema(), (
        "run: python -m expertwire.bench.stored > src/expertwire/bench/schema.json"
    )


def test_the_schema_describes_every_field() -> None:
    schema = stored.json_schema()
    objects = [schema, *(one for one in schema["$defs"].values() if "properties" in one)]
    fields = {name: said for one in objects for name, said in one["properties"].items()}
    assert [name for name, said in fields.items() if "description" not in said] == ["schema"]


def test_what_a_gemm_hides_is_said_in_the_file_and_below_the_table(tmp_path: Path) -> None:
    times = {"gemm": 300, "pair": 100, "sequential": 390, "two-streams": 330, "two-phases": 350}
    samples = {f"batches-{phase}": np.full((2, 50), 1000 * time) for phase, time in times.items()}
    phases = summarize(samples, reports.SETTINGS, 1e6)
    ours = LibResult("expertwire", Status.OK, samples=samples, phases=phases, hidden_us=hidden_us(phases))
    assert ours.hidden_us == {"batches-two-streams": 60.0, "batches-two-phases": 40.0}
    assert {figures.gb_per_s for figures in phases.values()} == {0}
    assert hidden_us(reports.measured("floor", 1.0).phases) == {}
    one = reports.report([(Problem(num_tokens=4, num_topk=2, hidden_size=256), [ours])])
    validate(one.to_json())
    assert stored.read_report(reports.save(one, tmp_path / "one.json")).runs[0].results[0].hidden_us == ours.hidden_us
    console = Console(file=io.StringIO(), width=200)
    print_report(one, console)
    assert (
        "expertwire: of 100.0 us for two pairs, GEMMs of 8 x 256 x 256 each hide 60.0 us (60%) in two streams, "
        "40.0 us (40%) in two phases"
    ) in console.file.getvalue()  # type: ignore[attr-defined]
    assert make_page([("one", one)])


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    skipped = LibResult("deepep", Status.SKIPPED, "not installed")
    one = reports.report([(Problem(num_blocks=(8, 16)), [reports.measured("floor", 3.0), skipped])])
    validate(one.to_json())
    again = stored.read_report(reports.save(one, tmp_path / "a.json"))
    assert again.to_json() == one.to_json()
    assert again.runs[0].problem == one.runs[0].problem


def test_what_the_command_writes_follows_the_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = ["-e", "8", "-t", "2,5", "-d", "128", "-k", "3", "--device", "cpu", "--threads"]
    path = tmp_path / "out.json"
    outputs = ["--json", path, "--plot", tmp_path / "out.html"]
    assert (
        reports.run_cli(monkeypatch, "--ep-lib", "expertwire,floor,deepep", *shape, "-w", "0", "-i", "4", *outputs) == 0
    )
    validate(json.loads(path.read_text(encoding="utf-8")))
    assert len(rows_of(stored.read_report(path))) == 2 * 2 * 3
    assert (tmp_path / "out.html").read_text(encoding="utf-8").count('role="img"') == 2 + 1 + 2


def test_a_file_of_an_older_version_has_the_defaults(tmp_path: Path) -> None:
    values = reports.simple().to_json()
    del values["settings"]["device"]
    del values["runs"][0]["problem"]["num_blocks"]
    validate(values)
    (tmp_path / "a.json").write_text(json.dumps(values), encoding="utf-8")
    assert stored.read_report(tmp_path / "a.json").to_json() == reports.simple().to_json()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_are_reports(path: Path) -> None:
    validate(json.loads(path.read_text(encoding="utf-8")))
    assert rows_of(stored.read_report(path))


def change(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(values: dict[str, Any]) -> None:
        *path, last = (int(key) if key.isdigit() else key for key in place.split("/"))
        for key in path:
            values = values[key]
        if value is None:
            del values[last]
        else:
            values[last] = value

    return apply


SPOILED = {
    "another schema": (change("schema", "other/2"), "schema is 'other/2', must be 'expertwire-bench/1'"),
    "no date": (change("date", None), "the file: 'date' is missing"),
    "more": (change("settings/more", 1), "settings: 'more' is not known here"),
    "a word for a number": (change("settings/iters", "9"), 'settings.iters: "9" is no integer'),
    "an unknown layout": (
        change("runs/0/problem/layout", "x"),
        'runs[0].problem.layout: "x" is not among expert_major',
    ),
    "uneven samples": (
        change("runs/0/results/0/samples/pair", [[1], [1, 2]]),
        "runs[0].results[0].samples.pair: must be whole numbers of at least 0, [rank][iteration]",
    ),
    "negative samples": (
        change("runs/0/results/0/samples/pair", [[1, -1]]),
        "runs[0].results[0].samples.pair: must be whole numbers of at least 0, [rank][iteration]",
    ),
    "no array": (change("runs", {}), "runs: {} is no array"),
    "a median below 0": (
        change("runs/0/results/1/phases/pair/median_us", -1.5),
        "runs[0].results[1].phases.pair.median_us: -1.5 is below 0",
    ),
    "a ratio below 0": (
        change("runs/0/results/0/phases/pair/ratio_to/floor", -1),
        "runs[0].results[0].phases.pair.ratio_to.floor: -1 is below 0",
    ),
    "bytes below 0": (change("runs/0/bytes_per_rank", -1), "runs[0].bytes_per_rank: -1 is below 0"),
    "a phase without samples": (
        change("runs/0/results/1/samples/combine", None),
        "runs[0].results[1].phases.combine: there are no samples of it",
    ),
    "no samples": (
        change("runs/0/results/1/samples", None),
        "runs[0].results[1].phases.dispatch: there are no samples of it",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_file_is_refused_by_place(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], said: str) -> None:
    values = reports.simple().to_json()
    spoil(values)
    (tmp_path / "a.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=re.escape(f"a.json: {said}")):
        stored.read_report(tmp_path / "a.json")


@pytest.mark.parametrize("name", sorted(SPOILED.keys() - {"uneven samples", "a phase without samples", "no samples"}))
def test_the_schema_refuses_it_too(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    values = reports.simple().to_json()
    SPOILED[name][0](values)
    with pytest.raises(jsonschema.ValidationError):
        validate(values)


@pytest.mark.parametrize("text", ["", "{", "[1]", "NaN", pytest.param("[" * 100000, id="deep")])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"a\.json: (not JSON|schema is None)"):
        stored.read_report(tmp_path / "a.json")


# The page


def test_what_is_drawn() -> None:
    charts = charts_of(rows_of(gpu_report()))
    bars = [chart for chart in charts if isinstance(chart, Bars)]
    assert [chart.title for chart in bars] == [
        "single-token: T 1  E 256  K 8  H 7168  R 2  expert-major, rank-local-reduce, bf16",
        "T 8  E 256  K 8  H 7168  R 2  expert-major, rank-local-reduce, bf16",
        "T 64  E 256  K 8  H 7168  R 2  expert-major, rank-local-reduce, bf16",
        "deepseek-decode: T 128  E 256  K 8  H 7168  R 2",
    ]
    assert [bar.group for bar in bars[0].bars] == ["dispatch"] * 3 + ["combine"] * 3 + ["pair"] * 3
    assert list(dict.fromkeys(bar.group for bar in bars[3].bars)) == [
        "expert-major, rank-local-reduce, bf16",
        "rank-major, rank-local-reduce, bf16",
        "expert-major, rank-local-reduce, bf16, 16 blocks",
        "expert-major, rank-local-reduce, bf16, 32 blocks",
    ]
    tokens, grids = [chart for chart in charts if isinstance(chart, Lines) and not chart.steps]
    assert [series.name for series in tokens.series] == ["expertwire", "floor", "torch-a2a, launches"]
    assert [x for x, _ in tokens.series[0].points] == [1, 8, 64, 128]
    assert [x for x, _ in grids.series[0].points] == [16, 32]
    assert tokens.series[0].points[0][1] == pytest.approx(1.3 * 5.1, rel=0.01)
    spread = next(chart for chart in charts if isinstance(chart, Lines) and chart.steps)
    assert [y for _, y in spread.series[0].points][-1] == 100


def test_the_page_stands_alone_and_is_well_formed() -> None:
    page = make_page([("a & b.json", gpu_report()), ("c.json", reports.simple())])
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=|@import|https?:", page)
    assert "a &amp; b.json" in page
    assert "&lt;notes&gt;" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)  # noqa: S314 (our own page)
    assert page.count("<figure>") == len(charts_of(rows_of(gpu_report()))) + len(charts_of(rows_of(reports.simple())))


def test_the_page_names_packages_as_they_are_called() -> None:
    page = make_page([("a.json", replace(reports.simple(), versions={"ml_dtypes": "0.5"}))])
    assert "ml_dtypes 0.5" in page
    assert "usable cores 2" in page


@pytest.mark.parametrize(("device", "said"), [("cpu", "every timed pair checked"), ("cuda", "every round checked")])
def test_the_method_says_what_was_checked(device: str, said: str) -> None:
    assert said in method(replace(reports.SETTINGS, device=device, validate=True))
    assert "checked" not in method(replace(reports.SETTINGS, device=device))


def test_bars_are_as_long_as_their_medians() -> None:
    page = make_page([("a.json", reports.simple(ours_us=20))])
    first = re.findall(r"<svg[^>]*role.*?</svg>", page, re.DOTALL)[0]
    svg = ElementTree.fromstring(first)  # noqa: S314 (our own page)
    widths = {group.get("class"): [float(box.get("width", 0)) for box in group[:1]] for group in svg.iter("g")}
    assert widths["c1"][0] == pytest.approx(2 * widths["c0"][0], rel=0.01)


def test_differences_within_the_spread_are_marked() -> None:
    assert ">2.00<" in make_page([("a.json", reports.simple(20))])
    assert "~ 1.0" in make_page([("a.json", reports.simple(10.1, noise=0.1))])


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([0, 47], False, (0, 10, 20, 30, 40, 50)),
        ([0, 0], False, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        ([3, 450], True, (2, 5, 10, 20, 50, 100, 200, 500)),
        ([10], True, (5, 10, 20)),
    ],
)
def test_axes_have_round_ticks_around_all_values(values: list[float], log: bool, ticks: tuple[float, ...]) -> None:
    axis = Axis.of(values, log=log)
    assert axis.ticks == pytest.approx(ticks)
    assert axis.place(axis.low, 100, 200) == 100
    assert axis.place(axis.high, 100, 200) == pytest.approx(200)


@pytest.mark.parametrize("kind", ["html", "png"])
def test_report_writes_a_page_or_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    if kind == "png":
        pytest.importorskip("matplotlib")
    path = reports.save(reports.simple(), tmp_path / "a.json")
    output = tmp_path / f"out.{kind}"
    assert reports.run_cli(monkeypatch, "report", path, path, "-o", output) == 0
    assert output.read_bytes()[:4] == {"html": b"<!do", "png": b"\x89PNG"}[kind]
    assert sorted(tmp_path.iterdir()) == [path, output]


@pytest.mark.parametrize("arguments", [["report", "a.json", "-o", "out.png"], ["--plot", "out.png"]])
def test_a_picture_without_matplotlib_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.setattr("expertwire.bench.png.find_spec", lambda _name: None)
    monkeypatch.chdir(tmp_path)
    reports.save(reports.simple(), tmp_path / "a.json")
    assert reports.run_cli(monkeypatch, *arguments) == 2
    assert "needs matplotlib: pip install 'expertwire[plot]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# Mistakes

OTHER = replace(reports.simple(20), machine={**reports.MACHINE, "cpu": "b"})
ELSE = reports.report([(Problem(num_tokens=3), [reports.measured("floor", 1)])])

REFUSED = {
    "no file": (["report", "nosuch.json"], "bench report: nosuch.json: cannot read it (No such file or directory)"),
    "a folder": (["report", "."], "bench report: .: cannot read it (Is a directory)"),
    "another ending": (["report", "a.json", "-o", "a.pdf"], "a.pdf: must end with .html or .png"),
    "nowhere": (["report", "a.json", "-o", "nosuch/a.html"], "nosuch/a.html: cannot be written there"),
    "over a folder": (["report", "a.json", "-o", "d.html"], "d.html: cannot be written there"),
    "options before": (["-t", "8", "report", "a.json"], "--tokens stands before report, which does not measure"),
    "no number": (["compare", "a.json", "a.json", "--threshold", "nan"], "--threshold nan: must be a percentage"),
    "below zero": (["compare", "a.json", "a.json", "--threshold", "-1"], "--threshold -1: must be a percentage"),
    "mixed machines": (
        ["compare", "a.json", "other.json"],
        "bench compare: different machines: cpu is 'a cpu' in the first file and 'b' in the second",
    ),
    "nothing shared": (["compare", "a.json", "else.json"], "the two files share no problem, library and phase"),
    "no such library": (["compare", "a.json", "a.json", "--ep-lib", "x"], "library and phase of x: nothing to compare"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for one, name in ((reports.simple(20), "a"), (OTHER, "other"), (ELSE, "else")):
        reports.save(one, tmp_path / f"{name}.json")
    (tmp_path / "d.html").mkdir()
    before = sorted(tmp_path.iterdir())
    assert reports.run_cli(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert sorted(tmp_path.iterdir()) == before
