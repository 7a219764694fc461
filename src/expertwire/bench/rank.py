"""One rank's part: every library is checked, then all of them are timed in turns, then checked again."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator
from typing import Any

from expertwire.bench.adapters import adapter_of
from expertwire.bench.adapters.base import Adapter, Belongings, RankContext
from expertwire.bench.inputs import Observation, rank_input
from expertwire.bench.job import REFUSED, WRONG, FailedElsewhereError, Job, RankTimes, in_one_line
from expertwire.bench.timing import HostTimer, Timer, Times
from expertwire.errors import Error, UnsupportedError
from expertwire.groups import Group

_FINE, _FAILED = b"+", b"-"
#: A step of a rank may take this much longer than the longest wait before its process is ended: compilers, big inputs.
_STEP_GRACE_S = 240.0


def measure_on_rank(group: Group, jobs: list[Job]) -> None:
    """Do all jobs on this rank, or as many as its GPU survives, and leave the times in files. Collective."""
    belongings = Belongings()
    try:
        with _on_device(group, jobs[0]):
            for job in jobs:
                times = _measure_job(group, job, belongings)
                intact = _all_intact(group, job)
                if not intact:  # whatever came after the GPU broke is the fault of no library but the first
                    times = dict([(lib, own) for lib, own in times.items() if own.failure][:1])
                job.write_times(group.rank, times)
                if not intact:
                    return
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception):
            belongings.close()


@contextlib.contextmanager
def _on_device(group: Group, job: Job) -> Iterator[None]:
    """Make the GPU of this rank, and a stream of it, current. Gradients are off, as in serving."""
    if job.settings.device != "cuda":
        yield
        return
    import torch

    torch.cuda.set_device(group.rank)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        yield


def _all_intact(group: Group, job: Job) -> bool:
    """Whether the GPUs of all ranks still work."""
    if job.settings.device != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        mine = _FINE
    except RuntimeError:
        mine = _FAILED
    return all(word == _FINE for word in group.all_gather(mine))


def _measure_job(group: Group, job: Job, belongings: Belongings) -> dict[str, RankTimes]:
    ranks = {lib: _RankOfLib(lib, group, job, belongings) for lib in job.libs}
    try:
        if job.kernels:
            for rank in ranks.values():
                rank.together(rank.trace_kernels)
                rank.close()
        else:
            _take_turns(job, list(ranks.values()))
    finally:
        for rank in ranks.values():
            rank.close()
    return {lib: rank.times for lib, rank in ranks.items()}


def _take_turns(job: Job, ranks: list[_RankOfLib]) -> None:
    for rank in ranks:
        rank.together(rank.prepare)
    for count in job.settings.parts():
        for rank in ranks:
            rank.together(rank.time_round, count)
    for rank in ranks:
        rank.together(rank.check, counts=False)


class _RankOfLib:
    """One library on this rank, and its times. After a failure on any rank, every rank leaves the library alone."""

    def __init__(self, lib: str, group: Group, job: Job, belongings: Belongings) -> None:
        self.times = RankTimes()
        self._lib, self._group, self._job, self._belongings = lib, group, job, belongings
        self._adapter: Adapter  # made by ``set_up``, together with what ``close`` undoes
        self._timer: Timer
        self._context: RankContext
        self._overlap: Any = None
        self._made = contextlib.ExitStack()
        self._expected = Observation.load(job.expected_path(lib, group.rank))

    def together(self, step: Callable[..., None], *args: int, counts: bool = True) -> None:
        """Run a step on all ranks at once, and agree on whether it failed anywhere."""
        if not self._job.settings.threads:
            faulthandler.dump_traceback_later(self._job.settings.timeout_s + _STEP_GRACE_S, exit=True)  # hangs end
        if not self.times.failure:
            try:
                self.times.failure = self._agree(step, *args)
            except FailedElsewhereError as known:
                self.times.failure = str(known)
        if counts and self._group.rank == 0:
            self._job.count_step()

    def _agree(self, step: Callable[..., None], *args: int) -> str:
        """Run a step that all ranks come to; return what went wrong in it on any of them, or an empty string.

        Steps may be parts of others. A rank that fails before it comes to this one raises FailedElsewhereError here on
        the others, which then leave the step around it like that rank.
        """
        self.exchange(b"ready")
        failure = ""
        try:
            step(*args)
        except FailedElsewhereError as known:
            return str(known)
        except Exception as error:  # whatever a library raises becomes its row
            refused = isinstance(error, UnsupportedError)
            failure = f"{REFUSED}{' '.join(str(error).split())}" if refused else in_one_line(error)
        try:
            self.exchange(b"done", failure)
        except FailedElsewhereError as known:
            return str(known)
        return ""

    def exchange(self, word: bytes, failure: str = "") -> list[bytes]:
        """All-gather a word, or that this rank has failed: then the same exchange ends the step on every rank."""
        words = self._group.all_gather(_FAILED + failure.encode() if failure else _FINE + word)
        named = {rank: text[1:].decode() for rank, text in enumerate(words) if text.startswith(_FAILED)}
        if named:
            refused = [text for text in named.values() if text.startswith(REFUSED)]
            alike = len(refused) == len(named) and refused[0]
            raise FailedElsewhereError(alike or "; ".join(f"rank {rank}: {text}" for rank, text in named.items()))
        return [text[1:] for text in words]

    def set_up(self) -> None:
        """Make the library's adapter, check its first pair, and warm it up."""
        job, group = self._job, self._group
        own = rank_input(job.problem, group.rank)
        self._context = RankContext(group, job.problem, job.settings, own, self.exchange, self._belongings)
        self._adapter = adapter_of(self._lib, job.settings)(self._context)
        self._made.callback(self._adapter.close)
        self._adapter.dispatch()
        self._adapter.apply_experts()
        self._adapter.combine()
        self.check()
        for _ in range(job.settings.warmup):
            self._adapter.dispatch()
            self._adapter.combine()

    def prepare(self) -> None:
        """Set the library up for its turns."""
        self.set_up()
        self._timer = self._make_timer()
        self.times.missing.update(self._timer.prepare(self.check))
        if self._job.settings.overlap and self._lib == "expertwire":
            self._overlap_or_not(self._make_overlap_timer)

    def _make_overlap_timer(self) -> None:
        from expertwire.bench.overlap_timing import MicroBatches, OverlapTimer

        batches = MicroBatches(self._context)
        self._made.callback(batches.close)
        self._overlap = OverlapTimer(
            batches, self._context, lambda observed: self._adapter.difference(observed, self._expected)
        )

    def _overlap_or_not(self, step: Callable[..., None], *args: int) -> None:
        """Run a step of ``--overlap``; if it fails, those phases have no figures, and the others are as they were."""
        from expertwire.bench.overlap_timing import WAYS

        if failure := self._agree(step, *args):
            self._overlap = None
            for phase in WAYS:
                self.times.samples.pop(phase, None)
                self.times.missing[phase] = failure

    def _time_overlap(self, count: int) -> None:
        self._keep(self._overlap.round(count))

    def _make_timer(self) -> Timer:
        settings = self._job.settings
        if settings.device != "cuda":
            return HostTimer(self._adapter, self.check if settings.validate else None)
        from expertwire.bench.gpu_timing import GpuTimer

        return GpuTimer(self._adapter, settings)

    def check(self) -> None:
        """Hold the last pair against the expectation. Raises Error."""
        if wrong := self._adapter.difference(self._adapter.observe(), self._expected):
            raise Error(f"{WRONG}{wrong}")

    def time_round(self, count: int) -> None:
        """Time ``count`` pairs of every kind."""
        self._adapter.forget()
        self._keep(self._timer.round(count))
        if self._overlap is not None:
            self._overlap_or_not(self._time_overlap, count)
        if self._job.settings.validate:
            self.check()

    def trace_kernels(self) -> None:
        """Set the library up and time its kernels, checked before and after."""
        from expertwire.bench.gpu_timing import GpuTimer
        from expertwire.bench.kernel_trace import make_tracer

        tracer: Any = self._belongings.once("tracer", make_tracer)
        self.set_up()
        timer = GpuTimer(self._adapter, self._job.settings)
        timer.prepare(self.check)
        self._adapter.forget()
        times, missing = timer.kernels(tracer)
        self._keep(times)
        self.times.missing = missing
        self.check()

    def _keep(self, times: Times) -> None:
        for phase, own in times.items():
            self.times.samples.setdefault(phase, []).extend(own)

    def close(self) -> None:
        """Close the library; what it raises then no longer matters to its figures."""
        with contextlib.suppress(Exception):
            self._made.close()
