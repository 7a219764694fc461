"""``expertwire bench``: options to problems, what is printed and written, and the tables of the page."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from expertwire import cli
from expertwire.bench.adapters import ADAPTERS
from expertwire.bench.request import Sweep
from expertwire.bench.schema import PHASES
from expertwire.bench.workloads import WORKLOADS
from expertwire.types import DispatchLayout
from test_bench import WrongCombine

ROOT = Path(__file__).parents[1]


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of ``expertwire bench ...`` in this process."""
    monkeypatch.setattr(sys, "argv", ["expertwire", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_sweeps_make_every_combination() -> None:
    problems = Sweep(tokens="1,8", layout="expert-major,RANK_MAJOR", workload="kimi-k3").problems()
    assert [(problem.layout, problem.num_tokens) for problem in problems] == [
        (layout, tokens) for layout in (DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR) for tokens in (1, 8)
    ]
    assert {problem.num_experts for problem in problems} == {896}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_set_the_shape(name: str) -> None:
    (problem,) = Sweep(workload=name).problems()
    workload = WORKLOADS[name]
    shape = (problem.num_tokens, problem.num_experts, problem.num_topk, problem.hidden_size)
    assert shape == (workload.num_tokens, workload.num_experts, workload.num_topk, workload.hidden_size)


REFUSED = [
    (["--ep-lib", "floor,nosuch"], "--ep-lib 'nosuch': must be among"),
    (["--kernel-only"], "--kernel-only: needs NVIDIA GPUs"),
    (["--cuda-graph"], "--cuda-graph: needs NVIDIA GPUs"),
    (["--nodes", "a b"], "--nodes: needs NVIDIA GPUs"),
    (["-t", "8,x"], "-t 8,x: must be a whole number"),
    (["-e", "0"], "-e 0: must be a whole number"),
    (["-k", "33"], "num_topk = 33: must be between 1 and min(num_experts, 32) = 32"),
    (["-d", "100"], "hidden_size = 100: must be a multiple of 8 for BF16 rows"),
    (["-d", "136", "--dispatch-dtype", "fp8-e4m3"], "hidden_size = 136: must be a multiple of 128"),
    (["--layout", "token-major"], "--layout token-major: must be among expert-major, rank-major"),
    (["--routing", "zipf"], "routing = 'zipf'"),
    (["--workload", "nosuch"], "--workload 'nosuch': must be one of mscclpp-latency"),
    (["--json", "nosuch/out.json"], "--json nosuch/out.json: its folder does not exist"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_options_that_cannot_be_used_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_cli(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_dry_run_says_what_would_run_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expertwire.bench.request.measure", None)
    assert run_cli(monkeypatch, "--ep-lib", "all", "-t", "1,8", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.count("floor: would be checked and timed") == 2
    assert printed.count("nccl-ep: not supported in this version") == 2


SMALL_ARGUMENTS = ["--threads", "-e", "8", "-t", "5", "-d", "128", "-k", "3", "-w", "1", "-i", "4"]


def test_the_command_prints_a_row_per_phase_and_writes_every_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run_cli(monkeypatch, "--ep-lib", "floor,deepep", *SMALL_ARGUMENTS, "--json", str(path)) == 0
    printed = capsys.readouterr()
    assert [phase for phase in PHASES if f"floor  {phase}" in printed.out] == list(PHASES)
    assert "deepep: no figures: not supported" in printed.out
    assert "1 of 1: T 5" in printed.err
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


def test_a_wrong_library_gives_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ADAPTERS, WrongCombine.name, WrongCombine)
    assert run_cli(monkeypatch, "--ep-lib", WrongCombine.name, *SMALL_ARGUMENTS) == 1
    assert "wrong-combine: FAILED: rank 0: Error: wrong result: combined tokens[0, 0]" in capsys.readouterr().out


# The page


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tables_of_the_page_come_from_the_committed_results() -> None:
    tables = load_script("render_tables")
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tables.RESULTS.glob("*.json")}
    page = tables.PAGE.read_text(encoding="utf-8")
    assert results
    assert page.count("<!-- table: ") == page.count("<!-- end -->") > 0
    assert tables.render(page, results) == page
