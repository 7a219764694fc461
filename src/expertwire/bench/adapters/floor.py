"""``floor``: one raw exchange of the same rows each way, the physical reference of this machine.

Each rank pushes each of its rows once to every rank that owns one of the row's experts, into staging memory which both
have mapped, and raises a flag; it waits for the flags of the others and copies what arrived, and its own rows, into its
output. Combine is the same step backwards, without any sum. The routing is known beforehand: no ids, counts or weights
move.

Staging of one phase is written again only when it is free: rank A starts step n + 1 of a phase after it has finished
the other phase in between, for which it has seen B's flag; B raised that flag after it had copied step n out.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertwire import reference
from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.inputs import Observation, rank_input, row_digests
from expertwire.bench.schema import Problem
from expertwire.errors import PeerLostError
from expertwire.machine import usable_cores
from expertwire.reference import BF16, RankInput
from expertwire.types import DispatchDataType

Bytes = NDArray[np.uint8]

_FLAG_BYTES = 64  # one cache line each, so that waiting for one peer does not slow the flag of another
_SPINS = 2000  # looks before a wait begins to give up its core
_YIELDS = 2000  # times it does so before it begins to sleep


def sent_tokens(problem: Problem, topk_ids: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return, for each destination rank, the tokens that chose at least one of its experts, ascending."""
    ranks = reference.experts_of_ranks(problem.config(), problem.num_ranks)
    return [np.flatnonzero(((topk_ids >= experts.start) & (topk_ids < experts.stop)).any(axis=1)) for experts in ranks]


def dispatch_rows(problem: Problem, own: RankInput) -> Bytes:
    """Return this rank's tokens as they cross the wire: uint8 [T, row bytes], FP8 rows with scales behind."""
    if problem.dispatch_dtype is DispatchDataType.BF16:
        return own.x.view(np.uint8)
    tokens, scales = reference.quantize(own.x, problem.config().quant)
    return np.concatenate([tokens.view(np.uint8), np.ascontiguousarray(scales).view(np.uint8)], axis=1)


def returned_rows(problem: Problem, sender: int, receiver: int) -> Bytes:
    """Return the expert outputs that ``sender`` brings back to ``receiver``: uint8 [M, H * 2], no word all ones."""
    rng = np.random.default_rng((problem.seed, sender, receiver))
    return rng.integers(0, 255, (problem.num_tokens, problem.hidden_size * 2), np.uint8)


