"""Dispatch and combine inside torch: custom operators that compile and that have gradients.

``docs/torch.md`` explains them. The operators themselves are in :mod:`expertwire.interop.torch_ops`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import torch

import expertwire.interop.torch_ops  # noqa: F401 - registers the operators
from expertwire.communicator import MoECommunicator
from expertwire.groups import Group
from expertwire.interop.torch_graph import GraphedMoE, capture
from expertwire.interop.torch_state import OperatorState
from expertwire.types import Array, MoECommunicatorConfig

__all__ = ["Dispatched", "GraphedMoE", "TorchCommunicator", "capture"]


class Dispatched(NamedTuple):
    """What :meth:`TorchCommunicator.dispatch` returns. All of it belongs to the caller.

    Attributes:
        tokens: bfloat16 [L, R*M, H] for EXPERT_MAJOR, [R*M, H] for RANK_MAJOR; rows beyond the counts are zero.
        num_tokens: int32; rows of each local expert [L], or of each source rank [R].
        routing: int32; EXPERT_MAJOR: ``source_token`` [L, R*M]; RANK_MAJOR: ``topk_ids`` [R*M, K].
        weights: RANK_MAJOR: float32 [R*M, K], to be applied by the caller; EXPERT_MAJOR: empty.
        ticket: which dispatch this was.
        sent_topk_ids: the ids that were given to dispatch.
        sent_weights: the weights that were given to dispatch, with which combine sums.
    """

    tokens: Array
    num_tokens: Array
    routing: Array
    weights: Array
    ticket: Array
    sent_topk_ids: Array
    sent_weights: Array


class TorchCommunicator:
    """A communicator whose dispatch and combine compile and have gradients. Collective, like everything it does.

    Gradients reach ``x``, the expert outputs and the routing weights, as if the roundings to BF16 were not there. Every
    rank must build the same graph: a backward pass communicates, so that its operators, too, are called by all ranks in
    the same order.

    Args:
        group: who takes part.
        config: the configuration as one value.
        training: also make the small side communicator that gradients need.
        fields: the fields of :class:`expertwire.MoECommunicatorConfig`, alone or over ``config``.

    Raises:
        UnsupportedError: FP8 or MXFP8, ``on_peer_loss="mask"``, RANK_MAJOR with DIRECT_SEND, or training a placement.
        Error: as for :class:`expertwire.MoECommunicator`.
    """

    def __init__(
        self, group: Group, config: MoECommunicatorConfig | None = None, *, training: bool = True, **fields: Any
    ) -> None:
        self._state = OperatorState(group, config, fields, training)
        self._comm = self._state.numbers

    @property
    def communicator(self) -> MoECommunicator:
        """The communicator below. Calls on it are outside autograd, and count as dispatches between."""
        return self._state.main

    def dispatch(self, x: Array, topk_ids: Array, weights: Array | None = None) -> Dispatched:
        """Sends each token to the ranks that own its experts and receives those for this rank's experts. Collective.

        Args:
            x: bfloat16 [T, H].
            topk_ids: int32 or int64 [T, K]; negative: this slot selects nothing.
            weights: float32 [T, K]; ``None``: 1 everywhere.

        Raises:
            Error: as :meth:`expertwire.MoECommunicator.dispatch`.
        """
        if weights is None:
            weights = torch.ones(topk_ids.shape, dtype=torch.float32, device=topk_ids.device)
        tokens, num_tokens, routing, received, ticket = torch.ops.expertwire.dispatch(x, topk_ids, weights, self._comm)
        return Dispatched(tokens, num_tokens, routing, received, ticket, topk_ids, weights)

    def combine(self, expert_output: Array, dispatched: Dispatched) -> Array:
        """Returns expert outputs to their tokens' ranks and sums them. Collective.

        Args:
            expert_output: bfloat16, shaped like ``dispatched.tokens``. For RANK_MAJOR weighted and summed over the
                experts of this rank by the caller.
            dispatched: from the dispatch whose rows these are.

        Returns:
            A new bfloat16 [T, H].

        Raises:
            HandleError: ``max_in_flight`` newer dispatches, those of backward passes included, came in between.
            Error: as :meth:`expertwire.MoECommunicator.combine`.
        """
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self._state.owns(expert_output):
            expert_output = expert_output.clone()  # autograd keeps it until a later dispatch has used that memory
        ticket, topk_ids, weights = dispatched.ticket, dispatched.sent_topk_ids, dispatched.sent_weights
        return torch.ops.expertwire.combine(expert_output, topk_ids, weights, ticket, self._comm)

    def close(self) -> None:
        """Ends this rank's part; twice is fine. A backward pass afterwards raises InvalidArgumentError."""
        self._state.close()

    def __enter__(self) -> TorchCommunicator:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()
