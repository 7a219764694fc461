"""One low-latency dispatch: its results in the caller's form, and the handle by which they are combined."""

from __future__ import annotations

from collections.abc import Iterator
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

_MADE = 2  # elements of a handle that are made when they are read


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
    (first row in the upper half, number of rows in the lower one), M, H and E. The first two are made anew whenever
    they are read, on the current stream, since hardly anyone reads them and each costs a kernel. So they are there once
    the dispatch has been received, and until two newer dispatches of the same shapes and format.

    Attributes:
        dispatched: the dispatch that it names.
    """

    dispatched: Dispatched

    @classmethod
    def of(cls, dispatched: Dispatched) -> LowLatencyHandle:
        """The handle of a dispatch."""
        problem = dispatched.problem
        made = cls((None, None, problem.num_max_dispatch_tokens_per_rank, problem.hidden, problem.num_experts))
        made.dispatched = dispatched
        return made

    def __getitem__(self, index: Any) -> Any:
        """As of a tuple."""
        if isinstance(index, slice):
            return tuple(self)[index]
        place = range(len(self))[index]
        return (self._source_tokens, self._layout_range)[place]() if place < _MADE else super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        """As of a tuple."""
        return (self[place] for place in range(len(self)))

    def _source_tokens(self) -> Array:
        output = self._output()
        return torch.remainder(output.source_token, self.dispatched.problem.num_max_dispatch_tokens_per_rank)

    def _layout_range(self) -> Array:
        ranges = self._output().layout.rank_ranges
        assert ranges is not None  # noqa: S101 - EXPERT_MAJOR
        return torch.stack((ranges[..., 1], ranges[..., 0]), -1).view(torch.int64).squeeze(-1)  # the lower half first

    def _output(self) -> DispatchOutput:
        if not self.dispatched.owner.is_latest(self.dispatched.comm, self.dispatched.handle):
            raise HandleError("handle: stale: its lane has been used by a newer dispatch, or its communicator closed")
        return self.dispatched.output


class RecvStats:
    """A tensor of the caller's, to which the rows received for each expert are added.

    Args:
        total: int32 [L], or ``None``.
        problem: of the dispatch.
        num_ranks: R.

    Raises:
        InvalidArgumentError: ``total`` is no such tensor.
    """

    def __init__(self, total: Array | None, problem: Problem, num_ranks: int) -> None:
        self._total = total
        if total is not None:
            shape = (problem.num_experts // num_ranks,)
            arguments.tensor(total, "cumulative_local_expert_recv_stats", "int32", shape, problem.device)

    def add(self, output: DispatchOutput) -> None:
        """Adds the counts of a dispatch that has been received."""
        if self._total is not None:
            self._total.add_(output.layout.num_tokens_per_expert)


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
