"""The shapes that everyone quotes, and the ways in which tokens choose experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import InvalidArgumentError


@dataclass(frozen=True)
class Workload:
    """One shape: T tokens of every rank, E experts, K choices per token, H elements per row, and who quotes it."""

    name: str
    num_tokens: int
    num_experts: int
    num_topk: int
    hidden_size: int
    quoted_by: str


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mscclpp-latency", 32, 8, 8, 7168, "MSCCL++ EP, headline at 8 GPUs"),
        Workload("mscclpp-bench", 128, 128, 8, 7168, "MSCCL++ EP, benchmark of one node"),
        Workload("deepseek-decode", 128, 256, 8, 7168, "DeepEP and NCCL EP, tables"),
        Workload("single-token", 1, 256, 8, 7168, "latency floor"),
        Workload("nemotron-latent", 32, 512, 22, 1024, "a shape that other libraries reject"),
        Workload("kimi-k3", 64, 896, 16, 3584, "a shape that other libraries reject"),
    )
}

#: Tokens that each sixteenth of the experts of one DeepSeek layer received under real traffic (max / mean 3.2).
OBSERVED_LOAD = (
    162554, 147879, 102827, 108924, 46123, 505540, 98864, 184719,
    322237, 128708, 117722, 118096, 73528, 245469, 119943, 69937,
)  # fmt: skip

ROUTINGS = ("uniform", "zipf:S", "one-hot", "empty-experts", "observed-skew")


def make_topk_ids(
    routing: str, rng: np.random.Generator, num_tokens: int, num_experts: int, num_topk: int
) -> NDArray[np.int64]:
    """Draw the experts of each token, int64 [T, K], distinct within a token, likelier experts first.

    Args:
        routing: ``uniform``; ``zipf:S`` (expert e has weight 1 / (e + 1)^S, S >= 0); ``one-hot`` (all tokens choose
            experts 0 ... K-1, so a single expert for K = 1); ``empty-experts`` (the upper half of the experts, as far
            as K allows, receives nothing); ``observed-skew`` (:data:`OBSERVED_LOAD` stretched over E).
        rng: source of the draw.
        num_tokens: T.
        num_experts: E.
        num_topk: K, at most E.

    Raises:
        InvalidArgumentError: the routing is unknown, or K > E.
    """
    if not 0 < num_topk <= num_experts:
        raise InvalidArgumentError(f"num_topk = {num_topk}: must be between 1 and num_experts = {num_experts}")
    load = _expert_load(routing, num_experts, num_topk)
    with np.errstate(divide="ignore"):  # experts without load have a key of -Inf
        keys = np.log(load) + rng.gumbel(size=(num_tokens, num_experts))  # top K keys: K draws without replacement
    order = np.argsort(-keys, axis=1, kind="stable")
    return np.ascontiguousarray(order[:, :num_topk].astype(np.int64))


def _expert_load(routing: str, num_experts: int, num_topk: int) -> NDArray[np.float64]:
    """Return the relative load of each expert, float64 [E]."""
    experts = np.arange(num_experts, dtype=np.float64)
    shapes: dict[str, Callable[[], NDArray[np.float64]]] = {
        "uniform": lambda: np.ones(num_experts),
        "one-hot": lambda: (experts < num_topk).astype(np.float64),
        "empty-experts": lambda: (experts < max(num_topk, (num_experts + 1) // 2)).astype(np.float64),
        "observed-skew": lambda: _stretch(OBSERVED_LOAD, num_experts),
    }
    if routing in shapes:
        return shapes[routing]()
    kind, _, exponent = routing.partition(":")
    if kind == "zipf":
        try:
            power = float(exponent)
        except ValueError:
            power = math.nan
        if power >= 0 and math.isfinite(power):
            return np.asarray((experts + 1.0) ** -power)
    raise InvalidArgumentError(f"routing = {routing!r}: must be one of {', '.join(ROUTINGS)} (S a number >= 0)")


def _stretch(load: tuple[int, ...], num_experts: int) -> NDArray[np.float64]:
    """Spread a load over E experts: expert e takes what lies between e / E and (e + 1) / E of it."""
    running = np.concatenate([[0.0], np.cumsum(load, dtype=np.float64)])
    edges = np.linspace(0.0, len(load), num_experts + 1)
    return np.diff(np.interp(edges, np.arange(len(running)), running))
