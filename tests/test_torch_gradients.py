"""Gradients of dispatch and combine against dense torch code that holds the tokens and experts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from driving import run_threads

torch = pytest.importorskip("torch")
from expertwire.interop.torch import Dispatched, TorchCommunicator  # noqa: E402

HIDDEN, MAX_TOKENS = 16, 5
LAYOUTS = [("expert_major", "rank_local_reduce"), ("expert_major", "direct_send"), ("rank_major", "rank_local_reduce")]


@dataclass(frozen=True)
class Problem:
    """What all ranks bring: lists by rank, and the parameters of all experts [E, ...]."""

    tokens: tuple[int, ...]
    experts_per_rank: tuple[int, ...]
    num_topk: int
    layout: tuple[str, str]
    is_exact: bool  # small integers and powers of two, of which every BF16 and float32 sum is exact
    index_type: Any = torch.int64

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    def inputs(self) -> tuple[list[Any], list[Any], list[Any], list[Any], Any]:
        """Return x, ids, weights and the gradient of y, by rank, and the experts' parameters."""
        draw = torch.Generator().manual_seed(len(self.tokens) * 100 + self.num_topk)

        def values(*shape: int) -> Any:
            if self.is_exact:
                return torch.randint(-3, 4, shape, generator=draw).float()
            return torch.randn(shape, generator=draw)

        def routing(count: int) -> Any:
            order = [torch.randperm(self.num_experts, generator=draw)[: self.num_topk] for _ in range(count)]
            ids = torch.stack(order) if count else torch.zeros(0, self.num_topk)
            nothing = torch.rand(ids.shape, generator=draw) < 0.15
            return torch.where(nothing, -1, ids).to(self.index_type)

        x = [values(count, HIDDEN).bfloat16() for count in self.tokens]
        ids = [routing(count) for count in self.tokens]
        weights = [2.0 ** values(count, self.num_topk).clamp(-1, 1) for count in self.tokens]
        gradients = [values(count, HIDDEN).bfloat16() for count in self.tokens]
        parameters = values(self.num_experts, HIDDEN) if self.is_exact else values(self.num_experts, HIDDEN, HIDDEN)
        return x, ids, weights, gradients, parameters / (1 if self.is_exact else HIDDEN**0.5)


def answer(rows: Any, parameters: Any) -> Any:
    """Return what an expert makes of its rows: with a vector of parameters linear, with a matrix not."""
    return rows * parameters if parameters.dim() == 1 else torch.tanh(rows @ parameters)


def expert_rows(moe: TorchCommunicator, dispatched: Dispatched, parameters: Any) -> Any:
    """Return what combine takes. ``parameters`` are those of this rank's experts."""
    tokens = dispatched.tokens.float()
    if tokens.dim() == 3:
        answers = [answer(rows, own) for rows, own in zip(tokens, parameters, strict=True)]
        return (torch.stack(answers) if answers else tokens).bfloat16()
    total = torch.zeros_like(tokens)
    for local, own in enumerate(parameters):
        chosen = dispatched.routing == moe.communicator.first_local_expert + local
        weight = (dispatched.weights * chosen).sum(-1, keepdim=True)
        total = total + weight * answer(tokens, own)
    return total.bfloat16()


def rank_gradients(
    group: ew.Group, problem: Problem, given: tuple[Any, ...], devices: Sequence[str] = ()
) -> dict[str, Any]:
    """Be one rank: forward, backward, and return y and all gradients. ``devices``: of the ranks; none: the CPU."""
    device = devices[group.rank] if devices else "cpu"
    x, ids, weights, gradients, parameters = given
    layout, mode = problem.layout
    fields = {"output_layout": layout, "combine_mode": mode, "experts_per_rank": problem.experts_per_rank}
    sizes = {"num_experts": problem.num_experts, "hidden_size": HIDDEN, "num_topk": problem.num_topk}
    fields["device"] = device
    with TorchCommunicator(group, max_tokens_per_rank=MAX_TOKENS, timeout_s=30, **sizes, **fields) as moe:
        first = moe.communicator.first_local_expert
        own = parameters[first : first + moe.communicator.num_local_experts].to(device, copy=True).requires_grad_()
        mine = x[group.rank].to(device, copy=True).requires_grad_()
        weight = weights[group.rank].to(device, copy=True).requires_grad_()
        dispatched = moe.dispatch(mine, ids[group.rank].to(device), weight)
        y = moe.combine(expert_rows(moe, dispatched, own), dispatched)
        y.backward(gradients[group.rank].to(device))
        of_experts = own.grad if len(own) else own.detach()  # no experts, no gradient
        found = {"y": y.detach(), "x": mine.grad, "weights": weight.grad, "parameters": of_experts}
        return {name: None if value is None else value.cpu() for name, value in found.items()}


