"""The custom operators ``torch.ops.expertwire.*``: what they do, their shapes for a compiler, their gradients.

All of them are functional: every result is a new tensor and none lies in a communicator's memory. All are collective:
each rank calls the same ones in the same order. They are registered as ordered effects, so that a compiler neither
drops one nor changes their order.

A ticket is a float64 number so that it can carry a gradient, always zero: whenever the backward of a combine runs, so
does that of its dispatch, also on a rank that has no experts and whose rows come to nothing.
"""

# ruff: noqa: ARG001 - what runs an operator, and what says its shapes, has all of its arguments

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expertwire.errors import InvalidArgumentError
from expertwire.interop.torch_state import Numbers, OperatorState, has_expert_rows, num_counts, rows_shape, state_of
from expertwire.types import Array, DispatchOutput

_INDEX = torch.int32


def _dispatch(x: Array, topk_ids: Array, weights: Array, comm: Numbers) -> tuple[Array, Array, Array, Array, Array]:
    state = state_of(comm)
    output, ticket = state.dispatch(x, topk_ids, weights)
    count = output.layout.num_tokens_per_expert if state.is_expert_major else output.layout.num_tokens_per_rank
    routing = output.source_token if state.is_expert_major else output.topk_ids
    received = weights.new_empty(0) if output.weights is None else output.weights.clone()
    assert count is not None  # noqa: S101 - each layout has its own
    assert routing is not None  # noqa: S101
    number = torch.tensor([ticket], dtype=torch.float64, device="cpu")  # whatever the default device
    return output.tokens, count.clone(), routing.clone(), received, number


def _dispatch_shapes(
    x: Array, topk_ids: Array, weights: Array, comm: Numbers
) -> tuple[Array, Array, Array, Array, Array]:
    rows, is_expert_major = rows_shape(comm), has_expert_rows(comm)
    slots = (rows[0], topk_ids.shape[1])
    return (
        x.new_empty(rows),
        x.new_empty(num_counts(comm), dtype=_INDEX),
        x.new_empty(rows[:2] if is_expert_major else slots, dtype=_INDEX),
        weights.new_empty(0 if is_expert_major else slots),
        torch.empty(1, dtype=torch.float64, device="cpu"),
    )


def _combine(expert_output: Array, topk_ids: Array, weights: Array, ticket: Array, comm: Numbers) -> Array:
    return state_of(comm).combine(expert_output, int(ticket))


def _combine_shapes(expert_output: Array, topk_ids: Array, weights: Array, ticket: Array, comm: Numbers) -> Array:
    return expert_output.new_empty((topk_ids.shape[0], expert_output.shape[-1]))


def _dispatch_backward(
    rows: Array, slots: Array | None, topk_ids: Array, ticket: Array, comm: Numbers
) -> tuple[Array, Array]:
    """Gradients of ``x`` from those of the rows, and of ``weights`` from those of the received ones, if asked."""
    state = state_of(comm)
    of_x = state.combine_gradient(rows.contiguous(), topk_ids, int(ticket))
    if slots is None:
        return of_x, rows.new_empty(0, dtype=torch.float32)
    received, handle = state.exchange_routing(topk_ids, None)
    assert received.topk_ids is not None  # noqa: S101 - RANK_MAJOR
    is_here = received.topk_ids != state.main.config.invalid_token_expert_id
    return of_x, state.send_back(torch.where(is_here, slots, 0.0), handle)


def _dispatch_backward_shapes(
    rows: Array, slots: Array | None, topk_ids: Array, ticket: Array, comm: Numbers
) -> tuple[Array, Array]:
    of_weights = (0,) if slots is None else tuple(topk_ids.shape)
    return rows.new_empty((topk_ids.shape[0], rows.shape[-1])), rows.new_empty(of_weights, dtype=torch.float32)


def _combine_backward(
    gradient: Array, expert_output: Array | None, topk_ids: Array, weights: Array, ticket: Array, comm: Numbers
) -> tuple[Array, Array]:
    """Gradients of the expert outputs and, where these are given, of the weights they were summed with."""
    state = state_of(comm)
    if expert_output is not None and state.owns(expert_output):
        raise InvalidArgumentError(
            "expert_output: lies in a lane of the communicator and has been overwritten since: combine a copy of it"
        )
    output = state.dispatch_gradient(gradient.contiguous(), topk_ids, int(ticket))
    rows = output.tokens
    if not state.is_expert_major:  # the caller has applied the weights
        return rows, weights.new_empty(0)
    received, handle = state.exchange_routing(topk_ids, weights)
    assert received.weights is not None  # noqa: S101 - RANK_MAJOR
    slot = _slots_of_rows(state, output, received.topk_ids)
    weight_of_slot = torch.nn.functional.pad(received.weights.reshape(-1), (0, 1))  # rows of padding have weight 0
    dots = [] if expert_output is None else [weight_of_slot.new_empty(0)]
    for expert in range(state.main.num_local_experts):  # one at a time: float32 copies of all would be large
        gradients = rows[expert].float()
        if expert_output is not None:
            dots.append((gradients * expert_output[expert].float()).sum(-1))
        rows[expert] = gradients * weight_of_slot[slot[expert], None]
    if expert_output is None:
        return rows, weights.new_empty(0)
    values = torch.zeros_like(weight_of_slot)
    values[slot.reshape(-1)] = torch.cat(dots)
    return rows, state.send_back(values[:-1].view(state.num_rows, -1), handle)


