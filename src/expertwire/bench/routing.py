"""Which experts the tokens of one rank choose: drawn from a named distribution, or replayed from a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertwire.bench.schema import Problem
from expertwire.bench.workloads import make_topk_ids
from expertwire.errors import InvalidArgumentError
from expertwire.trace import RoutingTrace, load_trace


@dataclass(frozen=True)
class Routing:
    """``topk_ids`` int64 [T, K] and ``weights`` float32 [T, K] of one rank."""

    topk_ids: NDArray[Any]
    weights: NDArray[np.float32]


def is_trace(routing: str) -> bool:
    """Whether a ``--routing`` names a file and not a distribution."""
    return routing.endswith(".npz") or "/" in routing


def read_trace(routing: str) -> RoutingTrace:
    """Read the file that a ``--routing`` names. Raises InvalidArgumentError."""
    try:
        return load_trace(Path(routing))
    except OSError as error:
        raise InvalidArgumentError(f"--routing {routing}: cannot read it ({error.strerror})") from error


def make_routing(problem: Problem, rank: int) -> Routing:
    """Return the routing of one rank; the same in every process. Raises InvalidArgumentError."""
    if is_trace(problem.routing):
        return _replay(read_trace(problem.routing), problem, rank)
    rng = np.random.default_rng((problem.seed, rank, 1))
    ids = make_topk_ids(problem.routing, rng, problem.num_tokens, problem.num_experts, problem.num_topk)
    weights = rng.random(ids.shape, np.float32) + np.float32(0.1)
    return Routing(ids, weights / weights.sum(axis=1, keepdims=True))


def _replay(trace: RoutingTrace, problem: Problem, rank: int) -> Routing:
    """Return the first T tokens of this rank's share of layer 0. Shares are even if R is not that of the trace."""
    num_experts, num_topk = trace.info.num_experts, trace.topk_ids.shape[2]
    if (problem.num_experts, problem.num_topk) != (num_experts, num_topk):
        raise InvalidArgumentError(
            f"num_experts, num_topk = {problem.num_experts}, {problem.num_topk}: {problem.routing} was recorded with "
            f"{num_experts}, {num_topk}"
        )
    offsets = trace.rank_offsets
    if trace.info.num_ranks != problem.num_ranks:
        offsets = np.arange(problem.num_ranks + 1) * trace.topk_ids.shape[1] // problem.num_ranks
    first, last = int(offsets[rank]), int(offsets[rank + 1])
    if last - first < problem.num_tokens:
        raise InvalidArgumentError(
            f"num_tokens = {problem.num_tokens}: {problem.routing} holds {last - first} tokens for rank {rank}"
        )
    tokens = slice(first, first + problem.num_tokens)
    ids = np.ascontiguousarray(trace.topk_ids[0, tokens].astype(np.int64))
    return Routing(ids, np.ascontiguousarray(trace.weights[0, tokens]))