class Floor(Adapter):
    """Two raw exchange steps over shared memory, in NumPy copies of whole rows."""

    name = "floor"
    notes = "raw exchange each way, one row per (token, destination rank); no routing, counts, weights or sums"

    @classmethod
    def expected(cls, problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
        """Return the sent rows by source, and the returned rows by the rank that brings them back."""
        sent = [sent_tokens(problem, own.topk_ids) for own in inputs]
        rows = [dispatch_rows(problem, own) for own in inputs]
        observations = []
        for rank in range(problem.num_ranks):
            arrived = [row_digests(rows[source][sent[source][rank]]) for source in range(problem.num_ranks)]
            back = [returned_rows(problem, peer, rank)[: len(tokens)] for peer, tokens in enumerate(sent[rank])]
            observations.append(Observation({"tokens": np.concatenate(arrived)}, np.concatenate(back).view(BF16)))
        return observations

    def __init__(self, context: RankContext) -> None:
        problem, group = context.problem, context.group
        self._rank, self._peers = group.rank, _others(group.rank, group.size)
        sent = sent_tokens(problem, context.own.topk_ids)
        counts_in = [len(sent_tokens(problem, rank_input(problem, s).topk_ids)[group.rank]) for s in range(group.size)]
        self._rows = dispatch_rows(problem, context.own)
        self._sent = sent
        self._received = _blocks(counts_in, self._rows.shape[1])
        self._outputs = [returned_rows(problem, group.rank, s)[:count] for s, count in enumerate(counts_in)]
        self._returned = _blocks([len(tokens) for tokens in sent], problem.hidden_size * 2)
        row_bytes = (self._rows.shape[1], problem.hidden_size * 2)
        self._memory = _SharedMemory(context, problem.num_tokens, row_bytes)
        self._out_staging = [self._memory.staging(0, d, group.rank)[: len(t)] for d, t in enumerate(sent)]
        self._in_staging = [self._memory.staging(0, group.rank, s)[:count] for s, count in enumerate(counts_in)]
        self._out_returns = [self._memory.staging(1, d, group.rank)[:count] for d, count in enumerate(counts_in)]
        self._in_returns = [self._memory.staging(1, group.rank, s)[: len(t)] for s, t in enumerate(sent)]
        self._epoch = 0

    def dispatch(self) -> None:
        """Push rows, then copy what arrived."""
        self._epoch += 1
        rank, memory = self._rank, self._memory
        for peer in self._peers:
            np.take(self._rows, self._sent[peer], axis=0, out=self._out_staging[peer], mode="clip")
            memory.raise_flag(0, peer, self._epoch)
        np.take(self._rows, self._sent[rank], axis=0, out=self._received[rank], mode="clip")
        for peer in self._peers:
            memory.wait_flag(0, peer, self._epoch)
            np.copyto(self._received[peer], self._in_staging[peer])

    def apply_experts(self) -> None:
        """Nothing to do: what each rank brings back is fixed, so that combine is checked apart from dispatch."""

    def combine(self) -> None:
        """Push what goes back, then copy what came back."""
        rank, memory = self._rank, self._memory
        for peer in self._peers:
            np.copyto(self._out_returns[peer], self._outputs[peer])
            memory.raise_flag(1, peer, self._epoch)
        np.copyto(self._returned[rank], self._outputs[rank])
        for peer in self._peers:
            memory.wait_flag(1, peer, self._epoch)
            np.copyto(self._returned[peer], self._in_returns[peer])

    def observe(self) -> Observation:
        """Return digests of all received rows, and all returned rows."""
        arrived = np.concatenate([row_digests(rows) for rows in self._received])
        return Observation({"tokens": arrived}, np.concatenate(self._returned).view(BF16))

    def close(self) -> None:
        """Unmap the memory."""
        self._out_staging = self._in_staging = self._out_returns = self._in_returns = []
        self._memory.close()


def _others(rank: int, size: int) -> list[int]:
    """Return the peers, starting behind this rank, so that not all ranks write to the same peer at first."""
    return [(rank + step) % size for step in range(1, size)]


def _blocks(counts: Sequence[int], row_bytes: int) -> list[Bytes]:
    """Return one block of rows for each count; written once, so that no page is touched first inside a timed step."""
    return [np.full((count, row_bytes), 0xFF, np.uint8) for count in counts]


@dataclass(frozen=True)
class _Segment:
    """The memory that one rank receives in, as mapped by this rank."""

    data: Bytes
    flags: memoryview


class _SharedMemory:
    """One segment per rank: 2 * R flags, then for each of 2 phases and R sources M rows of staging."""

    def __init__(self, context: RankContext, num_rows: int, row_bytes: tuple[int, int]) -> None:
        group = context.group
        self._rank, self._size, self._num_rows, self._row_bytes = group.rank, group.size, num_rows, row_bytes
        self._timeout_s = context.settings.timeout_s
        # Threads share one interpreter: whoever spins keeps the others from running.
        self._spins = _SPINS if not context.settings.threads and group.size <= usable_cores() else 0
        self._fence = threading.Lock()
        num_bytes = 2 * group.size * (_FLAG_BYTES + num_rows * max(row_bytes))
        own = os.memfd_create("expertwire-floor")
        try:
            os.ftruncate(own, num_bytes)
            paths = [word.decode() for word in context.exchange(f"/proc/{os.getpid()}/fd/{own}".encode())]
            self._segments = [_map(path, num_bytes) for path in paths]
            context.exchange(b"mapped")
        finally:
            os.close(own)
        self._segments[group.rank].data.fill(0xFF)  # all pages exist before anything is timed
        self._segments[group.rank].data[: 2 * group.size * _FLAG_BYTES].fill(0)
        context.exchange(b"cleared")

    def staging(self, phase: int, receiver: int, source: int) -> Bytes:
        """Return the rows uint8 [M, row bytes] that ``source`` writes for ``receiver`` in phase 0 or 1."""
        block_bytes = self._num_rows * max(self._row_bytes)
        start = 2 * self._size * _FLAG_BYTES + (phase * self._size + source) * block_bytes
        row_bytes = self._row_bytes[phase]
        rows = self._segments[receiver].data[start : start + self._num_rows * row_bytes]
        return rows.reshape(self._num_rows, row_bytes)

    def raise_flag(self, phase: int, peer: int, epoch: int) -> None:
        """Tell ``peer`` that this rank's rows are complete."""
        with self._fence:  # the round trip through a lock orders the rows before the flag where the CPU would not
            pass
        self._segments[peer].flags[self._flag(phase, self._rank)] = epoch

    def wait_flag(self, phase: int, peer: int, epoch: int) -> None:
        """Wait until the rows of ``peer`` are complete. Raises PeerLostError after the time-out."""
        flags, index = self._segments[self._rank].flags, self._flag(phase, peer)
        for _ in range(self._spins):
            if flags[index] == epoch:
                break
        else:
            self._wait_longer(flags, index, epoch)
        with self._fence:
            pass

    def _wait_longer(self, flags: memoryview, index: int, epoch: int) -> None:
        for _ in range(_YIELDS):
            if flags[index] == epoch:
                return
            os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while flags[index] != epoch:
            time.sleep(5e-5)
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"floor: no rows arrived within {self._timeout_s} s", operation="floor", epoch=epoch
                )

    def _flag(self, phase: int, source: int) -> int:
        return (phase * self._size + source) * _FLAG_BYTES // 8

    def close(self) -> None:
        """Let go of the segments; the last array over one unmaps it."""
        self._segments = []


def _map(path: str, num_bytes: int) -> _Segment:
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    return _Segment(np.frombuffer(mapping, np.uint8), memoryview(mapping).cast("q"))
