"""The C++ benchmark program, by itself and as a library of ``expertwire bench``."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertwire.bench import measure
from expertwire.bench.adapters import expertwire_cpp
from expertwire.bench.adapters.expertwire_cpp import PROGRAM, ExpertwireCpp, command, write_inputs
from expertwire.bench.schema import Problem, Settings, Status
from expertwire.bench.stored import read_report
from expertwire.bench.summary import summarize
from expertwire.errors import Error
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

SMALL = Problem(num_experts=8, num_tokens=5, hidden_size=128, num_topk=3, num_ranks=2)
QUICK = Settings(warmup=1, iters=5, rounds=2, timeout_s=20.0)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_its_json_is_a_report_with_our_figures(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("-e", 9, "-t", 5, "-d", 128, "-k", 3, "-i", 7, "--rounds", 3, "--json", path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    report = read_report(path)
    assert report.command[:3] == ("expertwire-bench", "-e", "9")
    (run_of_shape,) = report.runs
    (result,) = run_of_shape.results
    assert run_of_shape.problem == Problem(9, 5, 128, 3, 2)
    assert (report.settings.iters, report.settings.rounds, report.settings.device) == (7, 3, "cpu")
    assert (result.lib, result.status) == ("expertwire-cpp", Status.OK)
    assert run_of_shape.bytes_per_rank == 5 * 3 * 128 * 2
    assert result.samples is not None
    assert {phase: times.shape for phase, times in result.samples.items()} == dict.fromkeys(
        ("dispatch", "combine", "pair"), (2, 7)
    )
    assert result.phases == summarize(result.samples, report.settings, run_of_shape.bytes_per_rank)
    for phase, figures in result.phases.items():
        (line,) = [line for line in done.stdout.splitlines() if line.split()[:2] == ["expertwire-cpp", phase]]
        assert f"{figures.median_us:.1f}" in line.split()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-e", "0"], "-e 0: must be a whole number"),
        (["-k", "9", "-e", "8"], "-k 9: must be at most min(-e, 32) = 8"),
        (["-d", "136", "--dispatch-dtype", "fp8-e4m3"], "-d 136: must be a multiple of 128"),
        (["--json", "/nosuch/out.json"], "--json /nosuch/out.json: cannot write there"),
        (["--json", "/dev/null"], "--json /dev/null: is no regular file"),
        (["--inputs", "/nosuch"], "--inputs: cannot read /nosuch/0.x"),
        (["--mpi"], "--mpi: this program was built without MPI"),
        (["--nosuch"], "'--nosuch' is no option"),
    ],
)
def test_bad_options_end_with_one_line(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"expertwire-bench: {said}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_help_names_every_option_that_we_give(tmp_path: Path) -> None:
    done = run("--help")
    assert done.returncode == 0
    settings = replace(QUICK, validate=True)
    on_cpu = command(SMALL, settings, ".", tmp_path / "x")
    on_gpu = command(replace(SMALL, num_blocks=(4, 5)), replace(settings, device="cuda"), ".", tmp_path / "x")
    given = {word for word in on_cpu + on_gpu if word.startswith("-")}
    assert {"--validate", "--num-blocks", "--iters-per-graph"} <= given
    assert given <= set(done.stdout.replace(",", " ").split())


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    write_inputs(SMALL, tmp_path)
    assert run("-e", 8, "-t", 5, "-d", 128, "-k", 3, "-i", 1, "--inputs", tmp_path).returncode == 0
    done = run("-e", 8, "-t", 4, "-d", 128, "-k", 3, "--inputs", tmp_path)
    assert (done.returncode, "0.x has 1280 bytes, this shape needs 1024" in done.stderr) == (2, True)
    (tmp_path / "1.topk_ids").write_bytes(np.full((5, 3), 8, np.int64).tobytes())
    done = run("-e", 8, "-t", 5, "-d", 128, "-k", 3, "--inputs", tmp_path)
    assert (done.returncode, "names expert 8; must be below -e 8" in done.stderr) == (2, True)
    (tmp_path / "1.topk_ids").write_bytes(np.zeros((5, 3), np.int64).tobytes())
    done = run("-e", 8, "-t", 5, "-d", 128, "-k", 3, "--inputs", tmp_path, "--json", tmp_path / "out.json")
    assert (done.returncode, "names expert 0 twice in token 0" in done.stderr) == (2, True)
    assert not list(tmp_path.glob("out.json*"))


@pytest.mark.parametrize("layout", list(DispatchLayout)[:2])
@pytest.mark.parametrize("mode", CombineMode)
@pytest.mark.parametrize("dtype", DispatchDataType)
@pytest.mark.parametrize("routing", ["uniform", "empty-experts"])
def test_it_is_a_library_of_the_benchmark(
    layout: DispatchLayout, mode: CombineMode, dtype: DispatchDataType, routing: str
) -> None:
    problem = replace(SMALL, layout=layout, combine_mode=mode, dispatch_dtype=dtype, routing=routing, num_ranks=3)
    samples = ExpertwireCpp.measure(problem, replace(QUICK, validate=True))
    assert {phase: times.shape for phase, times in samples.items()} == dict.fromkeys(
        ("dispatch", "combine", "pair"), (3, 5)
    )
    assert all((times > 0).all() for times in samples.values())


def test_its_row_stands_beside_the_others() -> None:
    cpp, floor = measure.measure(SMALL, replace(QUICK, threads=True), ["expertwire-cpp", "floor"]).results
    assert (cpp.status, floor.status) == (Status.OK, Status.OK), (cpp.reason, floor.reason)
    assert set(cpp.phases["pair"].ratio_to) == {"floor"}


def test_what_goes_wrong_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = replace(SMALL, hidden_size=100)
    with pytest.raises(Error, match="-d 100: must be a multiple of 8"):
        ExpertwireCpp.measure(refused, QUICK)
    assert ExpertwireCpp.obstacle(SMALL, replace(QUICK, host_rows=False)) == "does not time kernels alone"
    monkeypatch.setattr(expertwire_cpp, "PROGRAM", tmp_path / "expertwire-bench")
    assert "built without its program" in ExpertwireCpp.obstacle(SMALL, QUICK)


def test_json_escapes(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted\\ name'
    folder.mkdir()
    write_inputs(SMALL, folder)
    path = tmp_path / "out.json"
    assert run("-e", 8, "-t", 5, "-d", 128, "-k", 3, "-i", 1, "--inputs", folder, "--json", path).returncode == 0
    assert json.loads(path.read_text(encoding="utf-8"))["runs"][0]["problem"]["routing"] == str(folder)
