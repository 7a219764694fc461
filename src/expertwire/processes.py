"""Runs a function in several processes of this host: what :func:`expertwire.spawn` stands on.

The caller starts one fresh interpreter, the *leader*, by multiprocessing's spawn method. The leader imports what the
ranks need, once, forks them, and reports how each one ended. So no thread of the caller can be caught half-way, and the
imports, which are most of the time of a start, are paid once. Every rank sends its outcome to the caller through a pipe
of its own. The caller's end of the leader's pipe is the life line: when it closes, the leader kills
the ranks that are left.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, TypeVar

from expertwire.errors import BackendError, Error, InvalidArgumentError, PeerLostError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

Result = TypeVar("Result")

#: How long ranks may go on after another has failed or, having returned, may take to exit. Seconds.
GRACE_S = 3.0
#: How long the leader may take to exit once all its ranks have. Seconds.
_LEADER_EXIT_S = 10.0


def run_processes(
    target: Callable[..., Result],
    num_ranks: int,
    args: tuple[object, ...],
    *,
    preload: Sequence[str] = (),
    timeout_s: float | None = None,
) -> list[Result]:
    """Run ``target(rank, *args)`` in a process for each rank and return the results by rank.

    Args:
        target: importable by name.
        num_ranks: at least 1.
        args: picklable, passed to every rank.
        preload: modules to import before the ranks are forked.
        timeout_s: bound of the whole call, seconds; ``None``: as long as the ranks take.

    Raises:
        InvalidArgumentError, PeerLostError, Exception: as :func:`expertwire.spawn` says.
    """
    if num_ranks < 1:
        raise InvalidArgumentError(f"n = {num_ranks}: must be at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidArgumentError(f"timeout_s = {timeout_s}: must be above 0, or None")
    try:
        job = pickle.dumps((target, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(f"fn and args must be picklable, and fn importable by name: {error}") from error
    crew = _Crew(num_ranks, job, [name for name in preload if name != "__main__"])
    try:
        return crew.results(timeout_s)
    finally:
        crew.dismiss()


@dataclass
class _Outcome:
    """What a rank sends home: a value, or an error with the text of its traceback."""

    value: Any = None
    error: BaseException | None = None
    traceback_text: str = ""


@dataclass
class _Started:
    """The leader's first report: the process of each rank."""

    pids: list[int]


@dataclass
class _Ended:
    """The leader's report of one exit. ``exit_code`` is negative for a signal."""

    rank: int
    exit_code: int


class _RankTraceback(Exception):  # noqa: N818 (shown as the cause of an error, never raised by itself)
    """Text of a traceback in another process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass
class _Failure:
    """An error of one rank. ``is_cause``: it is not the mere consequence of another rank's."""

    error: Exception
    is_cause: bool


@dataclass
class _Rank:
    """What the caller knows of one rank."""

    results: Connection
    is_open: bool = True
    outcome: _Outcome | None = None
    exit_code: int | None = None


