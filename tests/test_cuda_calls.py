"""Calls on CUDA one by one: handles, lifetimes, streams, slow ranks, and memory that both sides see."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import Case, way_name
from cuda_driving import (
    EVERY_WAY,
    Place,
    communicator,
    dispatch,
    exchange,
    living_at,
    run_virtual,
    share,
    to_device,
    to_host,
)
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts
from expertwire.reference import BF16
from expertwire.types import QuantConfig

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("calls", (6, 4, 7), 6, 64, 3, weights="router")


def _answer(comm: ew.MoECommunicator, received: ew.DispatchOutput) -> Any:
    return to_device(expert_output(comm.config, received, local_experts(comm)), str(comm.config.device))


def _dispatch_twice(group: ew.Group, place: Place, case: Case) -> list[Any]:
    """Dispatch twice, then combine the first: what became of it, and the second exchange."""
    with communicator(group, case, place) as comm:
        dispatched = [dispatch(comm, case.inputs(step)[comm.rank]) for step in range(2)]
        return [_combined_or_refused(comm, out, handle) for out, handle in dispatched]


def _combined_or_refused(comm: ew.MoECommunicator, out: ew.DispatchOutput, handle: Any) -> Received | str:
    received = copy_output(out, to_host)
    try:
        return Received(received, to_host(comm.combine(_answer(comm, received), handle)))
    except ew.HandleError as error:
        return str(error)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_handle_lives_for_as_many_dispatches_as_there_are_lanes(max_in_flight: int) -> None:
    case = replace(CASE, max_in_flight=max_in_flight)
    of_ranks = run_virtual(_dispatch_twice, share(3), case)
    for step in range(2):
        got = [results[step] for results in of_ranks]
        if step == 0 and max_in_flight == 1:
            assert all("handle is stale" in text for text in got)
        else:
            assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _combine_twice(group: ew.Group, place: Place, case: Case) -> list[Received]:
    with communicator(group, case, place) as comm:
        out, handle = dispatch(comm, case.inputs()[comm.rank])
        received = copy_output(out, to_host)
        answers = [_answer(comm, received)] * 2
        return [Received(received, to_host(comm.combine(answer, handle))) for answer in answers]


@EVERY_WAY
def test_a_handle_may_be_combined_twice(way: tuple) -> None:
    case = replace(CASE, name=f"twice-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    of_ranks = run_virtual(_combine_twice, share(3), case)
    for number in range(2):
        got = [results[number] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs()), f"combine {number}")


def _change_tokens(group: ew.Group, place: Place, case: Case, tokens: list[tuple[int, ...]]) -> list[Received]:
    """Exchange with another number of tokens each time, and be late now and then."""
    rng = np.random.default_rng(group.rank)
    received = []
    with communicator(group, case, place) as comm:
        for step, counts in enumerate(tokens):
            time.sleep(rng.exponential(0.002) if rng.random() < 0.3 else 0.0)
            received.append(exchange(comm, case.inputs(step, counts)[comm.rank]))
    return received


@EVERY_WAY
def test_the_number_of_tokens_may_change_with_every_call(way: tuple) -> None:
    case = Case(f"changing-{way_name(*way)}", (7,) * 4, 8, 64, 3, layout=way[0], combine_mode=way[1], weights="router")
    rng = np.random.default_rng(1)
    tokens = [tuple(int(count) for count in rng.integers(0, 8, 4) * rng.integers(0, 2, 4)) for _ in range(50)]
    of_ranks = run_virtual(_change_tokens, share(4), case, tokens)
    for step, counts in enumerate(tokens):
        got = [received[step] for received in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step, counts)), f"step {step}")


def _weigh_at_combine(group: ew.Group, place: Place, case: Case) -> np.ndarray:
    """Change the arguments after the call: the handle has its own copy, made in the order of the stream."""
    with communicator(group, case, place) as comm:
        given = case.inputs()[comm.rank]
        arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids, given.weights)]
        out, handle = comm.dispatch(*arrays)
        for array in arrays[1:]:
            array.copy_(torch.full(array.shape, 7, dtype=array.dtype))
        received = copy_output(out, to_host)
        return to_host(comm.combine(_answer(comm, received), handle))


def test_the_callers_arrays_may_change_after_dispatch() -> None:
    got = run_virtual(_weigh_at_combine, share(3), CASE)
    for ours, theirs in zip(got, expected(CASE.config, CASE.inputs()), strict=True):
        assert_same_bits(ours, theirs.combined, "combined")


# One rank is enough for what follows


def alone(place: Place, **fields: Any) -> ew.MoECommunicator:
    return communicator(*ew.local_group(1), replace(CASE, tokens=(7,), max_in_flight=2), place, **fields)


def test_outputs_are_the_lanes_own_memory() -> None:
    place = Place("cuda")
    with living_at(Place()), alone(place) as comm:
        assert comm.config.device == "cuda:0"
        assert comm.config.validate is False
        given = CASE.inputs()[2]
        arrays = [to_device(array, "cuda:0") for array in (given.x, given.topk_ids, given.weights)]
        addresses = []
        for lane in (0, 1, 0):
            before = comm.get_dispatch_output_buffer("torch")
            out, handle = comm.dispatch(*arrays)
            assert handle.lane == lane
            assert out.tokens.data_ptr() == before.data_ptr()
            assert comm.get_combine_input_buffer("torch").data_ptr() == out.combine_input_buffer.data_ptr()
            assert (out.tokens.dtype, str(out.tokens.device)) == (torch.bfloat16, "cuda:0")
            assert out.tokens.data_ptr() == comm._runtime.lane_address(lane, "tokens")
            addresses.append(out.tokens.data_ptr())
            torch.cuda.current_stream().synchronize()
        assert addresses[0] == addresses[2] != addresses[1]


def test_outputs_outlive_the_communicator() -> None:
    with living_at(Place()):
        comm = alone(Place())
        given = CASE.inputs()[2]
        out, _ = dispatch(comm, given)
        tokens, ranges = out.tokens, out.layout.rank_ranges
        torch.cuda.current_stream().synchronize()
        comm.close()
        del comm, out
        gc.collect()
        counts = to_host(ranges)[:, 0, 1]
        assert counts.sum() == (given.topk_ids >= 0).sum()
        first = int(np.argmax(counts))
        token = int(np.argwhere(given.topk_ids == first)[0, 0])
        assert_same_bits(to_host(tokens)[first, 0], given.x[token], "first row")


@pytest.mark.parametrize("column", [False, True])
def test_scales_have_the_asked_memory_order(column: bool) -> None:
    layout = ew.ScaleLayout.COLUMN if column else ew.ScaleLayout.ROW
    quant = QuantConfig(ew.DispatchDataType.FP8_E4M3, scale_layout=layout)
    with living_at(Place()), alone(Place(), hidden_size=256, quant=quant) as comm:
        out = comm.dispatch(*(to_device(array, "cuda:0") for array in (np.ones((3, 256), BF16), _ids(3))))[0]
        assert out.tokens.dtype is torch.float8_e4m3fn
        assert out.quant is not None
        assert out.quant.block_scales.shape == (6, 7, 2)
        assert out.quant.block_scales.stride() == ((16, 1, 8) if column else (14, 2, 1))
        torch.cuda.current_stream().synchronize()


def _ids(num_tokens: int) -> np.ndarray:
    return np.arange(3 * num_tokens).reshape(num_tokens, 3) % 6


class Stream:
    """A stream of some other library."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@pytest.mark.parametrize("form", ["address", "torch", "protocol"])
