"""What ends ``expertwire bench`` in the middle: it is over soon, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from launching import plain_environment
from test_bench_command import SMALL_SHAPE


def processes_of(folder: Path) -> list[str]:
    """Return the names of the processes that make temporary files in a folder."""
    names = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                names.append((process / "comm").read_text().strip())
    return names


def within(seconds: float, true: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def steps(folder: Path) -> list[Path]:
    """Return the files in which ranks count what they have done."""
    return list(folder.glob("expertwire-*/*/steps.*"))


def segments_of_mpi() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vader_segment.*")}  # noqa: S108


FOR_LONG = [*SMALL_SHAPE, "-i", "1000000", "--rounds", "1"]
RANKS = {
    "threads": ["--ep-lib", "floor", "--threads"],
    "processes": ["--ep-lib", "floor"],
    "MPI": ["--ep-lib", "floor", "--nodes", "127.0.0.1"],
    "C++": ["--ep-lib", "expertwire-cpp"],
}


@pytest.fixture
def signals_count() -> Iterator[None]:
    """Have processes that are started now not ignore what this one does, such as under nohup."""
    ignored = [one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_IGN]
    for one in ignored:
        signal.signal(one, lambda *_: None)  # a handler is not passed on
    yield
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)


@pytest.mark.usefixtures("signals_count")
@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda how: how.name
)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_signal_ends_everything_and_leaves_nothing(tmp_path: Path, ranks: str, how: signal.Signals) -> None:
    if ranks == "MPI" and (shutil.which("mpirun") is None or find_spec("mpi4py") is None):
        pytest.skip("needs mpirun and mpi4py")
    before = segments_of_mpi()
    command = [sys.executable, "-m", "expertwire", "bench", *RANKS[ranks], *FOR_LONG]
    environment = plain_environment(TMPDIR=tmp_path)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as driver:
        at_work = (lambda: "expertwire-benc" in processes_of(tmp_path)) if ranks == "C++" else lambda: steps(tmp_path)
        try:
            assert within(60, at_work)
            # Ctrl-C is for all processes in the foreground of a terminal.
            os.killpg(driver.pid, how) if how is signal.SIGINT else driver.send_signal(how)
            assert driver.wait(15) == (-how if how is signal.SIGKILL else 128 + how)
        finally:
            driver.kill()
    assert within(15, lambda: not processes_of(tmp_path)), processes_of(tmp_path)
    if how is not signal.SIGKILL:
        assert within(15, lambda: not segments_of_mpi() - before)
        assert not list(tmp_path.iterdir())
