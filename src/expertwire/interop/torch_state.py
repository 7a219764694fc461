"""What the torch operators know of a communicator. They name it by a list of numbers, and its handles by tickets.

The numbers are a key, the length of the counts and the shape of the rows: a compiler works out shapes from them alone,
and compiled code that it keeps for later processes does not fit a communicator with other shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from expertwire import _core
from expertwire.communicator import MoECommunicator
from expertwire.errors import HandleError, InvalidArgumentError, UnsupportedError
from expertwire.groups import Group
from expertwire.types import (
    Array,
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchOutput,
    MoECommunicatorConfig,
    PeerLossPolicy,
    QuantConfig,
)

#: A communicator: (key, number of counts, *shape of the rows).
Numbers = Sequence[int]

_EXPERT_MAJOR_NUMBERS = 5
_FLOAT_BYTES = 4
_ROW_ALIGNMENT = 8  # hidden_size is a multiple of it

_keys = itertools.count(1)
_tickets = itertools.count(1)  # of all communicators of the process, so that none takes another's
_states: WeakValueDictionary[tuple[int, ...], OperatorState] = WeakValueDictionary()


class OperatorState:
    """A communicator, the side communicator of its gradients, and the handles that are not stale.

    The side communicator has rows of K float32 numbers, each sent as four bytes and each byte as a BF16 number, which
    holds integers up to 256 exactly. It tells the owner of an expert the weights of its rows, and brings one number
    for each top-k slot back to the token's rank, bit for bit.

    Args:
        group: who takes part.
        config: of the communicator, or ``None``.
        fields: over ``config``.
        training: make the side communicator, without which there are no gradients.
    """

    def __init__(
        self, group: Group, config: MoECommunicatorConfig | None, fields: dict[str, Any], training: bool
    ) -> None:
        self.main = MoECommunicator(group, config, **fields)
        try:
            _refuse_unsupported(self.main.config, training)
            self.side = MoECommunicator(group, _side_config(self.main.config)) if training else None
        except BaseException:
            self.main.close()
            raise
        made = self.main.config
        self.device = torch.device(str(made.device))
        self.is_expert_major = made.output_layout is DispatchLayout.EXPERT_MAJOR
        self.num_rows = self.main.num_ranks * made.max_tokens_per_rank
        leading = (self.main.num_local_experts, self.num_rows) if self.is_expert_major else (self.num_rows,)
        self.rows_shape = (*leading, made.hidden_size)
        num_counts = self.main.num_local_experts if self.is_expert_major else self.main.num_ranks
        self._num_dispatches = 0
        self._weighted: dict[int, tuple[int, _core.DispatchHandle]] = {}  # by ticket: number of the dispatch, handle
        self._plain: dict[int, tuple[int, _core.DispatchHandle]] = {}
        self._lane_memory: set[int] = set()
        self.numbers = (next(_keys), num_counts, *self.rows_shape)
        _states[self.numbers] = self

    def close(self) -> None:
        """Closes both communicators; twice is fine."""
        _states.pop(self.numbers, None)
        self.main.close()
        if self.side is not None:
            self.side.close()

    def dispatch(self, x: Array, topk_ids: Array, weights: Array) -> tuple[DispatchOutput, int]:
        """Dispatches into new rows, zero beyond the counts. Returns them with a ticket for :meth:`combine`."""
        output, handle = self.main.dispatch(x, topk_ids, weights, output_buffer=self._zero_rows())
        self._num_dispatches += 1
        rows: Any = output.combine_input_buffer
        self._lane_memory.add(rows.untyped_storage().data_ptr())
        ticket = next(_tickets)
        self._keep(self._weighted, ticket, handle)
        return output, ticket

    def combine(self, expert_output: Array, ticket: int) -> Array:
        """Combines with the weights that were given to the dispatch of this ticket.

        Raises:
            HandleError: it is of another communicator, or ``max_in_flight`` newer dispatches have overwritten it.
        """
        handle = self._fresh(self._weighted, ticket)
        if handle is None:
            raise HandleError(
                f"combine: these rows are another communicator's, or those of a dispatch that max_in_flight = "
                f"{self.main.config.max_in_flight} newer ones (a backward pass makes some, too) have overwritten"
            )
        return self.main.combine(expert_output, handle)

    def dispatch_gradient(self, gradient: Array, topk_ids: Array, ticket: int) -> DispatchOutput:
        """Sends the gradient of combine's output the way the tokens went, into new rows. They arrive in that order."""
        output, handle = self.main.dispatch(gradient, topk_ids, output_buffer=self._zero_rows())
        self._num_dispatches += 1
        self._keep(self._plain, ticket, handle)
        return output

    def combine_gradient(self, gradient: Array, topk_ids: Array, ticket: int) -> Array:
        """Sums the gradients of a token's copies, on the routing of :meth:`dispatch_gradient` if it still holds.

        Otherwise rows of zeros are dispatched first. Whether they are is the same on all ranks.
        """
        handle = self._fresh(self._plain, ticket)
        if handle is None:
            tokens = torch.zeros((topk_ids.shape[0], self.rows_shape[-1]), dtype=torch.bfloat16, device=self.device)
            self.dispatch_gradient(tokens, topk_ids, ticket)
            handle = self._plain[ticket][1]
        return self.main.combine(gradient, handle)

    def exchange_routing(self, topk_ids: Array, weights: Array | None) -> tuple[DispatchOutput, _core.DispatchHandle]:
        """Tells the owners ids and weights of tokens, in RANK_MAJOR order. Returns also what :meth:`send_back` takes.

        Raises:
            UnsupportedError: there is no side communicator.
        """
        if self.side is None:
            raise UnsupportedError("backward: this communicator was made with training=False")
        rows = (topk_ids.shape[0], self.side.config.hidden_size)
        return self.side.dispatch(torch.zeros(rows, dtype=torch.bfloat16, device=self.device), topk_ids, weights)

    def send_back(self, values: Array, handle: _core.DispatchHandle) -> Array:
        """Returns float32 [T, K] of float32 [R*M, K], in which a slot is +0.0 on all ranks but the expert's."""
        assert self.side is not None  # noqa: S101 - the handle is the side communicator's
        width = self.side.config.hidden_size
        as_bytes = values.contiguous().view(torch.uint8)
        num_bytes = as_bytes.shape[-1]
        rows = torch.nn.functional.pad(as_bytes.to(torch.bfloat16), (0, width - num_bytes))
        returned = self.side.combine(rows, handle)
        return returned[:, :num_bytes].to(torch.uint8).view(torch.float32)

    def owns(self, tensor: Array) -> bool:
        """Whether a tensor lies in a lane's buffer for expert outputs, which is written again for a later dispatch."""
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._lane_memory

    def _zero_rows(self) -> Array:
        # Whoever multiplies all rows by a matrix gets the gradient of that matrix from all rows, too.
        return torch.zeros(self.rows_shape, dtype=torch.bfloat16, device=self.device)

    def _keep(
        self, handles: dict[int, tuple[int, _core.DispatchHandle]], ticket: int, handle: _core.DispatchHandle
    ) -> None:
        handles[ticket] = (self._num_dispatches, handle)
        for kept in (self._weighted, self._plain):
            for stale in [one for one in kept if self._fresh(kept, one) is None]:
                del kept[stale]

    def _fresh(self, handles: dict[int, tuple[int, _core.DispatchHandle]], ticket: int) -> _core.DispatchHandle | None:
        number, handle = handles.get(ticket, (-self.main.config.max_in_flight, None))
        return handle if self._num_dispatches - number < self.main.config.max_in_flight else None


