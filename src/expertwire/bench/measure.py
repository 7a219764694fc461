"""The measuring loop: every library is checked, then all of them are timed in turns, then checked again.

On each rank the two phases of a pair are timed back to back with the host's monotonic clock. The pairs of a library
follow each other without a barrier, as the layers of a model do.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import expertwire
from expertwire.bench.adapters import ADAPTERS, NOT_HERE, Adapter, RankContext
from expertwire.bench.inputs import Observation, check_problem, payload_bytes_per_rank, rank_input
from expertwire.bench.schema import LibResult, Problem, Run, Samples, Settings, Status
from expertwire.bench.summary import summarize, with_ratios
from expertwire.errors import Error
from expertwire.groups import Group
from expertwire.progress import watched
from expertwire.reference import RankInput

_FINE, _FAILED = b"+", b"-"


class _FailedElsewhereError(Exception):
    """A step failed, and every rank knows."""


@dataclass(frozen=True)
class Job:
    """What every rank is told: the problem, how to measure, the libraries, and where their expected results lie."""

    problem: Problem
    settings: Settings
    libs: tuple[str, ...]
    folder: Path

    def expected_path(self, lib: str, rank: int) -> Path:
        """Return the file of what ``lib`` must observe on ``rank``."""
        return self.folder / f"{lib}.{rank}.npz"

    @property
    def steps_path(self) -> Path:
        """The file that rank 0 makes a byte longer with every step it has done."""
        return self.folder / "steps"

    def doing(self, num_steps: int) -> str:
        """Return what follows after so many steps: every library is set up, then all take turns."""
        turn, lib = divmod(num_steps, len(self.libs))
        if turn > len(self.settings.parts()):
            return "last check"
        return f"{self.libs[lib]}: {f'round {turn}' if turn else 'set-up and warm-up'}"


@dataclass
class RankTimes:
    """What one rank measured of one library: nanoseconds of each timed pair, or what went wrong, on whichever rank."""

    dispatch: list[int] = field(default_factory=list)
    combine: list[int] = field(default_factory=list)
    pair: list[int] = field(default_factory=list)
    failure: str = ""


def num_steps(problem: Problem, settings: Settings, libs: list[str]) -> int:
    """Return the number of steps that ``measure`` tells of."""
    return len(_runnable(problem, settings, libs)) * (1 + len(settings.parts()))


def measure(
    problem: Problem, settings: Settings, libs: list[str], tell: Callable[[int, str], None] | None = None
) -> Run:
    """Measure the libraries on one problem.

    A library that cannot run here, or that is wrong, keeps a row which says so. ``tell`` is given, in a thread of its
    own, the number of steps that are done, and what is being done.

    Raises:
        InvalidArgumentError: the problem cannot be built, or its routing file not be read.
    """
    check_problem(problem)
    inputs = [rank_input(problem, rank) for rank in range(problem.num_ranks)]
    runnable = _runnable(problem, settings, libs)
    times: dict[str, list[RankTimes]] = {}
    if runnable:
        with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
            job = Job(problem, settings, runnable, Path(folder))
            _save_expectations(job, inputs)
            job.steps_path.touch()
            with _told(job, tell):
                times = _measure_on_all_ranks(job)
    bytes_per_rank = payload_bytes_per_rank(problem, inputs)
    results = [_result(lib, problem, settings, times.get(lib, []), bytes_per_rank) for lib in libs]
    return Run(problem, bytes_per_rank, with_ratios(results))


def _runnable(problem: Problem, settings: Settings, libs: list[str]) -> tuple[str, ...]:
    return tuple(lib for lib in libs if not obstacle(lib, problem, settings))


def _told(job: Job, tell: Callable[[int, str], None] | None) -> contextlib.AbstractContextManager[None]:
    if tell is None:
        return contextlib.nullcontext()
    return watched(lambda: job.steps_path.stat().st_size, lambda count: tell(count, job.doing(count)))


def obstacle(lib: str, problem: Problem, settings: Settings) -> str:
    """Return in one line why a library has no figures for the problem, or an empty string."""
    return NOT_HERE[lib] if lib in NOT_HERE else ADAPTERS[lib].obstacle(problem, settings)


def _save_expectations(job: Job, inputs: list[RankInput]) -> None:
    for lib in job.libs:
        for rank, expected in enumerate(ADAPTERS[lib].expected(job.problem, inputs)):
            expected.save(job.expected_path(lib, rank))


def _measure_on_all_ranks(job: Job) -> dict[str, list[RankTimes]]:
    """Return the times of each library by rank."""
    num_ranks = job.problem.num_ranks
    try:
        if job.settings.threads:
            with ThreadPoolExecutor(num_ranks) as pool:
                ranks = list(pool.map(measure_on_rank, expertwire.local_group(num_ranks), [job] * num_ranks))
        else:
            ranks = expertwire.spawn(measure_on_rank, num_ranks, job)
    except Exception as error:  # a rank ended without a word: no library has figures
        ranks = [{lib: RankTimes(failure=_in_one_line(error)) for lib in job.libs} for _ in range(num_ranks)]
    return {lib: [own[lib] for own in ranks] for lib in job.libs}


def _result(lib: str, problem: Problem, settings: Settings, times: list[RankTimes], num_bytes: float) -> LibResult:
    if why := obstacle(lib, problem, settings):
        return LibResult(lib, Status.SKIPPED, why)
    notes = ADAPTERS[lib].notes
    if times[0].failure:
        return LibResult(lib, Status.FAILED, times[0].failure, notes)
    samples = Samples(*(np.array([getattr(own, phase) for own in times]) for phase in ("dispatch", "combine", "pair")))
    return LibResult(lib, Status.OK, notes=notes, samples=samples, phases=summarize(samples, settings, num_bytes))


def measure_on_rank(group: Group, job: Job) -> dict[str, RankTimes]:
    """Measure all libraries on this rank. Collective."""
    ranks = {lib: _RankOfLib(lib, group, job) for lib in job.libs}
    try:
        for rank in ranks.values():
            rank.together(rank.prepare)
            _count_step(group, job)
        for count in job.settings.parts():
            for rank in ranks.values():
                rank.together(rank.time_pairs, count)
                _count_step(group, job)
        for rank in ranks.values():
            rank.together(rank.check)
    finally:
        for rank in ranks.values():
            rank.close()
    return {lib: rank.times for lib, rank in ranks.items()}


def _count_step(group: Group, job: Job) -> None:
    if group.rank == 0:
        with job.steps_path.open("ab") as steps:
            steps.write(b".")


class _RankOfLib:
    """One library on this rank, and its times. After a failure on any rank, every rank leaves the library alone."""

    def __init__(self, lib: str, group: Group, job: Job) -> None:
        self.times = RankTimes()
        self._lib, self._group, self._job = lib, group, job
        self._adapter: Adapter  # made by ``prepare``, together with what ``close`` undoes
        self._made = contextlib.ExitStack()
        self._expected = Observation.load(job.expected_path(lib, group.rank))

    def together(self, step: Callable[..., None], *args: int) -> None:
        """Run a step on all ranks at once, and agree on whether it failed anywhere."""
        if self.times.failure:
            return
        failure = ""
        try:
            self.exchange(b"ready")
            step(*args)
        except _FailedElsewhereError as known:
            self.times.failure = str(known)
            return
        except Exception as error:  # whatever a library raises becomes its row
            failure = _in_one_line(error)
        try:
            self.exchange(b"done", failure)
        except _FailedElsewhereError as known:
            self.times.failure = str(known)

    def exchange(self, word: bytes, failure: str = "") -> list[bytes]:
        """All-gather a word, or that this rank has failed: then the same exchange ends the step on every rank."""
        words = self._group.all_gather(_FAILED + failure.encode() if failure else _FINE + word)
        named = [f"rank {rank}: {text[1:].decode()}" for rank, text in enumerate(words) if text.startswith(_FAILED)]
        if named:
            raise _FailedElsewhereError("; ".join(named))
        return [text[1:] for text in words]

    def prepare(self) -> None:
        """Set the library up, check its first pair, and warm it up."""
        job, group = self._job, self._group
        context = RankContext(group, job.problem, job.settings, rank_input(job.problem, group.rank), self.exchange)
        self._adapter = ADAPTERS[self._lib](context)
        self._made.callback(self._adapter.close)
        self._adapter.dispatch()
        self._adapter.apply_experts()
        self._adapter.combine()
        self.check()
        for _ in range(job.settings.warmup):
            self._adapter.dispatch()
            self._adapter.combine()

    def check(self) -> None:
        """Hold the last pair against the expectation. Raises Error."""
        if wrong := self._adapter.difference(self._adapter.observe(), self._expected):
            raise Error(f"wrong result: {wrong}")

    def time_pairs(self, count: int) -> None:
        """Time ``count`` pairs. One more before them brings caches and ranks back in step after another's turn."""
        adapter, clock, times = self._adapter, time.perf_counter_ns, self.times
        adapter.dispatch()
        adapter.combine()
        with _without_garbage_collection():
            for _ in range(count):
                start = clock()
                adapter.dispatch()
                middle = clock()
                adapter.combine()
                end = clock()
                times.dispatch.append(middle - start)
                times.combine.append(end - middle)
                times.pair.append(end - start)
                if self._job.settings.validate:
                    self.check()

    def close(self) -> None:
        """Close the library; what it raises then no longer matters to its figures."""
        with contextlib.suppress(Exception):
            self._made.close()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep collections of the interpreter out of the timed part."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
