"""``expertwire bench``: options to problems, what is printed and written, and the tables of the page."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from expertwire import cli
from expertwire.bench.adapters import ADAPTERS
from expertwire.bench.command import WORKLOAD_HELP
from expertwire.bench.request import Request, Sweep, run_request
from expertwire.bench.schema import PHASES, Report, Settings
from expertwire.bench.workloads import WORKLOADS
from expertwire.errors import UnsupportedError
from expertwire.types import DispatchLayout
from reports import run_cli
from test_bench import WrongCombine

ROOT = Path(__file__).parents[1]


def test_sweeps_make_every_combination() -> None:
    problems = Sweep(tokens="1,8", layout="expert-major,RANK_MAJOR", workload="kimi-k3").problems()
    assert [(problem.layout, problem.num_tokens) for problem in problems] == [
        (layout, tokens) for layout in (DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR) for tokens in (1, 8)
    ]
    assert {problem.num_experts for problem in problems} == {896}


@pytest.mark.parametrize(
    "sweep",
    [
        Sweep(tokens="8,8", layout="rank-major,rank_major"),
        Sweep(workload="all", experts="8", tokens="5", hidden="128", topk="3"),
        Sweep(routing="uniform,uniform", num_blocks="16, 16"),
    ],
)
def test_what_is_named_twice_is_measured_once(sweep: Sweep) -> None:
    problems = sweep.problems()
    assert len(problems) == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_set_the_shape(name: str) -> None:
    (problem,) = Sweep(workload=name).problems()
    workload = WORKLOADS[name]
    shape = (problem.num_tokens, problem.num_experts, problem.num_topk, problem.hidden_size)
    assert shape == (workload.num_tokens, workload.num_experts, workload.num_topk, workload.hidden_size)


def test_help_names_every_workload() -> None:
    assert WORKLOAD_HELP.endswith(f"by comma: {', '.join(WORKLOADS)}.")


REFUSED = [
    (["--ep-lib", "floor,nosuch"], "--ep-lib 'nosuch': must be among"),
    (["--device", "cpu", "--kernel-only"], "--kernel-only: needs NVIDIA GPUs"),
    (["--device", "cpu", "--overlap", "gemm"], "--overlap: needs NVIDIA GPUs and --device cuda"),
    (["--device", "cpu", "--cuda-graph"], "--cuda-graph: needs NVIDIA GPUs"),
    (["--device", "tpu"], "--device tpu: must be auto, cpu or cuda"),
    (["--device", "cpu", "--num-blocks", "16"], "--num-blocks: needs --device cuda"),
    (["--num-blocks", "16:32:8"], "--num-blocks 16:32:8: must be N, DISPATCH:COMBINE or all"),
    (["--num-blocks", "0"], "--num-blocks 0: must be N, DISPATCH:COMBINE or all"),
    (["-t", "8,x"], "-t 8,x: must be a whole number"),
    (["-e", "0"], "-e 0: must be a whole number"),
    (["-t", "8,99999999999999999999"], "-t 8,99999999999999999999: must be a whole number from 1 to 1048576"),
    (["-t", "9" * 5000], "must be a whole number from 1 to 1048576"),
    (["-e", "100000000000", "-t", "1"], "-e 100000000000: must be a whole number from 1 to 1048576"),
    (["-d", "800000000000"], "-d 800000000000: must be a whole number from 1 to 1048576"),
    (["--ranks", "1025"], "--ranks 1025: must be a whole number from 1 to 1024"),
    (["--num-blocks", "16:1048577"], "--num-blocks 16:1048577: must be N, DISPATCH:COMBINE or all"),
    (["-e", "1048576", "-t", "1048576"], "bf16: needs at least 24576.0 GiB, and this machine has "),
    (["-d", "1048576", "-t", "1048576"], "bf16: needs at least 8192.0 GiB, and this machine has "),
    *(
        (["--timeout", text], f"--timeout {text}: must be a number of seconds from 0.001 to 1e+06")
        for text in ("0", "-1", "nan", "inf", "2e+06")
    ),
    (["-k", "33"], "num_topk = 33: must be between 1 and min(num_experts, 32) = 32"),
    (["-d", "100"], "hidden_size = 100: must be a multiple of 8 for BF16 rows"),
    (["-d", "136", "--dispatch-dtype", "fp8-e4m3"], "hidden_size = 136: must be a multiple of 128"),
    (["-d", "136", "--dispatch-dtype", "mxfp8"], "hidden_size = 136: must be a multiple of 128 for MXFP8 rows"),
    (["--layout", "token-major"], "--layout token-major: must be among expert-major, rank-major"),
    (["--routing", "zipf"], "routing = 'zipf'"),
    (["--workload", "nosuch"], "--workload 'nosuch': must be among mscclpp-latency"),
    (["--routing", "missing.npz"], "--routing missing.npz: cannot read it (No such file or directory)"),
    (["--routing", "missing.npz", "--workload", "kimi-k3"], "--routing missing.npz: cannot read it"),
    (["--json", "nosuch/out.json"], "--json nosuch/out.json: cannot be written there: its folder does not exist"),
    (["--json", "/"], "--json /: cannot be written there: is a folder"),
    (["--json", "/proc/out.json"], "--json /proc/out.json: cannot be written ("),
    (["--plot", "out.svg"], "--plot out.svg: must end with .html or .png"),
]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry-run"])
@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_options_that_cannot_be_used_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
    dry_run: list[str],
) -> None:
    assert run_cli(monkeypatch, *arguments, *dry_run) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


#: A line, who refuses it, and what is named in the words, which are Typer's.
UNPARSED = [
    ("bench --seed -1", "expertwire bench", "--seed"),
    ("bench -i 0", "expertwire bench", "--iters"),
    ("bench -i 1048577", "expertwire bench", "--iters"),
    ("bench --iters abc", "expertwire bench", "--iters"),
    ("bench --nosuch", "expertwire bench", "--nosuch"),
    ("bench -t", "expertwire bench", "-t"),
    ("bench more words", "expertwire bench", "'more'"),
    ("bench report", "expertwire bench report", "FILES"),
    ("bench compare a.json", "expertwire bench compare", "AFTER"),
    ("bench compare a b extra", "expertwire bench compare", "extra"),
    ("bench compare a b --threshold abc", "expertwire bench compare", "--threshold"),
    ("compile", "expertwire compile", "--architecture"),
    ("run --layers x", "expertwire run", "--layers"),
    ("info more", "expertwire info", "more"),
    ("nosuch", "expertwire", "'nosuch'"),
    ("--nosuch", "expertwire", "--nosuch"),
]


@pytest.mark.parametrize(("line", "command", "named"), UNPARSED, ids=[line for line, *_ in UNPARSED])
def test_lines_that_cannot_be_parsed_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, command: str, named: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["expertwire", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"{command}: ")
    assert named.lower() in printed.err.lower()
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["bench", "--help"], ["bench", "report", "--help"]])
def test_help_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["expertwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "Usage: expertwire" in capsys.readouterr().out


def test_dry_run_says_what_would_run_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expertwire.bench.request.measure_all", None)
    assert run_cli(monkeypatch, "--device", "cpu", "--ep-lib", "all", "-t", "1,8", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.count("floor: would be checked and timed") == 2
    assert printed.count("nccl-ep: needs NVIDIA GPUs") == 2


def test_what_is_not_supported_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("not in this version")

    monkeypatch.setattr("expertwire.bench.request.measure_all", refuse)
    assert run_cli(monkeypatch) == 2
    assert "expertwire bench: not in this version" in capsys.readouterr().err


SMALL_SHAPE = ["--device", "cpu", "-e", "8", "-t", "5", "-d", "128", "-k", "3", "-w", "1"]
SMALL_ARGUMENTS = [*SMALL_SHAPE, "--threads", "-i", "4"]


def test_the_command_prints_a_row_per_phase_and_writes_every_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    page = path.with_suffix(".html")
    outputs = ("--json", str(path), "--plot", str(page))
    assert run_cli(monkeypatch, "--ep-lib", "floor,deepep", *SMALL_ARGUMENTS, *outputs) == 0
    assert page.read_text(encoding="utf-8").startswith("<!")
    assert sorted(tmp_path.iterdir()) == [page, path]  # nothing half-written is left
    printed = capsys.readouterr()
    assert [phase for phase in PHASES if f"floor  {phase}" in printed.out] == ["dispatch", "combine", "pair"]
    assert "deepep: no figures: needs NVIDIA GPUs" in printed.out
    assert "1 of 1: T 5  E 8  K 3  H 128  R 2  expert-major  rank-local-reduce  bf16  routing uniform" in printed.err
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["schema"] == "expertwire-bench/1"
    assert report["command"][:2] == ["expertwire", "bench"]
    assert report["machine"]["usable_cores"] >= 1
    assert report["versions"]["numpy"] == np.__version__
    (run,) = report["runs"]
    assert run["problem"]["layout"] == "expert_major"
    floor, deepep = run["results"]
    assert np.array(floor["samples"]["pair"]).shape == (2, 4)
    assert deepep["status"] == "skipped"
    assert deepep["samples"] is None


def test_a_terminal_shows_one_bar_over_problems_libraries_and_rounds() -> None:
    errors = Console(file=io.StringIO(), force_terminal=True, width=200)
    problems = Sweep(tokens="2,3", experts="8", hidden="128", topk="3").problems()
    settings = Settings(warmup=0, iters=4, rounds=2, threads=True)
    report = run_request(Request(["expertwire", "floor"], problems, settings, ()), errors)
    assert not report.failed
    drawn = errors.file.getvalue()  # type: ignore[attr-defined]
    assert " 0/12" in drawn
    assert "12/12" in drawn
    assert "1 of 2: T 2" in drawn
    assert "2 of 2: T 3" in drawn


def test_the_samples_are_kept_when_nobody_reads_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def closed(_report: Report, _console: Console) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("expertwire.bench.report.print_report", closed)
    path = tmp_path / "out.json"
    assert run_cli(monkeypatch, "--ep-lib", "floor", *SMALL_ARGUMENTS, "--json", str(path)) == 1
    assert json.loads(path.read_text(encoding="utf-8"))["runs"]


def test_a_wrong_library_gives_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ADAPTERS, WrongCombine.name, WrongCombine)
    assert run_cli(monkeypatch, "--ep-lib", WrongCombine.name, *SMALL_ARGUMENTS) == 1
    assert "wrong-combine: FAILED: rank 0: Error: wrong result: combined tokens[0, 0]" in capsys.readouterr().out
