"""Time that a call spends waiting for each rank, added to a tensor of the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from expertwire.communicator import MoECommunicator
from expertwire.interop.deep_ep import arguments
from expertwire.interop.deep_ep.communicators import Problem
from expertwire.types import Array

_NANOSECONDS = 1e9
_NOTHING = nullcontext()


class WaitingTimes:
    """Where to add waiting times, or nowhere.

    Args:
        total: int64 [R], or ``None``.
        name: of the argument.
        num_ranks: R.
        problem: of the call.

    Raises:
        InvalidArgumentError: ``total`` is not such a tensor.
    """

    def __init__(self, total: Array | None, name: str, num_ranks: int, problem: Problem) -> None:
        self._total = total
        if total is not None:
            arguments.tensor(total, name, "int64", (num_ranks,), problem.device)

    def of(self, comm: MoECommunicator) -> AbstractContextManager[None]:
        """Adds what the calls in the block wait, in nanoseconds."""
        if self._total is None:
            return _NOTHING
        return self._counted(comm, self._total) if self._total.is_cuda else self._measured(comm, self._total)

    @staticmethod
    @contextmanager
    def _counted(comm: MoECommunicator, total: Array) -> Iterator[None]:
        counters = comm.get_source_wait_counters("torch")
        before = [counter.clone() for counter in counters]
        yield
        for counter, start in zip(counters, before, strict=True):
            total.add_(counter - start)

    @staticmethod
    @contextmanager
    def _measured(comm: MoECommunicator, total: Array) -> Iterator[None]:
        before = comm.stats().source_wait_seconds
        yield
        after = comm.stats().source_wait_seconds
        waited = [round((end - start) * _NANOSECONDS) for start, end in zip(before, after, strict=True)]
        total.add_(torch.tensor(waited, dtype=torch.int64))
