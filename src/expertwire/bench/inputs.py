"""What every library gets and what it must return: seeded inputs, the experts, and results in a comparable form."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertwire import reference
from expertwire.bench.routing import is_trace, make_routing
from expertwire.bench.schema import Problem
from expertwire.errors import InvalidArgumentError
from expertwire.reference import BF16, RankInput
from expertwire.types import (
    MAX_TOPK,
    SCALE_BLOCK,
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchOutput,
)

Numpy = NDArray[Any]


def check_problem(problem: Problem) -> None:
    """Raise InvalidArgumentError if no library could run the problem here or its routing cannot be read."""
    sizes = ("num_experts", "num_tokens", "hidden_size", "num_topk", "num_ranks")
    for name, value in ((name, getattr(problem, name)) for name in sizes):
        if value < 1:
            raise InvalidArgumentError(f"{name} = {value}: must be at least 1")
    if problem.num_topk > (largest := min(problem.num_experts, MAX_TOPK)):
        raise InvalidArgumentError(
            f"num_topk = {problem.num_topk}: must be between 1 and min(num_experts, {MAX_TOPK}) = {largest}"
        )
    step = 8 if problem.dispatch_dtype is DispatchDataType.BF16 else SCALE_BLOCK
    if problem.hidden_size % step:
        kind = problem.dispatch_dtype.name
        raise InvalidArgumentError(f"hidden_size = {problem.hidden_size}: must be a multiple of {step} for {kind} rows")
    if (least := _least_bytes(problem)) > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise InvalidArgumentError(
            f"{problem.shape()}: needs at least {least / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f}"
        )
    for rank in range(problem.num_ranks):
        make_routing(problem, rank)


def _least_bytes(problem: Problem) -> int:
    """Return the bytes of what every problem takes: a draw of experts, or tokens and combined tokens of all ranks."""
    draw = 0 if is_trace(problem.routing) else 3 * 8 * problem.num_tokens * problem.num_experts
    return max(draw, 2 * 2 * problem.num_ranks * problem.num_tokens * problem.hidden_size)


def rank_input(problem: Problem, rank: int) -> RankInput:
    """Return the tokens, ids and weights of one rank; the same for every library and in every process."""
    rng = np.random.default_rng((problem.seed, rank))
    x = rng.standard_normal((problem.num_tokens, problem.hidden_size), np.float32).astype(BF16)
    routing = make_routing(problem, rank)
    return RankInput(x, routing.topk_ids, routing.weights)


def payload_bytes_per_rank(problem: Problem) -> float:
    """Return valid selections * H * 2 bytes, the mean over the ranks: what GB/s is counted from, for every library."""
    routings = [make_routing(problem, rank).topk_ids for rank in range(problem.num_ranks)]
    selections = sum(int((topk_ids >= 0).sum()) for topk_ids in routings)
    return selections * problem.hidden_size * 2 / problem.num_ranks


def expert_rows(problem: Problem, rows: Numpy, expert_ids: Numpy) -> Numpy:
    """Return the bfloat16 outputs [N, H] of the experts on float32 or bfloat16 rows: each scales by its own factor."""
    factors = np.float32(0.5) + expert_ids.astype(np.float32) / np.float32(problem.num_experts)
    outputs: Numpy = (rows.astype(np.float32) * factors[:, None]).astype(BF16)
    return outputs


def expert_outputs(problem: Problem, rank: int, received: DispatchOutput) -> Numpy:
    """Return the input of ``combine`` for what was received: bfloat16 in the layout's shape, zero beyond the counts."""
    if problem.layout is DispatchLayout.EXPERT_MAJOR:
        return _expert_major_outputs(problem, rank, received)
    return _rank_major_outputs(problem, received)


def _expert_major_outputs(problem: Problem, rank: int, received: DispatchOutput) -> Numpy:
    experts = reference.experts_of_ranks(problem.config(), problem.num_ranks)[rank]
    outputs = np.zeros(received.tokens.shape, BF16)
    for local, count in enumerate(np.asarray(received.layout.num_tokens_per_expert)):
        rows = _plain_rows(received, (local, slice(0, int(count))))
        outputs[local, :count] = expert_rows(problem, rows, np.full(len(rows), experts[local]))
    return outputs


def _rank_major_outputs(problem: Problem, received: DispatchOutput) -> Numpy:
    num_slots = problem.num_topk
    topk_ids, weights = np.asarray(received.topk_ids), np.asarray(received.weights)
    slots = np.zeros((len(topk_ids), num_slots, problem.hidden_size), BF16)
    sums = np.zeros((len(topk_ids), problem.hidden_size), np.float32)
    for row in np.flatnonzero((topk_ids >= 0).any(axis=1)):
        for k in np.flatnonzero(topk_ids[row] >= 0):
            token = _plain_rows(received, (slice(row, row + 1),))
            weighted = weights[row, k] * expert_rows(problem, token, topk_ids[row, k : k + 1])[0].astype(np.float32)
            slots[row, k] = weighted.astype(BF16)
            sums[row] += weighted
    outputs: Numpy = slots if problem.combine_mode is CombineMode.DIRECT_SEND else sums.astype(BF16)
    return outputs


