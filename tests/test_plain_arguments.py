"""The short way for arguments takes only what the long one takes, and reads the same from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import expertwire as ew
from expertwire import _core
from expertwire.arguments import ArgumentReader
from expertwire.types import CombineMode, DispatchLayout
from one_rank import FP8_QUANT, single

torch = pytest.importorskip("torch")
T, H, K = 3, 128, 2

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no C functions of DLPack"
)


def good() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(T, H, generator=generator).bfloat16(),
        "topk_ids": torch.tensor([[0, 3], [2, -1], [1, 0]]),
        "weights": torch.rand(T, K, generator=generator),
    }


def shifted(tensor: Any) -> Any:
    """The same values at an address that is no multiple of the size of an element."""
    raw = torch.zeros(tensor.numel() * tensor.element_size() + 1, dtype=torch.uint8)[1:]
    raw.copy_(tensor.view(torch.uint8).view(-1))
    return torch.frombuffer(raw.numpy(), dtype=tensor.dtype).view(tensor.shape)


def negative(tensor: Any) -> Any:
    """Values that are the negatives of those in memory, of one element so that it is dense as well."""
    return torch.complex(tensor, tensor).conj().imag[:1, :1]


class Named(torch.Tensor):
    """A subclass."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda tensor: tensor,
    "a view": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
    "fewer rows": lambda tensor: tensor[:2],
    "no rows": lambda tensor: tensor[:0],
    "more rows": lambda tensor: torch.cat([tensor, tensor]),
    "fewer columns": lambda tensor: tensor[:, :-1].contiguous(),
    "one dimension": lambda tensor: tensor.reshape(-1),
    "three dimensions": lambda tensor: tensor[None],
    "columns apart": lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "broadcast": lambda tensor: tensor[:1].expand_as(tensor),
    "int16": lambda tensor: tensor.to(torch.int16),
    "int32": lambda tensor: tensor.to(torch.int32),
    "float16": lambda tensor: tensor.to(torch.float16),
    "float32": lambda tensor: tensor.to(torch.float32),
    "float64": lambda tensor: tensor.to(torch.float64),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "bool": lambda tensor: tensor.to(torch.bool),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "unaligned": shifted,
    "without memory": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "a subclass": lambda tensor: tensor.as_subclass(Named),
    "with gradients": lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor,
    "of NumPy": lambda tensor: tensor.view(torch.int32).numpy(),
    "nothing": lambda tensor: None,  # noqa: ARG005
    "a list": lambda tensor: tensor.tolist(),
}


def fields(request: Any) -> dict[str, Any]:
    return {
        name: getattr(request, name)
        for name in dir(request)
        if not name.startswith("_") and name not in ("handle", "set_ready")
    }


def long_way(reader: ArgumentReader, read: Callable[..., Any], *arguments: Any) -> str:
    """What reading without the short way raises, or nothing."""
    plain, reader._plain = reader._plain, {}
    try:
        read(*arguments, [])
    except ew.Error as error:
        return str(error)
    finally:
        reader._plain = plain
    return ""


def dispatch_both_ways(comm: ew.MoECommunicator, given: dict[str, Any]) -> bool:
    """Whether the short way took it. If it did, so did the long one, with the same request."""
    reader = comm._reader
    given = {"x": None, "topk_ids": None, "weights": None, **given}
    slow, fast = _core.LatencyDispatchRequest(), _core.LatencyDispatchRequest()
    arguments = (given["x"], given["topk_ids"], given["weights"], None, None, None, None)
    refused = long_way(reader, reader.dispatch, slow, arguments)
    took = reader._plain[torch.Tensor].dispatch(fast, given["x"], given["topk_ids"], given["weights"])
    if took:
        assert not refused
        assert fields(fast) == fields(slow)
    else:
        assert fields(fast) == fields(_core.LatencyDispatchRequest())
    return took


@pytest.fixture
def comm() -> Any:
    with single(combine_mode="direct_send") as made:
        made.dispatch(**good())  # has seen a tensor
        yield made


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["x", "topk_ids", "weights"])
def test_dispatch_reads_what_the_long_way_reads(comm: ew.MoECommunicator, name: str, change: str) -> None:
    given = good()
    given[name] = CHANGES[change](given[name])
    took = dispatch_both_ways(comm, given)
    fits = {
        "x": {"as it is", "a view", "with gradients"},
        "topk_ids": {"as it is", "a view", "with gradients", "int32"},
        "weights": {"as it is", "a view", "with gradients", "float32", "nothing"},
    }
    assert took == (change in fits[name])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, T])
def test_any_number_of_tokens(comm: ew.MoECommunicator, num_tokens: int) -> None:
    assert dispatch_both_ways(comm, {name: tensor[:num_tokens] for name, tensor in good().items()})


def test_values_that_memory_does_not_hold_are_left_to_the_long_way(comm: ew.MoECommunicator) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    assert dispatch_both_ways(comm, {"x": good()["x"][:1], "topk_ids": ids, "weights": good()["weights"][:1]})
    with single(num_topk=1) as one:
        one.dispatch(good()["x"], good()["topk_ids"][:, :1].contiguous())
        weights = negative(good()["weights"])
        assert weights.is_neg()
        assert weights.is_contiguous()
        assert not dispatch_both_ways(one, {"x": good()["x"][:1], "topk_ids": ids[:, :1], "weights": weights})


