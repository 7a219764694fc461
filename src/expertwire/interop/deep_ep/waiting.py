"""Time that a call spends waiting for each rank, added to a tensor of the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from expertwire.communicator import MoECommunicator
from expertwire.errors import UnsupportedError
from expertwire.interop.deep_ep import arguments
from expertwire.interop.deep_ep.communicators import Problem
from expertwire.types import Array

_NANOSECONDS = 1e9


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

    @contextlib.contextmanager
    def of(self, comm: MoECommunicator) -> Iterator[None]:
        """Adds what the calls in the block wait, in nanoseconds."""
        if self._total is None:
            yield
            return
        before = comm.stats().source_wait_seconds
        yield
        after = comm.stats().source_wait_seconds
        waited = [round((end - start) * _NANOSECONDS) for start, end in zip(before, after, strict=True)]
        self._total.add_(torch.tensor(waited, dtype=torch.int64))