def test_a_stream_may_be_named(form: str) -> None:
    case = replace(CASE, tokens=(7,))
    given = case.inputs()[0]
    with living_at(Place()) as current, alone(Place()) as comm:
        assert_received([exchange(comm, given)], expected(case.config, [given]))
        other = torch.cuda.Stream()
        forms = {"address": other.cuda_stream, "torch": other, "protocol": Stream(other.cuda_stream)}
        arrays = [to_device(array, "cuda:0") for array in (given.x, given.topk_ids, given.weights)]
        out, handle = comm.dispatch(*arrays, stream=forms[form])
        with torch.cuda.stream(other):
            received = copy_output(out, to_host)
        answer = _answer(comm, received)
        current.synchronize()
        combined = comm.combine(answer, handle, stream=forms[form])
        with torch.cuda.stream(other):
            assert_received([Received(received, to_host(combined))], expected(case.config, [given]))
        exchange(comm, given)  # back on the current stream, chained behind the other


def test_empty_calls() -> None:
    with living_at(Place()), alone(Place()) as comm:
        given = CASE.input(0, 0)
        for _ in range(3):
            received = exchange(comm, given)
            assert received.combined.shape == (0, 64)
            assert received.dispatched.layout.num_tokens_per_expert.tolist() == [0] * 6
        assert (comm.stats().dispatch_calls, comm.stats().combine_calls) == (3, 3)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ew.Error, match="cuda"):
        alone(Place("cuda:63"))
