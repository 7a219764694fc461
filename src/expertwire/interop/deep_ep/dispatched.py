"""One low-latency dispatch: its results in the caller's form, and the handle by which they are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from expertwire import _core
from expertwire.communicator import MoECommunicator
from expertwire.errors import HandleError
from expertwire.interop.arrays import refuse
from expertwire.interop.deep_ep import arguments
from expertwire.interop.deep_ep.communicators import Communicators, Problem
from expertwire.types import Array, DispatchOutput

_HALF = 2  # a layout range is an int64 of two int32


@dataclass(frozen=True)
class Dispatched:
    """A dispatch that has been sent.

    Attributes:
        owner: the communicators of the Buffer that made it.
        comm: which of them.
        problem: what that one is made for.
        output: the lane's arrays.
        handle: the communicator's own handle.
    """

    owner: Communicators
    comm: MoECommunicator
    problem: Problem
    output: DispatchOutput
    handle: _core.DispatchHandle


class LowLatencyHandle(tuple[Any, ...]):
    """What ``low_latency_dispatch`` returns for ``low_latency_combine``: a tuple of five.

    The elements are the source tokens int32 [L, R*M] (index of the token on its rank), the layout ranges int64 [L, R]
    (first row in the upper half, number of rows in the lower one), M, H and E.

    Attributes:
        dispatched: the dispatch that it names.
    """

    dispatched: Dispatched


class Routing:
    """Where the rows came from, in tensors of the caller's own.

    Args:
        problem: of the dispatch.
        num_ranks: R.
        recv_stats: int32 [L], to which the counts are added, or ``None``.

    Raises:
        InvalidArgumentError: ``recv_stats`` is no such tensor.
    """

    def __init__(self, problem: Problem, num_ranks: int, recv_stats: Array | None) -> None:
        self._most = problem.num_max_dispatch_tokens_per_rank
        self._recv_stats = recv_stats
        num_local_experts = problem.num_experts // num_ranks
        if recv_stats is not None:
            name = "cumulative_local_expert_recv_stats"
            arguments.tensor(recv_stats, name, "int32", (num_local_experts,), problem.device)
        rows = (num_local_experts, num_ranks * self._most)
        self.source_tokens = torch.empty(rows, dtype=torch.int32, device=problem.device)
        self.layout_range = torch.empty((num_local_experts, num_ranks), dtype=torch.int64, device=problem.device)

    def read(self, output: DispatchOutput) -> None:
        """Fills the tensors from a dispatch that has been received."""
        counts, ranges = output.layout.num_tokens_per_expert, output.layout.rank_ranges
        assert output.source_token is not None  # noqa: S101 - EXPERT_MAJOR
        assert counts is not None  # noqa: S101
        assert ranges is not None  # noqa: S101
        torch.remainder(output.source_token, self._most, out=self.source_tokens)
        halves = self.layout_range.view(torch.int32).view(*self.layout_range.shape, _HALF)
        torch.stack((ranges[..., 1], ranges[..., 0]), -1, out=halves)  # the count first: it is the lower half
        if self._recv_stats is not None:
            self._recv_stats.add_(counts)

    def handle(self, dispatched: Dispatched) -> LowLatencyHandle:
        """The handle of a dispatch whose rows these tensors describe, or will."""
        problem = dispatched.problem
        made = LowLatencyHandle(
            (self.source_tokens, self.layout_range, self._most, problem.hidden, problem.num_experts)
        )
        made.dispatched = dispatched
        return made


def received_rows(output: DispatchOutput) -> Any:
    """BF16 rows [L, R*M, H], or a pair of FP8 rows and scales."""
    return output.tokens if output.quant is None else (output.tokens, output.quant.block_scales)


def opened(handle: object, owner: Communicators) -> Dispatched:
    """The dispatch that a handle names.

    Raises:
        InvalidArgumentError: it is none of ``low_latency_dispatch``.
        HandleError: it is another Buffer's, or its communicator is no more.
    """
    if not isinstance(handle, LowLatencyHandle):
        refuse("handle", f"{type(handle).__name__} object", "must be the very tuple that low_latency_dispatch returned")
    if handle.dispatched.owner is not owner:
        raise HandleError("handle: belongs to another Buffer")
    if not owner.holds(handle.dispatched.comm):
        raise HandleError(
            "handle: stale: the communicator of its shapes and format has been closed since, to make room for others "
            "or by low_latency_clean_mask_buffer"
        )
    return handle.dispatched


def answer(dispatched: Dispatched, x: Array, topk_idx: Array, topk_weights: Array, out: Array | None) -> Array:
    """Checks what is to be combined. Returns ``out``, or a new tensor."""
    problem, num_tokens = dispatched.problem, dispatched.handle.num_tokens
    rows = dispatched.output.combine_input_buffer
    assert rows is not None  # noqa: S101 - every lane has one
    arguments.tensor(x, "x", "bfloat16", tuple(rows.shape), problem.device)
    if arguments.experts(topk_idx, num_tokens, problem.device) != problem.num_topk:
        refuse("topk_idx", f"tensor of shape {list(topk_idx.shape)}", f"num_topk was {problem.num_topk} at dispatch")
    per_slot, per_token = (num_tokens, problem.num_topk), (num_tokens, problem.hidden)
    arguments.tensor(topk_weights, "topk_weights", "float32", per_slot, problem.device)
    if out is None:
        return torch.empty(per_token, dtype=torch.bfloat16, device=problem.device)
    arguments.tensor(out, "out", "bfloat16", per_token, problem.device)
    return out
