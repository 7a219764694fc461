"""Runs a whole job: the ranks, then the reference over the same text, with progress on the way."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

import expertwire as ew
from expertwire.progress import watched
from expertwire.run.board import CHECKS, RANKS, Difference, create_board
from expertwire.run.plan import JobConfig
from expertwire.run.worker import RankSummary, check_steps, run_rank

#: Most processes that check at once; each of them holds all experts of the model.
MAX_CHECKS = 4
#: What makes each BLAS that NumPy may be built with use one thread: its bits depend on how it splits the work, and
#: ranks that share the cores gain nothing from more.
ONE_BLAS_THREAD = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Progress(Protocol):
    """Is told how far a job has come."""

    def begin(self, phase: str, num_tokens: int) -> None:
        """A phase starts that will work off ``num_tokens``."""

    def update(self, num_tokens: int) -> None:
        """So many tokens of the phase are done in all. Called from a thread of its own."""

    def end(self) -> None:
        """The phase is over, done or failed."""


@dataclass(frozen=True)
class JobResult:
    """What a job did.

    Attributes:
        num_tokens: of the text.
        ranks: account of each rank.
        topk_ids: int32 [layers, tokens, K].
        weights: float32 [layers, tokens, K].
        seconds: float64 [3, R, steps, layers]; dispatch, expert and combine time of every call on every rank.
        num_checks: processes that held the result against the reference; 0 if it was not asked for.
        check_seconds: what that took, starting the processes included.
        difference: the first one found.
    """

    num_tokens: int
    ranks: list[RankSummary]
    topk_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    seconds: npt.NDArray[np.float64]
    num_checks: int
    check_seconds: float
    difference: Difference | None

    @property
    def loop_seconds(self) -> float:
        """Time the slowest rank needed for its share of the text, without starting up."""
        return max(rank.seconds for rank in self.ranks)

    def expert_load(self, num_experts: int) -> npt.NDArray[np.int64]:
        """Returns the rows each expert received, int64 [layers, E]."""
        return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in self.topk_ids])


def run_job(config: JobConfig, token_ids: npt.NDArray[np.int32], progress: Progress, check: bool = True) -> JobResult:
    """Runs the ranks over the text and, if ``check``, holds every bit they computed against the reference.

    ``token_ids`` is int32 [tokens]. Raises InvalidArgumentError for sizes that do not fit, OSError when the temporary
    folder has no room, and whatever made a rank fail.
    """
    config.check()
    num_tokens = len(token_ids)
    num_steps = config.schedule(num_tokens).num_steps
    num_checks = min(MAX_CHECKS, num_steps, len(os.sched_getaffinity(0))) if check else 0
    difference, check_seconds = None, 0.0
    with tempfile.TemporaryDirectory(prefix="expertwire-run-") as name, _one_blas_thread():
        folder = Path(name)
        board = create_board(folder, config, token_ids, num_checks)
        with _phase(progress, f"{config.num_ranks} ranks", num_tokens, board.done[RANKS]):
            ranks = ew.spawn(run_rank, config.num_ranks, folder, config)
        if check:
            start = time.perf_counter()
            with _phase(progress, "reference", num_tokens, board.done[CHECKS]):
                found = ew.spawn(check_steps, num_checks, folder, config)
            check_seconds = time.perf_counter() - start
            difference = min(filter(None, found), key=lambda one: (one.step, one.layer, one.token), default=None)
        return JobResult(
            num_tokens=num_tokens,
            ranks=ranks,
            topk_ids=np.array(board.topk_ids),
            weights=np.array(board.weights),
            seconds=np.array(board.seconds),
            num_checks=num_checks,
            check_seconds=check_seconds,
            difference=difference,
        )


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Processes started meanwhile load their BLAS with one thread; this process keeps its environment."""
    before = {name: os.environ.get(name) for name in ONE_BLAS_THREAD}
    os.environ.update(dict.fromkeys(ONE_BLAS_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _phase(progress: Progress, name: str, num_tokens: int, done: npt.NDArray[np.int64]) -> Iterator[None]:
    """Reports the sum of ``done``, which other processes count up, until the block is left."""
    progress.begin(name, num_tokens)
    try:
        with watched(lambda: int(done.sum()), progress.update):
            yield
    finally:
        progress.end()
