"""Comparisons of two benchmark files: what changed, what differs beside it, and what cannot be compared."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import reports
from expertwire.bench.compare import compare, print_comparison
from expertwire.bench.report import print_report
from expertwire.bench.schema import PHASES, LibResult, Problem, Report, Settings, Status
from expertwire.bench.summary import summarize
from expertwire.errors import InvalidArgumentError

BUSY = replace(reports.simple(20), machine={**reports.MACHINE, "load_average_1min": 9.0, "kernel": "Linux 9"})


def test_what_is_slower_beyond_the_spread_is_a_regression() -> None:
    found = compare(reports.simple(20), reports.simple(23))
    assert {change.before.lib: change.word for change in found.changes} == {"expertwire": "slower", "floor": "same"}
    assert len(found.regressions(0.05)) == 3
    assert found.regressions(0.2) == []


def test_what_is_within_the_spread_is_the_same() -> None:
    found = compare(reports.simple(20, noise=0.4), reports.simple(21, noise=0.4))
    (pair,) = (one for one in found.changes if (one.before.lib, one.before.phase) == ("expertwire", "pair"))
    assert pair.ratio == pytest.approx(1.05, rel=0.01)
    assert pair.spread > 0.05
    assert pair.word == "same"
    assert not found.regressions(0.01)


COMPARED = {
    "same": (reports.simple(20), [], 0, "0 faster, 0 slower, 6 same"),
    "faster": (reports.simple(15), [], 0, "3 faster, 0 slower, 3 same"),
    "slower": (reports.simple(23), [], 1, "3 slower by more than 5.0%"),
    "slower, allowed": (reports.simple(23), ["--threshold", "20"], 0, "0 slower by more than 20.0%"),
    "slower, elsewhere": (reports.simple(23), ["--ep-lib", "floor"], 0, "0 faster, 0 slower, 3 same"),
    "failed": (
        reports.report([(Problem(), [LibResult("expertwire", Status.FAILED, "broke"), reports.measured("floor", 10)])]),
        [],
        1,
        "expertwire: broke",
    ),
    "another machine, allowed": (
        replace(reports.simple(20), machine={**reports.MACHINE, "cpu": "b"}),
        ["--allow-different-machines"],
        0,
        "differs: cpu a cpu -> b",
    ),
    "new software": (replace(reports.simple(20), versions={"python": "3.13"}), [], 0, "differs: python 3.11.7 -> 3.13"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_compare_says_what_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    after, options, status, said = COMPARED[name]
    paths = [reports.save(one, tmp_path / file) for one, file in ((reports.simple(20), "a"), (after, "b"))]
    assert reports.run_cli(monkeypatch, "compare", *paths, *options) == status
    assert said in capsys.readouterr().out


def test_load_and_kernel_do_not_make_another_machine() -> None:
    assert "kernel Linux 6.1 -> Linux 9" in compare(reports.simple(20), BUSY).differences


def with_a_clock_that_stood() -> Report:
    """Two sizes; one library took no time at all, neither in this program nor beside a GEMM."""
    samples = {phase: np.zeros((2, 50), np.int64) for phase in (*reports.CPU_PHASES, "batches-pair")}
    floor = LibResult("floor", Status.OK, samples=samples, phases=summarize(samples, reports.SETTINGS, 1e6))
    floor = replace(floor, hidden_us={"batches-two-streams": 0.0})
    runs = [(replace(Problem(), num_tokens=tokens), [reports.measured("expertwire", 20), floor]) for tokens in (1, 128)]
    return reports.report(runs)


def test_medians_of_0_are_shown_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    print_report(with_a_clock_that_stood(), Console(file=io.StringIO()))
    stood = reports.save(with_a_clock_that_stood(), tmp_path / "a.json")
    usual = reports.save(reports.simple(20), tmp_path / "b.json")
    for kind in ("html", "png"):
        assert reports.run_cli(monkeypatch, "report", stood, "-o", tmp_path / f"out.{kind}") == 0
    assert reports.run_cli(monkeypatch, "compare", usual, stood) == 0
    assert reports.run_cli(monkeypatch, "compare", stood, usual) == 1
    words = [change.word for change in compare(with_a_clock_that_stood(), reports.simple(20)).changes]
    assert words == ["same"] * 3 + ["slower"] * 3
    itself = compare(with_a_clock_that_stood(), with_a_clock_that_stood()).changes
    assert {change.word for change in itself} == {"same"}


def measured_otherwise(**settings: object) -> Report:
    return replace(reports.simple(20), settings=replace(reports.SETTINGS, **settings))


def with_command(*words: str) -> Report:
    return replace(reports.simple(20), command=("expertwire", "bench", *words))


def with_bytes(num_bytes: float) -> Report:
    one = reports.simple(20)
    return replace(one, runs=(replace(one.runs[0], bytes_per_rank=num_bytes),))


UNLIKE = {
    "threads": (measured_otherwise(threads=True), "different settings: threads is False in the first file and True in"),
    "device": (measured_otherwise(device="cuda"), "different settings: device is 'cpu' in the first file and 'cuda'"),
    "graphs": (measured_otherwise(cuda_graph=False), "different settings: cuda_graph is True in the first file and"),
    "pairs": (measured_otherwise(iters_per_graph=9), "different settings: iters_per_graph is 50 in the first file and"),
    "MPI": (with_command("--nodes", "127.0.0.1"), "different settings: ranks over MPI is False in the first file and"),
    "MPI, one word": (with_command("--nodes=::1"), "different settings: ranks over MPI is False in the first file and"),
    "routing": (
        with_bytes(2e6),
        "different routings: mscclpp-bench: T 128  E 128  K 8  H 7168  R 2: bytes_per_rank is 1000000 in the first",
    ),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_measurements_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, turned: bool
) -> None:
    other, said = UNLIKE[name]
    paths = [reports.save(one, tmp_path / file) for one, file in ((reports.simple(20), "a"), (other, "b"))]
    assert reports.run_cli(monkeypatch, "compare", *(reversed(paths) if turned else paths)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert turned or f"expertwire bench compare: {said}" in printed.err


def test_other_settings_are_listed() -> None:
    other = measured_otherwise(iters=10, rounds=2, warmup=0, validate=True, overlap="gemm")
    said = ["warmup 10 -> 0", "iters 50 -> 10", "rounds 5 -> 2", "validate False -> True", "overlap none -> gemm"]
    assert list(compare(reports.simple(20), other).differences) == said


@pytest.mark.parametrize("name", [one.name for one in fields(Settings)])
def test_no_setting_differs_in_silence(name: str) -> None:
    value = getattr(reports.SETTINGS, name)
    other = measured_otherwise(**{name: not value if isinstance(value, bool) else value * 2 or "else"})
    try:
        said = compare(reports.simple(20), other).differences
    except InvalidArgumentError as error:
        said = (str(error),)
    assert [line for line in said if name in line]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_table_of_changes_is_whole_on_every_terminal(width: int) -> None:
    files = [reports.report([(Problem(), [reports.measured("mscclpp-cpp-bench", us, PHASES)])]) for us in (1e4, 1e5)]
    console = Console(file=(text := io.StringIO()), width=width)
    print_comparison(compare(*files), 0.05, console)
    rows = [line.split() for line in text.getvalue().splitlines() if line.startswith("mscclpp-cpp-bench ")]
    assert [row[1] for row in rows] == list(PHASES)
    assert {len(row) for row in rows} == {7}
    assert {(*row[4:5], row[6]) for row in rows} == {("+900.0%", "REGRESSION")}
