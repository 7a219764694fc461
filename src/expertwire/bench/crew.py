"""The processes, or threads, of the ranks: started for many jobs, watched, and replaced when a library breaks them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import expertwire
from expertwire.bench.job import WRONG, Job, RankTimes, in_one_line
from expertwire.bench.nodes import Nodes
from expertwire.bench.progress import Listener
from expertwire.bench.rank import measure_on_rank
from expertwire.groups import Group
from expertwire.progress import watched

#: How often a library may break the processes of all ranks before it is left out for good.
_MOST_BREAKS = 2


@dataclass
class Found:
    """What has been measured of one problem: for each library the times by rank."""

    title: str
    times: dict[str, list[RankTimes]] = field(default_factory=dict)

    def add(self, job: Job, times: dict[str, list[RankTimes]]) -> None:
        """Take what the ranks have left of a job."""
        for lib, ranks in times.items():
            known = self.times.setdefault(lib, [RankTimes() for _ in ranks])
            for own, new in zip(known, ranks, strict=True):
                if job.kernels and job.settings.host_rows and new.failure and WRONG not in new.failure:
                    own.missing.update(dict.fromkeys(("dispatch-kernel", "combine-kernel"), new.failure))
                    continue
                own.samples.update(new.samples)
                own.missing.update(new.missing)
                own.failure = own.failure or new.failure

    def leave_out(self, job: Job, lib: str, why: str) -> None:
        """Note that a library has no times of a job."""
        self.add(job, {lib: [RankTimes(failure=why) for _ in range(job.problem.num_ranks)]})


Work = list[tuple[Job, Found]]


@dataclass
class Progress:
    """Who is told how far the work is, and how many steps were done before."""

    listener: Listener
    num_steps: int


def do_jobs(work: Work, progress: Progress, nodes: Nodes | None) -> None:
    """Do jobs of one kind and number of ranks; what the ranks measure goes to what is found of each problem.

    Processes that a library breaks are replaced, and go on without it.
    """
    breaks: Counter[str] = Counter()
    while work:
        error = _run_ranks(work, progress, nodes)
        left, culprit = _what_is_left(work, error)
        progress.num_steps += sum(job.steps_done() for job, _ in work)
        breaks[culprit] += 1
        if breaks[culprit] >= _MOST_BREAKS:
            for job, found in left:
                if culprit in job.libs:
                    found.leave_out(job, culprit, "left out: it broke the processes of all ranks before")
            left = [(job.without({culprit}), found) for job, found in left]
        work = [(job, found) for job, found in left if job.libs]


def _what_is_left(work: Work, error: Exception | None) -> tuple[Work, str]:
    """Take in what the ranks have left. Returns the jobs still to do, and the library that ended the ranks early."""
    left: Work = []
    culprit = ""
    for job, found in work:
        times = job.read_times()
        found.add(job, times)
        rest = job
        if len(times) < len(job.libs):
            if not culprit:
                culprit = next((lib for lib in times if times[lib][0].failure), job.lib_in_turn())
                if culprit not in times:
                    found.leave_out(job, culprit, in_one_line(error) if error else "the ranks ended early")
                rest = job.without({*times, culprit})
            left.append((rest.again(), found))
    return left, culprit


def _run_ranks(work: Work, progress: Progress, nodes: Nodes | None) -> Exception | None:
    """Have all ranks do the jobs. Returns what ended them early, if anything did."""
    jobs = [job for job, _ in work]
    num_ranks = jobs[0].problem.num_ranks
    with watched(lambda: sum(job.steps_done() for job in jobs), _Shown(work, progress).tell):
        try:
            if nodes is not None:
                nodes.run(num_ranks, measure_on_rank, jobs)
            elif jobs[0].settings.threads:
                _run_threads(num_ranks, jobs)
            else:
                expertwire.spawn(measure_on_rank, num_ranks, jobs)
        except Exception as error:  # whatever ended a rank becomes the row of the library whose turn it was
            return error
    return None


def _run_threads(num_ranks: int, jobs: list[Job]) -> None:
    """Have threads do the jobs. An interrupt leaves them behind, as daemons: a rank may wait for long."""

    def work(group: Group, done: Future[None]) -> None:
        try:
            measure_on_rank(group, jobs)
            done.set_result(None)
        except BaseException as error:  # raised below, in the thread that waits
            done.set_exception(error)

    ranks: list[Future[None]] = [Future() for _ in range(num_ranks)]
    for group, done in zip(expertwire.local_group(num_ranks), ranks, strict=True):
        threading.Thread(target=work, args=(group, done), daemon=True).start()
    wait(ranks)
    for done in ranks:
        done.result()


class _Shown:
    """Turns a number of steps into words for a listener."""

    def __init__(self, work: Work, progress: Progress) -> None:
        self._work, self._listener, self._before = work, progress.listener, progress.num_steps
        self._title = ""

    def tell(self, num_steps: int) -> None:
        """So many steps of all jobs are done."""
        rest = num_steps
        turn = 0
        while turn < len(self._work) - 1 and rest >= self._work[turn][0].num_steps:
            rest -= self._work[turn][0].num_steps
            turn += 1
        job, found = self._work[turn]
        title = found.title + (", kernels alone" if job.kernels else "")
        if title != self._title:
            self._title = title
            self._listener.begin(title)
        self._listener.update(self._before + num_steps, job.doing(rest))