def _combine_backward_shapes(
    gradient: Array, expert_output: Array | None, topk_ids: Array, weights: Array, ticket: Array, comm: Numbers
) -> tuple[Array, Array]:
    of_weights = (0,) if expert_output is None else tuple(weights.shape)
    return gradient.new_empty(rows_shape(comm)), weights.new_empty(of_weights)


def _slots_of_rows(state: OperatorState, output: DispatchOutput, ids: Array) -> Array:
    """Which top-k slot each EXPERT_MAJOR row answers: int64 [L, R*M], an index into RANK_MAJOR [R*M, K].

    RANK_MAJOR holds the tokens that any expert of this rank has, in the order of their numbers. Padding gets R*M*K.
    """
    num_rows, num_ranks = state.num_rows, state.main.num_ranks
    assert output.source_token is not None  # noqa: S101 - EXPERT_MAJOR
    assert output.layout.num_tokens_per_expert is not None  # noqa: S101
    is_valid = torch.arange(num_rows, device=ids.device) < output.layout.num_tokens_per_expert[:, None]
    source = torch.where(is_valid, output.source_token, num_rows).long()
    is_here = torch.zeros(num_rows + 1, dtype=torch.int64, device=ids.device)
    is_here[source.reshape(-1)] = 1
    first_row = torch.arange(0, num_rows, num_rows // num_ranks, device=ids.device)
    row_of_token = is_here[:-1].view(num_ranks, -1).cumsum(1) - 1 + first_row[:, None]
    row = torch.nn.functional.pad(row_of_token.view(-1), (0, 1))[source]
    experts = torch.arange(state.main.num_local_experts, device=ids.device) + state.main.first_local_expert
    k = (ids[row] == experts[:, None, None]).int().argmax(-1)
    return torch.where(is_valid, row * ids.shape[1] + k, ids.numel())


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
    _, topk_ids, _, ctx.comm = inputs
    ctx.save_for_backward(topk_ids, output[-1])


def _dispatch_gradients(ctx: Any, rows: Array, _counts: None, _routing: None, slots: Array, _ticket: Array) -> Any:
    topk_ids, ticket = ctx.saved_tensors
    wants_weights = ctx.needs_input_grad[2] and not has_expert_rows(ctx.comm)
    if not (ctx.needs_input_grad[0] or wants_weights):
        return None, None, None, None
    backward = torch.ops.expertwire.dispatch_backward
    of_x, of_weights = backward(rows, slots if wants_weights else None, topk_ids, ticket, ctx.comm)
    return of_x, None, of_weights if wants_weights else None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
    expert_output, topk_ids, weights, ticket, ctx.comm = inputs
    ctx.wants_weights = ctx.needs_input_grad[2] and has_expert_rows(ctx.comm)
    ctx.save_for_backward(expert_output if ctx.wants_weights else None, topk_ids, weights, ticket)


def _combine_gradients(ctx: Any, gradient: Array) -> Any:
    expert_output, topk_ids, weights, ticket = ctx.saved_tensors
    backward = torch.ops.expertwire.combine_backward
    rows, of_weights = backward(gradient, expert_output, topk_ids, weights, ticket, ctx.comm)
    return rows, None, of_weights if ctx.wants_weights else None, torch.zeros_like(ticket), None


def _register(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    operator = torch.library.custom_op(f"expertwire::{name}", run, mutates_args=(), schema=schema)
    if hasattr(operator, "register_effect"):  # else torch refuses to compile it: it would drop or move some
        from torch._library.effects import EffectType

        operator.register_fake(shapes)
        operator.register_effect(EffectType.ORDERED)
    return operator


_register(
    "dispatch",
    "(Tensor x, Tensor topk_ids, Tensor weights, int[] comm) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _dispatch_shapes,
).register_autograd(_dispatch_gradients, setup_context=_keep_for_dispatch)
_register(
    "combine",
    "(Tensor expert_output, Tensor topk_ids, Tensor weights, Tensor ticket, int[] comm) -> Tensor",
    _combine,
    _combine_shapes,
).register_autograd(_combine_gradients, setup_context=_keep_for_combine)
_register(
    "dispatch_backward",
    "(Tensor rows, Tensor? slots, Tensor topk_ids, Tensor ticket, int[] comm) -> (Tensor, Tensor)",
    _dispatch_backward,
    _dispatch_backward_shapes,
)
_register(
    "combine_backward",
    "(Tensor gradient, Tensor? expert_output, Tensor topk_ids, Tensor weights, Tensor ticket, int[] comm)"
    " -> (Tensor, Tensor)",
    _combine_backward,
    _combine_backward_shapes,
)
