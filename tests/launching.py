"""Starts ranks as a launcher would: with its variables, or by the launcher itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

LAUNCHER_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "EXPERTWIRE_RENDEZVOUS")
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MPI_LOCAL")


def plain_environment(**variables: object) -> dict[str, str]:
    """This process's environment without any launcher's variables, and with these."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_WORDS and not name.startswith(LAUNCHER_PREFIXES)
    }
    return kept | {name: str(value) for name, value in variables.items()}


def torchrun(rank: int, size: int, job: str, **more: object) -> dict[str, str]:
    return plain_environment(RANK=rank, WORLD_SIZE=size, MASTER_PORT=29500, TORCHELASTIC_RUN_ID=job, **more)


def start(code: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start_together(code: str, environments: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """Start processes that say "ready" once they have loaded, and let them go on at the same moment."""
    processes = [start(code, environment) for environment in environments]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n", finish([process])
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; return what each printed."""
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        outputs.append(output.strip())
    return outputs


def mpirun(num_ranks: int) -> list[str]:
    """Return the command that runs what follows it on so many ranks; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, (str(Path(sys.executable).with_name("mpiexec")), "mpirun"))), None)
    if found is None:
        pytest.skip("needs mpirun")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    options = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []
    return [found, *options, "-n", str(num_ranks)]
