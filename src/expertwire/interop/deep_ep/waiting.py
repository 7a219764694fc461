"""Time that a call spends waiting for each rank, added to a tensor of the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from expertwire.communicator import MoECommunicator
from expertwire.errors import UnsupportedError
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
        UnsupportedError: it is on CUDA, where reading the times would stop the host.
    """

    def __init__(self, total: Array | None, name: str, num_ranks: int, problem: Problem) -> None:
        self._total = total
        if total is not None:
            arguments.tensor(total, name, "int64", (num_ranks,), problem.device)
            if problem.device != "cpu":
                raise UnsupportedError(f"{name}: waiting times of a call are there on the CPU only in this version")

    def of(self, comm: MoECommunicator) -> AbstractContextManager[None]:
        """Adds what the calls in the block wait, in nanoseconds."""
        return _NOTHING if self._total is None else self._measured(comm, self._total)

    @staticmethod
    @contextmanager
    def _measured(comm: MoECommunicator, total: Array) -> Iterator[None]:
        before = comm.stats().source_wait_seconds
        yield
        after = comm.stats().source_wait_seconds
        waited = [round((end - start) * _NANOSECONDS) for start, end in zip(before, after, strict=True)]
        total.add_(torch.tensor(waited, dtype=torch.int64))
