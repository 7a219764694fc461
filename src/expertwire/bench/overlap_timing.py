"""``--overlap gemm``: two micro-batches, a pair around a GEMM each, and how much of the pairs the GEMMs hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.adapters.expertwire_gpu import ExpertwireOnGpu
from expertwire.bench.gpu_timing import GpuTimer
from expertwire.bench.inputs import Observation
from expertwire.bench.timing import Times
from expertwire.errors import Error

_BATCHES = range(2)


class MicroBatches(ExpertwireOnGpu):
    """Two micro-batches of the same rows. What is no method of an adapter does both, in an order of its own.

    The GEMM is that of as many rows as a rank receives on average, T * K, and a square matrix, in BF16. It works on
    memory of its own, so that results can be checked.
    """

    def __init__(self, context: RankContext) -> None:
        import torch

        super().__init__(context, two_phase=True, max_in_flight=len(_BATCHES))
        self._torch = torch
        rows, hidden = context.problem.num_tokens * context.problem.num_topk, context.problem.hidden_size
        self._factors = [torch.randn(size, hidden, device=context.device).bfloat16() for size in (rows, hidden)]
        self._products = [torch.empty_like(self._factors[0]) for _ in _BATCHES]
        self._side = torch.cuda.Stream(context.device, priority=-1)  # few blocks that others wait for go first
        self._rows, self._outs = [], [torch.empty_like(self._x) for _ in _BATCHES]
        self._lanes = []  # what dispatch returned; batches take the lanes in turns, in every order of the work
        for _ in _BATCHES:
            self.dispatch()
            self.apply_experts()
            self._lanes.append(self._received)
            self._rows.append(self._expert_output)
            self.combine()

    def gemms(self) -> None:
        """Multiply alone."""
        for batch in _BATCHES:
            self._multiply(batch)

    def pairs(self) -> None:
        """Dispatch and combine alone."""
        for batch in _BATCHES:
            self._combine(batch, self._dispatch())

    def sequential(self) -> None:
        """Do one thing after the other."""
        for batch in _BATCHES:
            handle = self._dispatch()
            self._multiply(batch)
            self._combine(batch, handle)

    def two_streams(self) -> None:
        """Dispatch and combine on a stream of their own, the one batch beside the GEMM of the other."""
        main, side = self._torch.cuda.current_stream(), self._side
        side.wait_stream(main)
        on_side = self._comm.create_overlap_config("dispatch", stream=side)
        sent = [(self._dispatch(overlap=on_side), side.record_event()) for _ in _BATCHES]
        for batch, (handle, has_arrived) in enumerate(sent):
            main.wait_event(has_arrived)
            self._multiply(batch)
            is_multiplied = main.record_event()
            after = self._comm.create_overlap_config("combine", stream=side, wait_event=is_multiplied)
            self._combine(batch, handle, overlap=after)
        main.wait_stream(side)

    def two_phases(self) -> None:
        """Send both batches, and receive each as late as can be, all on one stream."""
        sent = [self._comm.dispatch_async(self._x, self._topk_ids, self._weights) for _ in _BATCHES]
        back = []
        for batch, request in enumerate(sent):
            _, handle = request.wait()
            self._multiply(batch)
            back.append(self._comm.combine_async(self._rows[batch], handle, out=self._outs[batch]))
        for request in back:
            request.wait()

    def spoil(self) -> None:
        """Fill the results with NaN and the received tokens with zeros."""
        for out, received in zip(self._outs, self._lanes, strict=True):
            out.fill_(float("nan"))
            self._received = received
            self.forget()

    def results(self) -> list[Observation]:
        """Return what each batch has come to."""
        observed = []
        for out, received in zip(self._outs, self._lanes, strict=True):
            self._received = received
            self._combined.copy_(out)
            observed.append(self.observe())
        return observed

    def _multiply(self, batch: int) -> None:
        self._torch.mm(*self._factors, out=self._products[batch])

    def _dispatch(self, **options: Any) -> Any:
        return self._comm.dispatch(self._x, self._topk_ids, self._weights, **options)[1]

    def _combine(self, batch: int, handle: Any, **options: Any) -> None:
        self._comm.combine(self._rows[batch], handle, out=self._outs[batch], **options)


#: How each phase orders the work.
WAYS: dict[str, Callable[[MicroBatches], None]] = {
    "batches-gemm": MicroBatches.gemms,
    "batches-pair": MicroBatches.pairs,
    "batches-sequential": MicroBatches.sequential,
    "batches-two-streams": MicroBatches.two_streams,
    "batches-two-phases": MicroBatches.two_phases,
}


class OverlapTimer:
    """Times every way in captured graphs of it. Construction and ``round`` are collective.

    Args:
        batches: of this rank; the caller closes them.
        context: the same.
        difference: what is wrong with an observation, or an empty string.
    """

    def __init__(self, batches: MicroBatches, context: RankContext, difference: Callable[[Observation], str]) -> None:
        self._batches, self._difference = batches, difference
        self._timers: dict[str, GpuTimer] = {}
        for phase, way in WAYS.items():
            self._batches.spoil()
            way(self._batches)  # loads what it needs
            self._check(phase)
            timer = GpuTimer(_OneWay(self._batches, way), context.settings)
            timer.capture()
            context.exchange(b"captured")
            self._batches.spoil()
            timer.replays(1)
            self._check(phase)
            self._timers[phase] = timer

    def round(self, count: int) -> Times:
        """Return nanoseconds of two micro-batches, ``count`` times for each way."""
        return {phase: timer.replays(count) for phase, timer in self._timers.items()}

    def _check(self, phase: str) -> None:
        results = self._batches.results()
        if phase == "batches-gemm":
            return
        for observed in results:
            if wrong := self._difference(observed):
                raise Error(f"{phase}: {wrong}")


class _OneWay(Adapter):
    """What a timer of pairs takes for an adapter: its pair is both micro-batches."""

    name, notes = "", ""

    def __init__(self, batches: MicroBatches, way: Callable[[MicroBatches], None]) -> None:
        self._batches, self._way = batches, way

    def dispatch(self) -> None:
        """Do both micro-batches."""
        self._way(self._batches)

    def apply_experts(self) -> None:
        """Nothing to do."""

    def combine(self) -> None:
        """Nothing to do."""

    def observe(self) -> Observation:
        """Return what the last dispatch and combine gave."""
        return self._batches.observe()

    def close(self) -> None:
        """Nothing to do: the communicator is for all ways."""
