"""Measuring problems: expectations first, then processes that do one problem after the other, then figures."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from expertwire.bench.adapters import PROGRAMS, adapter_of, notes_of, obstacle
from expertwire.bench.crew import Found, Progress, do_jobs
from expertwire.bench.inputs import check_problem, payload_bytes_per_rank, rank_input
from expertwire.bench.job import REFUSED, Job, in_one_line
from expertwire.bench.nodes import Nodes
from expertwire.bench.progress import Listener
from expertwire.bench.schema import LibResult, Problem, Run, Settings, Status
from expertwire.bench.summary import hidden_us, summarize, with_ratios
from expertwire.errors import Error
from expertwire.machine import usable_cores

#: Processes that work out what is right, at most: big shapes need a GiB or more each.
_MOST_WORKERS = 8


def measure(
    problem: Problem, settings: Settings, libs: list[str], tell: Callable[[int, str], None] | None = None
) -> Run:
    """Measure the libraries on one problem, and tell what :func:`measure_all` tells its listener."""
    (run,) = measure_all([problem], settings, libs, _Told(tell or (lambda _count, _doing: None)))
    return run


class _Told:
    """A listener that wants numbers alone."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self.update = tell

    def begin(self, title: str) -> None:
        """Says nothing."""


def num_steps(problem: Problem, settings: Settings, libs: list[str]) -> int:
    """Return the number of steps of a problem that a listener is told of, if nothing breaks."""
    return sum(job.num_steps for job in _jobs_of(problem, settings, libs, Path()))


def measure_all(
    problems: list[Problem], settings: Settings, libs: list[str], listener: Listener, nodes: Nodes | None = None
) -> list[Run]:
    """Measure the libraries on every problem, in as few processes as that takes.

    A library that cannot run here, or that is wrong, keeps a row which says so. ``listener`` is told, in a thread of
    its own, which problem is being measured, and how many steps of all problems are done. ``nodes`` is where mpirun
    starts the ranks, which are processes or threads of this one's otherwise.

    Raises:
        InvalidArgumentError: a problem cannot be built, or its routing file not be read; nothing has been measured.
    """
    for problem in problems:
        check_problem(problem)
    with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
        found = [Found(f"{number} of {len(problems)}: {one.title()}") for number, one in enumerate(problems, 1)]
        jobs = []
        for number, problem in enumerate(problems):
            own_folder = Path(folder) / str(number)
            own_folder.mkdir()
            jobs += [(job, found[number]) for job in _jobs_of(problem, settings, libs, own_folder)]
        jobs.sort(key=lambda one: one[0].kernels)  # processes that have looked at kernels time nothing else
        _save_expectations({job.folder: job for job, _ in jobs}.values(), settings)
        before = 0
        for _, alike in itertools.groupby(jobs, lambda one: (one[0].kernels, one[0].problem.num_ranks)):
            same = list(alike)
            do_jobs(same, Progress(listener, before), nodes)
            before += sum(job.num_steps for job, _ in same)
    return [_run(problem, settings, libs, one, nodes) for problem, one in zip(problems, found, strict=True)]


def _jobs_of(problem: Problem, settings: Settings, libs: list[str], folder: Path) -> list[Job]:
    """Return what the processes of the ranks do for a problem."""
    kinds = [False] * settings.host_rows + [True] * (settings.kernel_rows and settings.device == "cuda")
    able = tuple(lib for lib in libs if lib not in PROGRAMS and not obstacle(lib, problem, settings))
    return [Job(problem, settings, able, kernels, folder) for kernels in kinds if able]


def _save_expectations(jobs: Iterable[Job], settings: Settings) -> None:
    """Write what every library must observe on every rank."""
    if settings.device == "cpu":
        for job in jobs:
            _save_expectation(job)
        return
    with ProcessPoolExecutor(min(_MOST_WORKERS, usable_cores()), get_context("spawn")) as pool:
        list(pool.map(_save_expectation, jobs))


def _save_expectation(job: Job) -> None:
    inputs = [rank_input(job.problem, rank) for rank in range(job.problem.num_ranks)]
    for lib in job.libs:
        for rank, expected in enumerate(adapter_of(lib, job.settings).expected(job.problem, inputs)):
            expected.save(job.expected_path(lib, rank))


def _run(problem: Problem, settings: Settings, libs: list[str], found: Found, nodes: Nodes | None) -> Run:
    """Return the figures of a problem. Programs are run now, one after the other."""
    num_bytes = payload_bytes_per_rank(problem)
    results = [_result(lib, problem, settings, found, nodes) for lib in libs]
    summed = [_summed(result, settings, num_bytes) for result in results]
    return Run(problem, num_bytes, with_ratios(summed))


def _summed(result: LibResult, settings: Settings, num_bytes: float) -> LibResult:
    if not result.samples:
        return result
    phases = summarize(result.samples, settings, num_bytes)
    return replace(result, phases=phases, hidden_us=hidden_us(phases))


def _result(lib: str, problem: Problem, settings: Settings, found: Found, nodes: Nodes | None) -> LibResult:
    """Return a library's samples, or why it has none."""
    if why := obstacle(lib, problem, settings, nodes):
        return LibResult(lib, Status.SKIPPED, why)
    notes = notes_of(lib, settings)
    if lib in PROGRAMS:
        try:
            return LibResult(lib, Status.OK, notes=notes, samples=PROGRAMS[lib].measure(problem, settings, nodes))
        except (Error, OSError) as error:
            return LibResult(lib, Status.FAILED, in_one_line(error), notes)
    ranks = found.times[lib]
    failure, missing = ranks[0].failure, ranks[0].missing
    if failure:
        status = Status.SKIPPED if failure.startswith(REFUSED) else Status.FAILED
        return LibResult(lib, status, failure, notes)
    if not ranks[0].samples:
        return LibResult(lib, Status.SKIPPED, "; ".join(dict.fromkeys(missing.values())), notes)
    samples = {phase: np.array([own.samples[phase] for own in ranks]) for phase in ranks[0].samples}
    return LibResult(lib, Status.OK, notes=notes, samples=samples, missing=missing)
