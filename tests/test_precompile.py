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
