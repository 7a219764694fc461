"""How a library is timed on GPUs: events around captured graphs and plain launches, and the caller's own time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from expertwire.bench.adapters.base import Adapter
from expertwire.bench.kernel_trace import KernelRecord, Tracer
from expertwire.bench.schema import Settings
from expertwire.bench.timing import Times, without_garbage_collection

#: Pairs issued in a row when the caller is timed: few enough that no launch waits for room in a queue.
HOST_PAIRS = 20


class GpuTimer:
    """Pairs run back to back on one stream and nothing waits for the GPU in between.

    Args:
        adapter: the library, which launches on torch's current stream.
        settings: how to measure.
    """

    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        import torch

        self._torch, self._adapter, self._settings = torch, adapter, settings
        self._graph: Any = None

    def prepare(self, check: Callable[[], None]) -> dict[str, str]:
        """Capture a graph of pairs, and check what a replay of it produces."""
        blocking = self._adapter.blocking
        missing = {f"{phase}-host": blocking for phase in ("dispatch", "combine") if blocking}
        if not self._settings.cuda_graph:
            return missing
        if blocking:
            return {"pair": f"cannot be captured: {blocking}", **missing}
        self.capture()
        self._adapter.forget()
        self._graph.replay()
        check()
        return missing

    def capture(self) -> None:
        """Capture ``iters_per_graph`` pairs."""
        torch = self._torch
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        capture = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
        with without_garbage_collection(), capture:  # no capture survives that memory of the GPU is freed
            self._pairs(self._settings.iters_per_graph)
        torch.cuda.synchronize()

    def round(self, count: int) -> Times:
        """Time ``count`` replays, ``count`` pairs of plain launches, and the caller of some of them."""
        with without_garbage_collection():
            times = self._launches(count)
            if self._graph is not None:
                times["pair"] = self.replays(count)
            if not self._adapter.blocking:
                times.update(self._calls(min(count, HOST_PAIRS)))
        return times

    def replays(self, count: int) -> list[int]:
        """Return nanoseconds a pair. One replay more before them brings the ranks in step."""
        marks = self._marks(count + 1)
        self._graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        marks[-1].synchronize()
        num_pairs = self._settings.iters_per_graph
        return [round(span / num_pairs) for span in _spans(marks)]

    def _launches(self, count: int) -> Times:
        marks = self._marks(2 * count + 1)
        self._adapter.dispatch()
        self._adapter.combine()
        marks[0].record()
        for after_dispatch, after_combine in zip(marks[1::2], marks[2::2], strict=True):
            self._adapter.dispatch()
            after_dispatch.record()
            self._adapter.combine()
            after_combine.record()
        marks[-1].synchronize()
        spans = [round(span) for span in _spans(marks)]
        return {
            "dispatch-launch": spans[0::2],
            "combine-launch": spans[1::2],
            "pair-launch": [first + second for first, second in zip(spans[0::2], spans[1::2], strict=True)],
        }

    def _calls(self, count: int) -> Times:
        """Return what calls cost the caller, who issues them without waiting."""
        adapter, clock = self._adapter, time.perf_counter_ns
        times: Times = {"dispatch-host": [], "combine-host": []}
        self._torch.cuda.synchronize()
        for _ in range(count):
            start = clock()
            adapter.dispatch()
            middle = clock()
            adapter.combine()
            end = clock()
            times["dispatch-host"].append(middle - start)
            times["combine-host"].append(end - middle)
        self._torch.cuda.synchronize()
        return times

    def _marks(self, count: int) -> list[Any]:
        return [self._torch.cuda.Event(enable_timing=True) for _ in range(count)]

    def kernels(self, tracer: Tracer) -> tuple[Times, dict[str, str]]:
        """Return the nanoseconds that the kernels of each operation ran, summed, or why they cannot be told apart.

        Pairs are replayed from a graph where there is one: gaps between launches do not count, but a kernel that waits
        for another rank's does.
        """
        adapter, num_pairs = self._adapter, self._settings.iters_per_graph
        of_dispatch = [record.name for record in tracer.trace(adapter.dispatch)]
        of_combine = [record.name for record in tracer.trace(adapter.combine)]
        if self._graph is not None:
            replays = 1 + -(-self._settings.iters // num_pairs)  # the first one brings the ranks in step
            records = tracer.trace(lambda: [self._graph.replay() for _ in range(replays)])
            skipped = num_pairs
        else:
            replays, num_pairs, skipped = 1, self._settings.iters + 1, 1
            records = tracer.trace(lambda: self._pairs(num_pairs))
        total = num_pairs * replays
        return split_records(records, (of_dispatch, of_combine), total, skipped)

    def _pairs(self, count: int) -> None:
        for _ in range(count):
            self._adapter.dispatch()
            self._adapter.combine()


def _spans(marks: list[Any]) -> list[float]:
    """Return nanoseconds between each two events."""
    return [first.elapsed_time(second) * 1e6 for first, second in itertools.pairwise(marks)]


def split_records(
    records: list[KernelRecord], names: tuple[list[str], list[str]], num_pairs: int, skipped: int
) -> tuple[Times, dict[str, str]]:
    """Return the time of each dispatch and combine from the kernels of many pairs, or why that cannot be told.

    Args:
        records: of ``num_pairs`` pairs.
        names: kernels of one dispatch and of one combine.
        num_pairs: how many there are.
        skipped: pairs at the start that do not count.
    """
    of_dispatch, of_combine = names
    in_order = sorted(records, key=lambda record: record.start_ns)
    size = len(of_dispatch) + len(of_combine)
    pairs = [in_order[first : first + size] for first in range(0, len(in_order), size or 1)]
    expected = sorted(of_dispatch + of_combine)
    if not size or len(pairs) != num_pairs or any(sorted(record.name for record in one) != expected for one in pairs):
        why = f"{len(records)} kernels were recorded in {num_pairs} pairs of {len(of_dispatch)} + {len(of_combine)}"
        return {}, {"dispatch-kernel": why, "combine-kernel": why}
    times: Times = {"dispatch-kernel": [], "combine-kernel": []}
    for pair in pairs[skipped:]:
        spans = [record.end_ns - record.start_ns for record in pair]
        times["dispatch-kernel"].append(sum(spans[: len(of_dispatch)]))
        times["combine-kernel"].append(sum(spans[len(of_dispatch) :]))
    return times, {}
