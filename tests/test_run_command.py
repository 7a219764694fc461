"""``expertwire run`` with real processes: equal bits, numbers that agree, and what is told when it goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import expertwire as ew
from expertwire.cli import make_app
from expertwire.run.board import open_board
from expertwire.run.job import ONE_BLAS_THREAD, run_job
from expertwire.run.model import ModelConfig
from expertwire.run.plan import JobConfig
from expertwire.run.report import LineProgress
from expertwire.run.worker import run_rank
from expertwire.trace import load_trace
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

SMALL = (
    *("--experts", "8", "--topk", "3", "--hidden", "128", "--intermediate", "16", "--vocabulary", "64"),
    *("--max-tokens-per-rank", "16"),
)


def expertwire(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from expertwire.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    path = tmp_path / "novel.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 12, encoding="utf-8")  # 168 tokens
    return path


@pytest.mark.parametrize("layout", ["expert-major", "rank-major"])
@pytest.mark.parametrize("combine_mode", ["rank-local-reduce", "direct-send"])
@pytest.mark.parametrize("dispatch_dtype", ["bf16", "fp8-e4m3"])
def test_run_is_identical_to_the_reference(novel: Path, layout: str, combine_mode: str, dispatch_dtype: str) -> None:
    options = ["--layout", layout, "--combine-mode", combine_mode, "--dispatch-dtype", dispatch_dtype, "--ranks", "2"]
    done = expertwire("run", str(novel), *SMALL, *options)
    assert done.returncode == 0, done.stderr
    assert "identical to the single-process reference: 43,008 values" in done.stdout


def test_run_writes_numbers_and_a_trace_that_agree(novel: Path, tmp_path: Path) -> None:
    numbers, trace_file = tmp_path / "run.json", tmp_path / "trace.npz"
    done = expertwire(
        *("run", str(novel), *SMALL, "--ranks", "4", "--tokens", "150"),
        *("--json", str(numbers), "--save-trace", str(trace_file)),
    )
    assert done.returncode == 0, done.stderr
    told, trace = json.loads(numbers.read_text()), load_trace(trace_file)
    assert told["check"]["identical"] is True
    assert told["text"] == {"source": "novel.txt", "num_files": 1, "num_tokens": 150}
    assert trace.topk_ids.shape == (2, 150, 3)
    assert trace.rank_offsets.tolist() == [0, 37, 75, 112, 150]
    load = [np.bincount(layer.ravel(), minlength=8).tolist() for layer in trace.topk_ids]
    assert told["expert_load"] == load
    assert sum(rank["bytes_sent"] for rank in told["ranks"]) == told["bytes_sent"] > 0
    assert sum(rank["bytes_received"] for rank in told["ranks"]) == told["bytes_sent"]
    for by_rank in told["latency_us"].values():
        assert 0 < by_rank["fastest_rank"]["min"] <= by_rank["slowest_rank"]["min"] <= by_rank["slowest_rank"]["max"]


def test_run_with_more_ranks_than_tokens(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("two words", encoding="utf-8")
    done = expertwire("run", str(path), *SMALL, "--ranks", "4")
    assert done.returncode == 0, done.stderr
    assert "2 tokens from 1 file" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "3"], "--experts = 8: must be a multiple of --ranks = 3"),
        (["--topk", "9"], "--topk = 9"),
        (["--tokens", "0"], "--tokens = 0"),
        (["--layout", "diagonal"], "--layout 'diagonal': must be one of expert-major, rank-major"),
        (["--layout", "token-major"], "throughput mode"),
        (["no-such-file"], "cannot read no-such-file"),
        (["--save-trace", "no-such-folder/x.npz"], "--save-trace = no-such-folder/x.npz"),
    ],
)
def test_wrong_options_take_one_line_and_status_2(novel: Path, options: list[str], words: str) -> None:
    done = expertwire("run", *([] if "no-such-file" in options else [str(novel)]), *SMALL, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def run_with(spawn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run the command in this process with another ``spawn``; return exit status and everything printed."""
    monkeypatch.setattr(ew, "spawn", spawn)
    done = CliRunner().invoke(make_app(), ["run", *SMALL, "--ranks", "2", *arguments])
    return done.exit_code, " ".join(done.output.split())


def test_one_wrong_bit_is_told_with_status_1(novel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, numbers = ew.spawn, tmp_path / "run.json"

    def tampering(part: Callable[..., Any], num_ranks: int, folder: Path, config: JobConfig) -> list[Any]:
        results = real(part, num_ranks, folder, config)
        if part is run_rank:
            open_board(folder).states[1, 100, 7] ^= 1
        return results

    status, printed = run_with(tampering, monkeypatch, str(novel), "--json", str(numbers))
    assert status == 1
    assert "DIFFERENT from the single-process reference, first in layer 1, token 100" in printed
    assert "states[7] is" in printed
    assert json.loads(numbers.read_text())["check"]["identical"] is False


def test_files_are_written_when_nobody_reads_the_report(
    novel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers, trace_file = tmp_path / "run.json", tmp_path / "trace.npz"

    def closed(*_arguments: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("expertwire.run.execute.show", closed)
    files = ("--json", str(numbers), "--save-trace", str(trace_file))
    status, _ = run_with(ew.spawn, monkeypatch, str(novel), *files)
    assert status == 1
    assert json.loads(numbers.read_text())["check"]["identical"] is True
    assert load_trace(trace_file).topk_ids.shape == (2, 168, 3)


def fail_on_rank_1(group: ew.Group, *_arguments: object) -> None:
    if group.rank == 1:
        raise MemoryError("no room for the experts")


@pytest.mark.parametrize("option", [[], ["--traceback"]])
def test_failing_rank_is_told_with_status_1(novel: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    real = ew.spawn
    status, printed = run_with(lambda _part, *rest: real(fail_on_rank_1, *rest), monkeypatch, str(novel), *option)
    assert status == 1
    assert ("expertwire run: MemoryError: no room for the experts" in printed) is not bool(option)
    assert "Traceback" not in printed


def test_unchecked_run_says_so(novel: Path) -> None:
    done = expertwire("run", str(novel), *SMALL, "--ranks", "2", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "not held against the reference" in done.stdout
    assert "identical" not in done.stdout


def test_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    model = ModelConfig(8, 3, 128, 16, num_layers=1, vocabulary_size=64, seed=0)
    words = DispatchLayout.EXPERT_MAJOR, CombineMode.RANK_LOCAL_REDUCE, DispatchDataType.BF16
    config = JobConfig(model, 1, 16, *words, timeout_s=30.0)
    result = run_job(config, np.arange(10, dtype=np.int32), LineProgress(Console(quiet=True)))
    assert result.difference is None
    assert dict(os.environ) == before
    assert "OMP_NUM_THREADS" in ONE_BLAS_THREAD
