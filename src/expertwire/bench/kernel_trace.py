"""What the GPU's own records say of kernels: CUPTI in this process, through cupti-python or else through torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_BUFFER_BYTES = 8 << 20


class KernelRecord(NamedTuple):
    """One kernel that ran; nanoseconds of the GPU's clock."""

    name: str
    start_ns: int
    end_ns: int


class Tracer(Protocol):
    """Records kernels."""

    def trace(self, work: Callable[[], object]) -> list[KernelRecord]:
        """Do the work, wait for the GPU, and return the kernels that ran, in any order."""


def make_tracer() -> Tracer:
    """Return what this process records kernels with. Call it before graphs are captured, or they stay unseen."""
    return CuptiTracer() if find_spec("cupti") else TorchTracer()


class CuptiTracer:
    """Activity records of CUPTI, through cupti-python."""

    def __init__(self) -> None:
        from cupti import cupti  # type: ignore[import-not-found]

        self._cupti: Any = cupti
        self._records: list[KernelRecord] = []
        cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._receive)
        self.trace(lambda: None)

    def _receive(self, activities: list[Any]) -> None:
        kernels = (one for one in activities if one.kind == self._cupti.ActivityKind.CONCURRENT_KERNEL)
        self._records += [KernelRecord(one.name, one.start, one.end) for one in kernels]

    def trace(self, work: Callable[[], object]) -> list[KernelRecord]:
        """See Tracer."""
        import torch

        torch.cuda.synchronize()
        self._records.clear()
        self._cupti.activity_enable(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        try:
            work()
            torch.cuda.synchronize()
        finally:
            self._cupti.activity_flush_all(1)
            self._cupti.activity_disable(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        return list(self._records)


class TorchTracer:
    """The kernels of a trace of torch.profiler, which has CUPTI in it."""

    def __init__(self) -> None:
        self.trace(lambda: None)

    def trace(self, work: Callable[[], object]) -> list[KernelRecord]:
        """See Tracer."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return kernels_of_trace(events)


def kernels_of_trace(events: list[dict[str, Any]]) -> list[KernelRecord]:
    """Return the kernels among the events of a Chrome trace, whose unit is the microsecond."""
    records = []
    for event in events:
        if event.get("cat") == "kernel":
            start_ns = round(event["ts"] * 1e3)
            records.append(KernelRecord(event["name"], start_ns, start_ns + round(event["dur"] * 1e3)))
    return records
