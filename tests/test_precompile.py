"""``expertwire compile``: fills the cache with what communicators will ask for, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("-e", "6", "-t", "16", "-d", "256", "-k", "2", "--ranks", "3")


def expertwire_compile(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from expertwire.cli import main; main()", "compile", *options]
    environment = os.environ | {"EXPERTWIRE_CACHE_DIR": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)


def test_cache_is_filled_once_for_each_shape_and_architecture(tmp_path: Path) -> None:
    options = (*SMALL, "--architecture", "sm_90,sm_100", "--layout", "rank-major", "--combine-mode", "direct-send")
    for first in (True, False):
        done = expertwire_compile(tmp_path, *options)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["sm_90", "sm_100"]
        for line in lines:
            assert "T 16  E 6  K 2  H 256  R 3  rank-major  direct-send  bf16: " in line
            found = re.search(r"(\d+) compiled, (\d+) in the cache; at most (\d+) registers, (\d+) bytes spilled", line)
            assert found
            compiled, kept, registers = (int(found[i]) for i in (1, 2, 3))
            assert (compiled > 0, kept > 0) == (first, not first)
            assert 0 < registers <= 255
        assert sum(int(re.findall(r"(\d+) compiled", line)[0]) for line in lines) in (0, len(list(tmp_path.iterdir())))


def test_a_suffix_of_the_architecture_makes_no_difference(tmp_path: Path) -> None:
    options = (*SMALL, "--layout", "rank-major", "--combine-mode", "direct-send", "--architecture")
    assert " 0 in the cache" in expertwire_compile(tmp_path, *options, "sm_90").stdout
    assert ": 0 compiled" in expertwire_compile(tmp_path, *options, "sm_90a").stdout


def test_kernels_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = (*SMALL, "--layout", "rank-major", "--combine-mode", "direct-send", "--architecture", "sm_90")
    done = expertwire_compile(tmp_path / "file" / "cache", *options)
    assert done.returncode == 1
    assert ": 4 compiled, 0 in the cache" in done.stdout
    wanted = "4 kernels were compiled and could not be kept: set EXPERTWIRE_CACHE_DIR to a folder that can be written"
    assert wanted in " ".join(done.stderr.split())


def test_what_else_communicators_are_made_with(tmp_path: Path) -> None:
    """Each option stands for kernels of its own; what makes no difference to kernels finds them in the cache."""
    options = (*SMALL, "--layout", "rank-major", "--combine-mode", "direct-send", "--architecture", "sm_90")
    for extra in ((), ("--validate",), ("--mask", "--two-phase"), ("--block-overlap",)):
        done = expertwire_compile(tmp_path, *options, *extra)
        assert done.returncode == 0, done.stderr
        assert ": 0 compiled" not in done.stdout
    same = """
import expertwire as ew
from expertwire.precompile import precompile
config = ew.MoECommunicatorConfig(num_experts=6, hidden_size=256, num_topk=2, max_tokens_per_rank=16, max_in_flight=3,
    timeout_s=7.0, output_layout=ew.DispatchLayout.RANK_MAJOR, combine_mode=ew.CombineMode.DIRECT_SEND)
print([image.from_cache for image in precompile(config, 3, "sm_90")])
"""
    environment = os.environ | {"EXPERTWIRE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", same], capture_output=True, text=True, timeout=110, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.strip(" []\n").split(", ")) == {"True"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--architecture", "hopper"), 'architecture = "hopper": must be such as sm_90a'),
        (("--architecture", "sm_75"), 'architecture = "sm_75": must be sm_80 or newer'),
        (("--architecture", "sm_80", "--dispatch-dtype", "fp8-e4m3"), "FP8_E4M3"),
        (("--architecture", "sm_90", "-k", "99"), "num_topk = 99: must be between 1 and"),
        ((), "--architecture"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = expertwire_compile(tmp_path, *SMALL, *options)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())