def test_the_lanes_own_tokens_are_refused(comm: ew.MoECommunicator) -> None:
    own = comm.get_dispatch_output_buffer("torch")
    for x in (own[0, :3], own.view(-1)[own.numel() - T * H :].view(T, H)):
        with pytest.raises(ew.InvalidArgumentError, match="x overlaps the tokens of this lane"):
            comm.dispatch(x, good()["topk_ids"])


def test_a_communicator_of_fp8_rows_takes_bf16_and_leaves_fp8_to_the_long_way() -> None:
    with single(quant=FP8_QUANT) as comm:
        comm.dispatch(**good())
        assert dispatch_both_ways(comm, good())
        assert not dispatch_both_ways(comm, {**good(), "x": good()["x"].to(torch.float8_e4m3fn)})


def combine_both_ways(comm: ew.MoECommunicator, given: dict[str, Any]) -> bool:
    """As dispatch_both_ways."""
    reader, handle = comm._reader, given.pop("handle")
    arguments = (given["expert_output"], handle, given.get("weights"), given["out"], None, None)
    slow, fast = _core.LatencyCombineRequest(), _core.LatencyCombineRequest()
    refused = long_way(reader, reader.combine, slow, arguments)
    fast.handle, fast.num_tokens = handle, handle.num_tokens
    took = reader._plain[torch.Tensor].combine(fast, given["expert_output"], given.get("weights"), given["out"])
    if took:
        assert not refused
        assert fields(fast) == fields(slow)
    else:
        assert fast.expert_output == fast.weights == fast.out == fast.stream == 0
    return took


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in ("expert_output", "weights", "out")
        for change in CHANGES
        if (name, change) != ("out", "nothing")  # in whose place a new tensor is made first
    ],
)
def test_combine_reads_what_the_long_way_reads(comm: ew.MoECommunicator, name: str, change: str) -> None:
    output, handle = comm.dispatch(**good())
    given = {"expert_output": output.combine_input_buffer.clone(), "weights": good()["weights"], "out": good()["x"]}
    given[name] = CHANGES[change](given[name])
    fits = {"as it is", "a view", "with gradients"} | ({"float32", "nothing"} if name == "weights" else set())
    assert combine_both_ways(comm, {**given, "handle": handle}) == (change in fits)


def test_what_combine_would_overwrite_is_refused(comm: ew.MoECommunicator) -> None:
    output, handle = comm.dispatch(**good())
    rows = output.combine_input_buffer
    weights = torch.zeros(T, H)[:, :K].contiguous()
    over_weights = torch.frombuffer(weights.numpy(), dtype=torch.bfloat16)[:0].view(0, H)
    with pytest.raises(ew.InvalidArgumentError, match="expert_output overlaps out"):
        comm.combine(rows, handle, out=rows[0, :T])
    storage = torch.zeros(T * H, dtype=torch.bfloat16)
    inside = storage.view(torch.float32)[4 : 4 + T * K].view(T, K)
    out = storage.view(T, H)
    with pytest.raises(ew.InvalidArgumentError, match="weights overlaps out"):
        comm.combine(rows, handle, inside, out)
    _, nothing = comm.dispatch(*(tensor[:0] for tensor in good().values()))
    given = {"expert_output": rows, "weights": weights[:0], "out": over_weights, "handle": nothing}
    assert combine_both_ways(comm, given)


def test_rank_major_rows_take_no_weights() -> None:
    with single(output_layout=DispatchLayout.RANK_MAJOR, combine_mode=CombineMode.DIRECT_SEND) as comm:
        output, handle = comm.dispatch(**good())
        given = {"expert_output": output.combine_input_buffer, "out": good()["x"]}
        assert combine_both_ways(comm, {**given, "handle": handle})
        assert not combine_both_ways(comm, {**given, "weights": good()["weights"], "handle": handle})
        with pytest.raises(ew.InvalidArgumentError, match="weights = Tensor object: must be None"):
            comm.combine(output.combine_input_buffer, handle, good()["weights"])


def test_calls_in_a_loop_take_the_short_way(comm: ew.MoECommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(ArgumentReader, "tokens", refuse)
    monkeypatch.setattr(ArgumentReader, "expert_output", refuse)
    output, handle = comm.dispatch(**good())
    for options in ({}, {"weights": good()["weights"]}, {"out": torch.empty(T, H, dtype=torch.bfloat16)}):
        assert comm.combine(output.combine_input_buffer, handle, **options).shape == (T, H)
    with pytest.raises(AssertionError, match="the long way"):
        comm.combine(output.combine_input_buffer[:1], handle)


def test_types_without_the_functions_have_no_short_way() -> None:
    with single() as comm:
        comm.dispatch(**{name: tensor.numpy() for name, tensor in good().items() if name != "x"}, x=good()["x"])
        assert set(comm._reader._plain) == {torch.Tensor}
    assert _core.plain_arguments(int, comm._reader._core_config, [1]) is None
    assert _core.plain_arguments(torch.Tensor, comm._reader._core_config, [1]) is not None
