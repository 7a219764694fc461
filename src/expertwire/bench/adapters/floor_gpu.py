"""``floor`` on GPUs: one raw exchange of the same rows each way, one kernel each, the reference of this machine.

``floor.cu`` has the kernel and says why it is right.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from expertwire.bench import gpu_timing
from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.adapters.floor import Bytes, Floor, dispatch_rows, returned_rows, sent_tokens
from expertwire.bench.gpu_module import Driver, compile_source
from expertwire.bench.inputs import Observation, row_digests
from expertwire.bench.routing import make_routing
from expertwire.bench.schema import Problem
from expertwire.errors import PeerLostError, UnsupportedError
from expertwire.reference import BF16, RankInput

_SOURCE = Path(__file__).parents[1] / "floor.cu"
_MAX_RANKS, _WORD_BYTES = 16, 16
_TRIAL_PAIRS, _TRIAL_REPLAYS = 20, 5


class ExchangeParams(ctypes.Structure):
    """The structure of that name in floor.cu."""

    _fields_ = [
        ("source", ctypes.c_uint64 * _MAX_RANKS),
        ("target", ctypes.c_uint64 * _MAX_RANKS),
        ("staging", ctypes.c_uint64 * _MAX_RANKS),
        ("output", ctypes.c_uint64 * _MAX_RANKS),
        ("words_out", ctypes.c_int64 * _MAX_RANKS),
        ("words_in", ctypes.c_int64 * _MAX_RANKS),
        ("timeout_ns", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("num_ranks", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    ]


def in_words(rows: Bytes) -> Bytes:
    """Return rows filled up with zeros to whole words of the kernel."""
    return np.pad(rows, [(0, 0), (0, -rows.shape[1] % _WORD_BYTES)])


class FloorOnGpu(Adapter):
    """Two raw exchange steps over memory that the GPUs map of each other."""

    name = "floor"
    notes = (
        "raw exchange each way, one kernel each, one row per (token, destination rank), packed beforehand; no routing, "
        "counts, weights, sums or quantisation; the best of a few grids"
    )

    @classmethod
    def expected(cls, problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
        """Return the sent rows by source, and the returned rows by the rank that brings them back."""
        return Floor.expected(problem, inputs)

    def __init__(self, context: RankContext) -> None:
        import torch

        self._torch, self._context = torch, context
        problem, group = context.problem, context.group
        if group.size > _MAX_RANKS:
            raise UnsupportedError(f"{group.size} ranks: at most {_MAX_RANKS}")
        self._driver = context.belongings.once("driver", Driver)
        self._entry = context.belongings.once("floor.cu", self._load)
        sent = sent_tokens(problem, context.own.topk_ids)
        routings = [make_routing(problem, source).topk_ids for source in range(group.size)]
        counts_in = [len(sent_tokens(problem, ids)[group.rank]) for ids in routings]
        rows = in_words(dispatch_rows(problem, context.own))
        outgoing = [
            [rows[tokens] for tokens in sent],
            [returned_rows(problem, group.rank, source)[:count] for source, count in enumerate(counts_in)],
        ]
        counts = (counts_in, [len(tokens) for tokens in sent])
        self._row_bytes = (dispatch_rows(problem, context.own).shape[1], problem.hidden_size * 2)
        shared = _SharedMemory(context, self._driver, (rows.shape[1], problem.hidden_size * 2))
        self._lost = torch.zeros(1, dtype=torch.int32, device=context.device)
        self._steps = [_Step(context, shared, phase, outgoing[phase], counts[phase]) for phase in (0, 1)]
        for step in self._steps:
            step.params.lost = self._lost.data_ptr()
        torch.cuda.synchronize()
        context.exchange(b"ready")
        self._grid = self._best_grid()

    def _load(self) -> Any:
        architecture = self._driver.architecture(self._context.group.rank)
        image = compile_source(_SOURCE.read_text(encoding="utf-8"), architecture)
        return self._driver.kernel(image, "exchange")

    def _best_grid(self) -> tuple[int, int]:
        """Collective. Return the grid on which captured pairs of these rows are fastest, tried once for each shape."""
        problem = self._context.problem
        shape = (problem.num_tokens, problem.num_experts, problem.num_topk, problem.hidden_size)
        key = f"floor grid {shape} {problem.dispatch_dtype} {problem.routing} {problem.seed}"
        grid: tuple[int, int] = self._context.belongings.once(key, self._try_grids)
        return grid

    def _try_grids(self) -> tuple[int, int]:
        most = self._torch.cuda.get_device_properties(self._context.device).multi_processor_count
        blocks = dict.fromkeys(max(most // share, 1) for share in (1, 2, 4))
        times = {}
        self._grid = (most, 512)
        self.dispatch()
        self.combine()  # loads the kernel, which a capture must not do
        for grid in [(count, threads) for count in blocks for threads in (512, 1024)]:
            self._grid = grid
            timer = gpu_timing.GpuTimer(self, replace(self._context.settings, iters_per_graph=_TRIAL_PAIRS))
            timer.capture()
            self._context.exchange(b"captured")
            own = sorted(timer.replays(_TRIAL_REPLAYS))[_TRIAL_REPLAYS // 2]
            times[grid] = max(json.loads(word) for word in self._context.exchange(json.dumps(own).encode()))
        return min(times, key=lambda grid: times[grid])

    def dispatch(self) -> None:
        """Exchange tokens."""
        self._launch(0)

    def apply_experts(self) -> None:
        """Nothing to do: what each rank brings back is fixed, so that combine is checked apart from dispatch."""

    def combine(self) -> None:
        """Exchange what goes back."""
        self._launch(1)

    def _launch(self, phase: int) -> None:
        stream = self._torch.cuda.current_stream().cuda_stream
        self._driver.launch(self._entry, self._grid, self._steps[phase].params, stream)

    def observe(self) -> Observation:
        """Return digests of all received rows, and all returned rows."""
        arrived, returned = (step.output.cpu().numpy() for step in self._steps)
        if int(self._lost.item()):
            raise PeerLostError("floor: rows did not arrive in time", operation="floor")
        tokens = row_digests(arrived[:, : self._row_bytes[0]])
        return Observation({"tokens": tokens}, returned.view(BF16))

    def forget(self) -> None:
        """Fill the outputs with zeros."""
        for step in self._steps:
            step.output.zero_()

    def close(self) -> None:
        """Let go of the rows; the shared memory is for the next problem."""
        self._steps = []


class _Step:
    """One phase of one rank: what the kernel is told, and what keeps its memory."""

    def __init__(
        self, context: RankContext, shared: _SharedMemory, phase: int, outgoing: list[Bytes], counts_in: list[int]
    ) -> None:
        import torch

        rank = context.group.rank
        row_bytes = outgoing[rank].shape[1]
        sources = np.concatenate(outgoing)
        self.source = torch.from_numpy(sources).to(context.device)
        self.output = torch.zeros((sum(counts_in), row_bytes), dtype=torch.uint8, device=context.device)
        self.params = ExchangeParams(num_ranks=context.group.size, rank=rank)
        self.params.timeout_ns = int(context.settings.timeout_s * 1e9)
        source, output = self.source.data_ptr(), self.output.data_ptr()
        for peer, (rows, count) in enumerate(zip(outgoing, counts_in, strict=True)):
            self.params.source[peer], self.params.output[peer] = source, output
            self.params.words_out[peer] = rows.nbytes // _WORD_BYTES
            self.params.words_in[peer] = count * row_bytes // _WORD_BYTES
            self.params.target[peer] = shared.staging(phase, peer, rank)
            self.params.staging[peer] = shared.staging(phase, rank, peer)
            source += rows.nbytes
            output += count * row_bytes


class _SharedMemory:
    """For each of 2 phases and R sources M rows of staging on every rank, which all ranks map.

    It is used again for later problems and stays for the life of the process: whoever freed it would have to know that
    no other rank has it mapped.
    """

    def __init__(self, context: RankContext, driver: Driver, row_bytes: tuple[int, int]) -> None:
        import torch

        self._context, self._size = context, context.group.size
        self._block_bytes = [context.problem.num_tokens * one for one in row_bytes]
        needed = self._size * sum(self._block_bytes)
        rounded = 1 << (needed - 1).bit_length()
        self._mapped: list[int] = context.belongings.once(f"floor {rounded}", lambda: _map(context, driver, rounded))
        driver.fill(self._mapped[context.group.rank], needed)
        torch.cuda.synchronize()
        context.exchange(b"cleared")

    def staging(self, phase: int, receiver: int, source: int) -> int:
        """Return the address of the rows that ``source`` writes for ``receiver``."""
        offset = phase * self._size * self._block_bytes[0] + source * self._block_bytes[phase]
        return self._mapped[receiver] + offset


def _map(context: RankContext, driver: Driver, num_bytes: int) -> list[int]:
    """Collective. Allocate memory on every rank and return where each rank's lies here."""
    rank = context.group.rank
    own = driver.allocate(num_bytes)
    exported = context.exchange(driver.export(own))
    mapped = [own if peer == rank else driver.open(word) for peer, word in enumerate(exported)]
    context.exchange(b"mapped")
    return mapped
