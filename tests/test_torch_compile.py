"""torch.compile of a layer, and the example that trains one on text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew

torch = pytest.importorskip("torch")
from expertwire.interop.torch import TorchCommunicator  # noqa: E402

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HIDDEN, TOKENS = 16, 6


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def communicator(group: ew.Group) -> TorchCommunicator:
    sizes = {"num_experts": 4, "hidden_size": HIDDEN, "num_topk": 2, "max_tokens_per_rank": TOKENS}
    return TorchCommunicator(group, timeout_s=60, **sizes)


def step(model: Any, x: Any) -> list[Any]:
    """Return the output, the gradient of x and those of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * y).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def compiled_differences(group: ew.Group) -> list[float]:
    """Be one rank: the largest differences between a layer run as it is and compiled into one graph."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))  # of this process
    moe_layer = importlib.import_module("moe_layer")
    with communicator(group) as moe:
        torch.manual_seed(0)
        layer = moe_layer.MoELayer(moe, 8)
        x = torch.randn(TOKENS - group.rank, HIDDEN, generator=torch.Generator().manual_seed(group.rank))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        pairs = zip(step(layer, x), step(compiled, x), strict=True)
        return [float((one - other).abs().max()) for one, other in pairs]


@pytest.mark.timeout(300)  # compilers and their imports are slow where others use the processor, too
def test_a_layer_compiles_into_one_graph_and_trains_alike() -> None:
    for differences in ew.spawn(compiled_differences, 2, timeout_s=280):
        assert len(differences) == 2 + 6
        assert max(differences) == 0  # the same operators of torch in the same order


def test_a_compiler_drops_no_operator() -> None:
    with communicator(ew.local_group(1)[0]) as moe:
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.tensor([[0, 1]] * TOKENS)

        def twice(x: Any) -> Any:
            first = moe.dispatch(x, ids)
            y = moe.combine(first.tokens, first)
            second = moe.dispatch(x, ids)
            moe.combine(second.tokens, second)  # nobody looks at it, but other ranks take part
            return y

        with torch.no_grad():
            y = torch.compile(twice, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, 2 * x)
        stats = moe.communicator.stats()
    assert (stats.dispatch_calls, stats.combine_calls) == (2, 2)


def test_the_example_trains_alike_on_two_processes_and_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train_text = importlib.import_module("train_text")
    spread, alone = train_text.train_spread(2, steps=3), train_text.train_alone(steps=3)
    assert max(abs(one - other) for one, other in zip(spread, alone, strict=True)) <= train_text.TOLERANCE
    assert spread[-1] < spread[0]