class _Crew:
    """The caller's side: the leader, its ranks, and what has been heard of them."""

    def __init__(self, num_ranks: int, job: bytes, preload: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        senders = [sender for _, sender in pipes]
        self._ranks = [_Rank(results) for results, _ in pipes]
        self._line, leader_line = context.Pipe()
        self._pids: list[int] = []
        self._failures: list[_Failure] = []
        self._leader_gone = False
        self._leader = context.Process(target=_lead, args=(job, preload, leader_line, senders), name="expertwire-spawn")
        self._leader.start()
        for end in (leader_line, *senders):
            end.close()

    def results(self, timeout_s: float | None) -> list[Any]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        grace_end = math.inf
        while not self._leader_gone and any(rank.exit_code is None for rank in self._ranks):
            if not self._listen(min(deadline, grace_end)):
                break
            if grace_end == math.inf and (self._failures or all(rank.outcome for rank in self._ranks)):
                grace_end = time.monotonic() + GRACE_S
        if not self._failures:
            self._fail_unfinished(timeout_s)
        if self._failures:
            raise next((one for one in self._failures if one.is_cause), self._failures[0]).error
        return [rank.outcome.value for rank in self._ranks if rank.outcome]

    def dismiss(self) -> None:
        """End whatever still runs, at once."""
        self._line.close()
        if not self._leader_gone:
            self._leader.join(_LEADER_EXIT_S)
        if self._leader.exitcode != 0:  # it did not see to its ranks
            self._leader.kill()
            for pid, rank in zip(self._pids, self._ranks, strict=False):
                if rank.exit_code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._leader.join()
        for rank in self._ranks:
            rank.results.close()
        self._leader.close()

    def _listen(self, until: float) -> bool:
        """Wait for news and take them in. False once ``until`` has passed."""
        pending = {rank.results: index for index, rank in enumerate(self._ranks) if rank.is_open}
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        ready = connection.wait([*pending, self._line], timeout)
        for source, index in pending.items():
            if source in ready:
                self._receive(index)
        if self._line in ready:
            self._hear_leader()
        return bool(ready)

    def _receive(self, index: int) -> None:
        rank = self._ranks[index]
        rank.is_open = False
        try:
            rank.outcome = _unpack(index, rank.results.recv_bytes())
        except (EOFError, OSError):  # it has gone without a word: the leader will say how
            return
        if rank.outcome.error is not None:
            error = _raisable(index, rank.outcome)
            self._failures.append(_Failure(error, is_cause=not isinstance(error, PeerLostError)))

    def _hear_leader(self) -> None:
        try:
            news = self._line.recv()
        except (EOFError, OSError):
            self._leader_gone = True
            text = "the process that starts the ranks ended early; standard error may say why"
            self._failures.append(_Failure(BackendError(text), is_cause=False))
            return
        if isinstance(news, _Started):
            self._pids = news.pids
        elif isinstance(news, _Ended):
            rank = self._ranks[news.rank]
            rank.exit_code = news.exit_code
            if rank.is_open and rank.results.poll():
                self._receive(news.rank)
            rank.is_open = False
            if rank.outcome is None or news.exit_code != 0:
                when = "before" if rank.outcome is None else "after"
                text = f"rank {news.rank} {_how_it_ended(news.exit_code)} {when} it returned"
                self._failures.append(_Failure(PeerLostError(text, [news.rank], "spawn"), is_cause=True))

    def _fail_unfinished(self, timeout_s: float | None) -> None:
        silent = [index for index, rank in enumerate(self._ranks) if rank.outcome is None]
        alive = [index for index, rank in enumerate(self._ranks) if rank.exit_code is None]
        if silent:
            text = f"{_rank_list(silent)} did not return within {timeout_s:g} s"
        elif alive:
            text = f"{_rank_list(alive)} returned, but did not exit within {GRACE_S:g} s"
        else:
            return
        self._failures.append(_Failure(PeerLostError(text, silent or alive, "spawn"), is_cause=True))


def _lead(job: bytes, preload: list[str], line: Connection, senders: list[Connection]) -> None:
    """The leader's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's to act upon
    for name in preload:
        with contextlib.suppress(Exception):  # the ranks try again, and report what is wrong
            importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_work, args=(rank, job, line, senders), name=f"rank-{rank}")
        for rank in range(len(senders))
    ]
    with warnings.catch_warnings():
        # Python warns of forks while other threads run. The only ones are those of BLAS libraries, which see to forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in ranks:
            process.start()
    for sender in senders:
        sender.close()
    _watch(ranks, line)


def _watch(ranks: list[ForkProcess], line: Connection) -> None:
    """Report every exit; kill what is left once the caller has closed the line."""
    wake_up, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler makes the signal write to the pipe
    alive = dict(enumerate(ranks))
    try:
        line.send(_Started([process.pid or 0 for process in ranks]))
        while True:
            for rank, process in list(alive.items()):
                if process.exitcode is not None:
                    line.send(_Ended(rank, process.exitcode))
                    del alive[rank]
            if not alive:
                return
            ready = connection.wait([line, wake_up])
            if line in ready:
                return
            os.read(wake_up, 4096)
    except OSError:  # the caller has gone
        return
    finally:
        for process in alive.values():
            process.kill()
        for process in alive.values():
            process.join()


def _work(rank: int, job: bytes, line: Connection, senders: list[Connection]) -> None:
    """One rank's whole life."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    line.close()
    for other, sender in enumerate(senders):
        if other != rank:
            sender.close()
    try:
        target, args = pickle.loads(job)  # noqa: S301 (the caller's own)
        outcome = _Outcome(value=target(rank, *args))
    except SystemExit:
        raise  # reported by its status
    except BaseException as error:  # told to the caller, which raises it
        outcome = _failed(error)
    senders[rank].send_bytes(_pack(outcome))
    senders[rank].close()


def _failed(error: BaseException) -> _Outcome:
    return _Outcome(error=error, traceback_text="".join(traceback.format_exception(error)))


def _pack(outcome: _Outcome) -> bytes:
    """Pickle an outcome; one that cannot be pickled, or not be read again, becomes an error that says so."""
    try:
        packed = pickle.dumps(outcome)
        if outcome.error is not None:
            pickle.loads(packed)  # noqa: S301 (exceptions with constructors of their own often fail here)
        return packed
    except Exception as error:  # a class may raise anything when it is pickled
        if outcome.error is None:
            return pickle.dumps(
                _failed(Error(f"a result of type {type(outcome.value).__name__} is not picklable: {error}"))
            )
        text = f"{type(outcome.error).__name__}: {outcome.error}"
        return pickle.dumps(_Outcome(error=Error(text), traceback_text=outcome.traceback_text))


def _unpack(rank: int, packed: bytes) -> _Outcome:
    try:
        outcome: _Outcome = pickle.loads(packed)  # noqa: S301 (from a process of our own)
    except Exception as error:  # a class may raise anything when it is read
        return _failed(Error(f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"))
    return outcome


def _raisable(rank: int, outcome: _Outcome) -> Exception:
    error = outcome.error
    if not isinstance(error, Exception):  # such as KeyboardInterrupt, which would mean something else in the caller
        error = Error(f"rank {rank} raised {type(error).__name__}: {error}")
    error.__cause__ = _RankTraceback(f"rank {rank}:\n{outcome.traceback_text}")
    return error


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _rank_list(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