def _plain_rows(received: DispatchOutput, where: tuple[int | slice, ...]) -> Numpy:
    """Return received rows without quantisation: bfloat16, or float32 from FP8."""
    tokens = np.asarray(received.tokens)[where]
    if received.quant is None:
        return tokens
    return reference.dequantize(tokens, np.asarray(received.quant.block_scales)[where], received.quant)


@dataclass(frozen=True)
class Observation:
    """What one pair produced on one rank, in a form that compares: arrays of dispatch by name, and combined rows.

    Long rows of dispatch are held as one 64-bit digest each.
    """

    dispatch: dict[str, Numpy]
    combined: Numpy

    def save(self, path: Path) -> None:
        """Write an npz file."""
        parts: dict[str, Any] = {f"dispatch_{name}": values for name, values in self.dispatch.items()}
        np.savez(path, combined=self.combined.view(np.uint16), **parts)

    @staticmethod
    def load(path: Path) -> Observation:
        """Read what :meth:`save` wrote."""
        with np.load(path) as stored:
            parts = {name.removeprefix("dispatch_"): stored[name] for name in stored.files if name != "combined"}
            return Observation(parts, stored["combined"].view(BF16))


def row_digests(rows: Numpy) -> Numpy:
    """Return a 64-bit digest, uint64, of each row of a 2-dimensional array."""
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), np.uint64)


def observe_dispatch(received: DispatchOutput) -> dict[str, Numpy]:
    """Return everything that the layout promises about a dispatch output, rows beyond the counts left out."""
    if received.layout.kind is DispatchLayout.EXPERT_MAJOR:
        return _observe_expert_major(received)
    counts = np.asarray(received.layout.num_tokens_per_rank)
    rows_per_rank = len(received.tokens) // len(counts)
    valid = np.concatenate([rank * rows_per_rank + np.arange(count) for rank, count in enumerate(counts)]).astype(
        np.int64
    )
    seen = {
        "num_tokens_per_rank": counts,
        "topk_ids": np.asarray(received.topk_ids),
        "weights": np.asarray(received.weights),
    }
    return {**_copies(seen), **_observe_rows(received, (valid,))}


def _observe_expert_major(received: DispatchOutput) -> dict[str, Numpy]:
    counts = np.asarray(received.layout.num_tokens_per_expert)
    local = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts]) if len(counts) else np.zeros(0)
    valid = (local, rows.astype(np.int64))
    seen = {
        "num_tokens_per_expert": counts,
        "rank_ranges": np.asarray(received.layout.rank_ranges),
        "source_token": np.asarray(received.source_token)[valid],
    }
    return {**_copies(seen), **_observe_rows(received, valid)}


def _observe_rows(received: DispatchOutput, valid: tuple[Numpy, ...]) -> dict[str, Numpy]:
    observed = {"tokens": row_digests(np.asarray(received.tokens)[valid])}
    if received.quant is not None:
        observed["scales"] = row_digests(np.asarray(received.quant.block_scales)[valid])
    return observed


def _copies(seen: dict[str, Numpy]) -> dict[str, Numpy]:
    return {name: values.copy() for name, values in seen.items()}


def reference_observations(problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
    """Return what each rank must observe, from :mod:`expertwire.reference`."""
    config = problem.config()
    received = reference.dispatch(config, inputs)
    outputs = [expert_outputs(problem, rank, own) for rank, own in enumerate(received)]
    combined = reference.combine(config, inputs, outputs)
    return [Observation(observe_dispatch(own), rows) for own, rows in zip(received, combined, strict=True)]


def first_difference(observed: Observation, expected: Observation) -> str:
    """Return where two observations differ first, or an empty string. Every bit counts."""
    if observed.dispatch.keys() != expected.dispatch.keys():
        return f"dispatch returned {sorted(observed.dispatch)}, expected {sorted(expected.dispatch)}"
    named = {f"dispatch {name}": (values, expected.dispatch[name]) for name, values in observed.dispatch.items()}
    named["combined tokens"] = (observed.combined, expected.combined)
    for name, (got, wanted) in named.items():
        if got.shape != wanted.shape:
            return f"{name}: shape {got.shape}, expected {wanted.shape}"
        if differing := np.argwhere(_bits(got) != _bits(wanted)).tolist():
            where = tuple(differing[0])
            return (
                f"{name}{list(where)} is {got[where]}, expected {wanted[where]} ({len(differing)} of {got.size} differ)"
            )
    return ""


def _bits(values: Numpy) -> Numpy:
    return values.view(f"u{values.itemsize}")