def dense_gradients(given: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the same in float64, with no rounding and no communication; parameters of all experts on every rank."""
    x, ids, weights, gradients, parameters = given
    every = parameters.double().requires_grad_()
    tokens = [one.double().requires_grad_() for one in x]
    factors = [one.double().requires_grad_() for one in weights]
    results = []
    for one, chosen, factor, gradient in zip(tokens, ids, factors, gradients, strict=True):
        y = torch.zeros_like(one)
        for expert, own in enumerate(every):
            weight = (factor * (chosen == expert)).sum(-1, keepdim=True)
            y = y + weight * answer(one, own)
        y.backward(gradient.double())
        results.append(y.detach())
    return [
        {"y": y, "x": one.grad, "weights": factor.grad, "parameters": every.grad}
        for y, one, factor in zip(results, tokens, factors, strict=True)
    ]


def assert_gradients(problem: Problem, close: Callable[[Any, Any], None]) -> None:
    given = problem.inputs()
    check_gradients(problem, given, run_threads(rank_gradients, len(problem.tokens), problem, given), close)


def check_gradients(
    problem: Problem, given: tuple[Any, ...], got: list[dict[str, Any]], close: Callable[[Any, Any], None]
) -> None:
    ends = np.cumsum(problem.experts_per_rank)
    for rank, (ours, theirs) in enumerate(zip(got, dense_gradients(given), strict=True)):
        own = slice(int(ends[rank]) - problem.experts_per_rank[rank], int(ends[rank]))
        theirs["parameters"] = theirs["parameters"][own]
        for name, value in theirs.items():
            assert ours[name] is not None, name
            assert ours[name].shape == value.shape, name
            close(ours[name].double(), value)


def same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours, theirs)


def near(ours: Any, theirs: Any) -> None:
    """Allow four roundings to BF16 of 2^-9 each: row, expert output, partial sum, sum; or the same of gradients."""
    assert float((ours - theirs).norm()) <= 2**-7 * float(theirs.norm())


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize(
    ("tokens", "experts", "num_topk", "index_type"),
    [((5, 3), (2, 2), 3, torch.int64), ((4, 0, 5, 1), (3, 0, 1, 2), 2, torch.int32)],
    ids=["2 ranks", "4 uneven ranks"],
)
def test_gradients_of_numbers_without_rounding_are_exact(
    layout: tuple[str, str], tokens: tuple[int, ...], experts: tuple[int, ...], num_topk: int, index_type: Any
) -> None:
    assert_gradients(Problem(tokens, experts, num_topk, layout, is_exact=True, index_type=index_type), same)


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_gradients_of_other_numbers_differ_by_their_roundings(layout: tuple[str, str]) -> None:
    assert_gradients(Problem((5, 4), (2, 2), 2, layout, is_exact=False), near)


def float_bits(group: ew.Group, bits: Any) -> Any:
    """Send weights to the owners of their experts, and back."""
    sizes = {"num_experts": 8, "hidden_size": 8, "num_topk": 3, "max_tokens_per_rank": 64}
    with TorchCommunicator(group, timeout_s=30, **sizes) as moe:
        draw = torch.Generator().manual_seed(group.rank)
        ids = torch.stack([torch.randperm(8, generator=draw)[:3] for _ in bits])
        received, handle = moe._state.exchange_routing(ids, bits.view(torch.float32))
        return moe._state.send_back(received.weights, handle).view(torch.int32)


def test_float32_numbers_come_back_with_all_their_bits() -> None:
    draw = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (64, 3), generator=draw).int()
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-39, 3.4028235e38]
    bits[:8, 0] = torch.tensor(special).view(torch.int32)
    for returned in run_threads(float_bits, 4, bits):
        assert torch.equal(returned, bits)