def state_of(comm: Numbers) -> OperatorState:
    """The state of a communicator. Raises InvalidArgumentError if it is closed, or the numbers are nobody's."""
    state = _states.get(tuple(comm))
    if state is None:
        raise InvalidArgumentError(f"comm = {tuple(comm)}: no open communicator of this process has these numbers")
    return state


def has_expert_rows(comm: Numbers) -> bool:
    """Whether the layout is EXPERT_MAJOR."""
    return len(comm) == _EXPERT_MAJOR_NUMBERS


def num_counts(comm: Numbers) -> int:
    """L for EXPERT_MAJOR, R for RANK_MAJOR."""
    return comm[1]


def rows_shape(comm: Numbers) -> tuple[int, ...]:
    """[L, R*M, H] for EXPERT_MAJOR, [R*M, H] for RANK_MAJOR."""
    return tuple(comm[2:])


def _refuse_unsupported(config: MoECommunicatorConfig, training: bool) -> None:
    if config.quant.format is not DispatchDataType.BF16:
        raise UnsupportedError(f"quant.format = {config.quant.format.name}: the torch operators send BF16")
    if config.on_peer_loss is not PeerLossPolicy.RAISE:
        raise UnsupportedError('on_peer_loss = "mask": gradients need every rank; must be "raise"')
    if training and config.placement is not None:
        raise UnsupportedError("placement: gradients need one that stays; must be None, or training=False")
    by_slot = config.output_layout is DispatchLayout.RANK_MAJOR and config.combine_mode is CombineMode.DIRECT_SEND
    if by_slot:
        raise UnsupportedError("RANK_MAJOR with DIRECT_SEND: the torch operators have it with RANK_LOCAL_REDUCE only")


def _side_config(config: MoECommunicatorConfig) -> MoECommunicatorConfig:
    needed = _FLOAT_BYTES * config.num_topk
    return replace(
        config,
        hidden_size=-(-needed // _ROW_ALIGNMENT) * _ROW_ALIGNMENT,
        output_layout=DispatchLayout.RANK_MAJOR,
        combine_mode=CombineMode.RANK_LOCAL_REDUCE,
        quant=QuantConfig(),
        max_in_flight=1,
    )
