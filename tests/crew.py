"""Ranks as processes that a test kills, stops or lets go one by one, and hears of what became of each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew
from expertwire import _core

#: Bound of everything that a test waits for; reached only when something hangs.
PATIENCE_S = 40.0
#: How soon a death is noticed, time-outs aside. In truth some 20 ms; a crowded machine may take longer to get there.
AT_ONCE_S = 8.0


@dataclass(frozen=True)
class Failed:
    """An error that a rank did not expect."""

    text: str


@dataclass
class Rank:
    """A rank in its own process."""

    process: BaseProcess
    line: Connection

    def result(self) -> Any:
        """Return what the rank's function returned or said last; fail with its traceback if it raised."""
        assert self.line.poll(PATIENCE_S), "a rank hangs"
        answer = self.line.recv()
        assert not isinstance(answer, Failed), answer.text
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def exit_code(self) -> int | None:
        self.process.join(PATIENCE_S)
        return self.process.exitcode


@dataclass(frozen=True)
class Me:
    """What a rank's function is given: its group, the line to the test, and how to make another group."""

    group: ew.Group
    line: Connection
    key: str

    def another_group(self, name: str) -> ew.Group:
        """Return a new group of all ranks."""
        return _group(self.group.rank, self.group.size, f"{self.key}:{name}")

    def group_without(self, lost: int) -> ew.Group:
        """Return a new group of all ranks but one."""
        rank = self.group.rank - (self.group.rank > lost)
        return _group(rank, self.group.size - 1, f"{self.key}:without:{lost}")


@contextlib.contextmanager
def crew(fn: Callable[..., Any], num_ranks: int, *args: Any) -> Iterator[list[Rank]]:
    """Run fn(me, *args) in a process for each rank. On the way out, all of them must have ended."""
    context = multiprocessing.get_context("forkserver")
    preload = ["expertwire.communicator", "expertwire.reference"]
    context.set_forkserver_preload([*preload, "torch"] if "torch" in sys.modules else preload)
    key = uuid.uuid4().hex
    ranks = []
    for number in range(num_ranks):
        mine, theirs = context.Pipe()
        process = context.Process(target=_be, args=(number, num_ranks, key, theirs, fn, args), name=f"rank-{number}")
        process.start()
        theirs.close()
        ranks.append(Rank(process, mine))
    try:
        yield ranks
        for rank in ranks:
            assert rank.exit_code() is not None, f"{rank.process.name} does not end"
    finally:
        for rank in ranks:
            if rank.process.exitcode is None:
                rank.process.kill()
            rank.process.join()
            rank.line.close()


def _group(rank: int, size: int, key: str) -> ew.Group:
    return ew.Group(_core.make_host_bootstrap(rank, size, key, PATIENCE_S))


def _be(rank: int, size: int, key: str, line: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = fn(Me(_group(rank, size, key), line, key), *args)
    except Exception:  # told to the test, which fails with it
        answer = Failed(traceback.format_exc())
    line.send(answer)


def in_a_forked_child(fn: Callable[[], None]) -> None:
    """Run fn in a forked child, which leaves nothing behind, and fail here if it failed there."""
    with warnings.catch_warnings():  # of other threads, whose locks may be held: none that a child of ours needs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        failed = 1
        try:
            fn()
            failed = 0
        except BaseException:  # told by the exit status
            traceback.print_exc()
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed: its error is on stderr"


def assert_not_the_childs(comm: ew.MoECommunicator, call: Callable[[], object]) -> None:
    """In a forked child: nothing of its parent's communicator works, ``call`` included, and all of it says why."""
    for refused in (call, comm.check, comm.stats, comm.lost_ranks):
        with pytest.raises(ew.InvalidArgumentError, match=f"was made by process {os.getppid()}: a forked child makes"):
            refused()
    assert not comm.is_available


def die() -> None:
    """End this process as a crash of the machine would: at once, with no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PATIENCE_S)


def maps_segments() -> bool:
    """Whether this process still maps shared memory of the package."""
    return "memfd:expertwire" in Path("/proc/self/maps").read_text(encoding="utf-8")


def named_shared_memory() -> set[str]:
    """Return what the package has left in the file system's shared memory: nothing, ever."""
    return {path.name for path in Path("/dev/shm").glob("*expertwire*")}  # noqa: S108
