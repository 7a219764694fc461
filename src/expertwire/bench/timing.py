"""How a library is timed on CPUs: the caller's clock around each call."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from expertwire.bench.adapters.base import Adapter

#: Nanoseconds of every timed call on this rank, by phase.
Times = dict[str, list[int]]


class Timer(Protocol):
    """Times one library on this rank. Every method is collective."""

    def prepare(self, check: Callable[[], None]) -> dict[str, str]:
        """Do what comes before the first round. Returns the phases that cannot be timed, and why."""

    def round(self, count: int) -> Times:
        """Time ``count`` pairs."""


class HostTimer:
    """On each rank the two operations of a pair are timed back to back with the monotonic clock.

    The pairs follow each other without a barrier, as the layers of a model do.

    Args:
        adapter: the library.
        check: holds the last pair against the expectation; called after every pair, outside the timed part.
    """

    def __init__(self, adapter: Adapter, check: Callable[[], None] | None) -> None:
        self._adapter, self._check = adapter, check

    def prepare(self, _check: Callable[[], None]) -> dict[str, str]:
        """Nothing needs doing."""
        return {}

    def round(self, count: int) -> Times:
        """Time ``count`` pairs. One more before them brings caches and ranks back in step after another's turn."""
        adapter, clock = self._adapter, time.perf_counter_ns
        dispatch: list[int] = []
        combine: list[int] = []
        adapter.dispatch()
        adapter.combine()
        with without_garbage_collection():
            for _ in range(count):
                start = clock()
                adapter.dispatch()
                middle = clock()
                adapter.combine()
                end = clock()
                dispatch.append(middle - start)
                combine.append(end - middle)
                if self._check is not None:
                    self._check()
        pairs = [first + second for first, second in zip(dispatch, combine, strict=True)]
        return {"dispatch": dispatch, "combine": combine, "pair": pairs}


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep collections of the interpreter out of the timed part."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
