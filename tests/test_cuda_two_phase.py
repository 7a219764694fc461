"""dispatch_async and combine_async on CUDA: the table in two phases, every order, streams, graphs, losses."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_memory_order
from cases import DIRECT, EXPERT_MAJOR, QUANTS, RANK_MAJOR, REDUCE, WAYS, Case, way_name
from cuda_driving import (
    EVERY_WAY,
    Place,
    capture,
    communicator,
    exchange,
    poison,
    run_virtual,
    share,
    steps_of_case_with,
    to_device,
    to_host,
)
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts
from expertwire import reference
from expertwire.reference import RankInput
from two_phase import ORDERS, SMALL, by_ranks, wanted

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

MANY = Case("two-phase-many", (200, 0, 170, 31), 32, 1024, 6, max_in_flight=2, weights="router", ids="half")


def send(comm: ew.MoECommunicator, given: RankInput, **options: Any) -> ew.MoERequest:
    """Send copies that are spoilt at once, in the order of the stream: nothing may look at them again."""
    device = str(comm.config.device)
    poison(comm.get_dispatch_output_buffer("torch"))
    scales = to_device(given.block_scales, device)
    quant = None if scales is None else ew.QuantConfig(block_scales=scales)
    arrays = [to_device(array, device) for array in (given.x, given.topk_ids, given.weights)]
    if options:
        torch.cuda.current_stream().synchronize()  # the arrays are made there
    request = comm.dispatch_async(*arrays, quant=quant, **options)
    if not options:
        for array in (*arrays, scales):
            if array is not None and array.numel():
                poison(array)
    return request


def send_back(
    comm: ew.MoECommunicator, out: Any, handle: Any, weights: np.ndarray | None = None, **options: Any
) -> ew.MoERequest:
    device = str(comm.config.device)
    answer = to_device(expert_output(comm.config, out, local_experts(comm)), device)
    result = poison(torch.empty((handle.num_tokens, comm.config.hidden_size), dtype=torch.bfloat16, device=device))
    given = to_device(weights, device)
    if options:
        torch.cuda.current_stream().synchronize()
    request = comm.combine_async(answer, handle, weights=given, out=result, **options)
    if not options:
        for array in (answer, given):
            if array is not None and array.numel():
                poison(array)
    return request


def exchange_in_phases(comm: ew.MoECommunicator, given: RankInput, weights: np.ndarray | None = None) -> Received:
    request = send(comm, given)
    assert not request.done()
    out, handle = request.wait()
    received = copy_output(out, to_host)
    assert request.done()
    assert_memory_order(received)
    replaced = weights is not None and given.weights is not None
    if replaced and comm.config.combine_mode is REDUCE and comm.config.output_layout is EXPERT_MAJOR:
        with pytest.raises(ew.UnsupportedError, match="weights: in two phases RANK_LOCAL_REDUCE"):
            send_back(comm, received, handle, weights)
        weights = None
    return Received(received, to_host(send_back(comm, received, handle, weights).wait()))


def _rank_of_case(group: ew.Group, place: Place, case: Case, fields: dict[str, Any]) -> list[Received]:
    with communicator(group, case, place, two_phase=True, **fields) as comm:
        return steps_of_case_with(comm, case, 2, exchange_in_phases)


PART_OF_TABLE = [case for cases in by_ranks().values() for case in cases]


@pytest.mark.parametrize("case", PART_OF_TABLE, ids=lambda case: case.name)
def test_cases_in_two_phases(case: Case) -> None:
    of_ranks = run_virtual(_rank_of_case, share(case.num_ranks), case, {})
    for step in range(2):
        assert_received([results[step] for results in of_ranks], wanted(case, step), case.name)


@pytest.mark.parametrize("quant", [QUANTS["float32"], QUANTS["ue8m0-column"], None], ids=["fp8", "ue8m0", "bf16"])
@EVERY_WAY
def test_many_tokens_with_masking(way: tuple, quant: Any) -> None:
    case = replace(MANY, name=f"{MANY.name}-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    case = case if quant is None else replace(case, quant=quant, name=f"{case.name}-{quant.scale_format.value}")
    for policy in ("raise", "mask"):
        of_ranks = run_virtual(_rank_of_case, share(4), case, {"on_peer_loss": policy})
        for step in range(2):
            assert_received([results[step] for results in of_ranks], wanted(case, step), f"{case.name} {policy}")


def _rank_of_order(group: ew.Group, place: Place, case: Case, orders: list[str]) -> list[Received]:
    results: list[Received] = []
    with communicator(group, case, place, two_phase=True) as comm:
        for step, order in enumerate(orders):
            requests: dict[str, ew.MoERequest] = {}
            got: dict[str, Any] = {}
            for what, batch in order.split():
                if what == "D":
                    requests["D" + batch] = send(comm, case.inputs(2 * step + int(batch))[group.rank])
                elif what == "d":
                    out, handle = requests["D" + batch].wait()
                    got[batch] = copy_output(out, to_host), handle
                elif what == "C":
                    requests["C" + batch] = send_back(comm, *got[batch])
                else:
                    got["c" + batch] = to_host(requests["C" + batch].wait())
            results += [Received(got[batch][0], got["c" + batch]) for batch in "01"]
    return results


@EVERY_WAY
def test_two_micro_batches(way: tuple) -> None:
    case = replace(SMALL, name=f"order-{way_name(*way)}", layout=way[0], combine_mode=way[1], weights="router")
    of_ranks = run_virtual(_rank_of_order, share(3), case, ORDERS * 3)
    for step in range(len(of_ranks[0])):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _rank_of_mixture(group: ew.Group, place: Place, case: Case) -> list[Received]:
    with communicator(group, case, place, two_phase=True) as comm:
        return [
            (exchange_in_phases if (group.rank + step) % 2 else exchange)(comm, case.inputs(step)[group.rank])
            for step in range(8)
        ]


@EVERY_WAY
def test_others_may_do_it_in_one_phase(way: tuple) -> None:
    case = replace(SMALL, name=f"mixed-{way_name(*way)}", layout=way[0], combine_mode=way[1], weights="router")
    of_ranks = run_virtual(_rank_of_mixture, share(3), case)
    for step in range(8):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _change_streams(group: ew.Group, place: Place, case: Case) -> Received:
    """Send on one stream and receive on another, while a third is the current one."""
    with communicator(group, case, place, two_phase=True) as comm:
        other, third = torch.cuda.Stream(place.device), torch.cuda.Stream(place.device)
        given = case.inputs()[group.rank]
        torch.cuda.current_stream().synchronize()
        request = send(comm, given, stream=other)
        out, handle = request.wait(stream=third)
        third.synchronize()
        assert request.done()
        received = copy_output(out, to_host)
        back = send_back(comm, received, handle, stream=third)
        with torch.cuda.stream(other):
            combined = back.wait()
        other.synchronize()
        assert back.done()
        return Received(received, to_host(combined))


def test_phases_may_be_on_different_streams() -> None:
    of_ranks = run_virtual(_change_streams, share(3), SMALL)
    assert_received(of_ranks, expected(SMALL.config, SMALL.inputs()))


def _refuse(group: ew.Group, place: Place) -> None:
    given = SMALL.inputs()[0]
    case = replace(SMALL, tokens=(5,), max_in_flight=1, name="two-phase-refused")
    with communicator(group, case, place) as comm:
        arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids)]
        with pytest.raises(ew.UnsupportedError, match="two_phase = true"):
            comm.dispatch_async(*arrays)
    with communicator(group, case, place, two_phase=True) as comm:
        request = comm.dispatch_async(*arrays)
        with pytest.raises(ew.HandleError, match="has been sent and not received"):
            comm.dispatch(*arrays)
        out, handle = request.wait()
        with pytest.warns(ResourceWarning, match="combine_async: a request was dropped"):
            comm.combine_async(out.tokens, handle)
        comm.dispatch(*arrays)  # receives it first


def test_wrong_orders_and_missing_kernels_are_refused() -> None:
    run_virtual(_refuse, share(1))


def _replay(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock
) -> list[Received]:
    """Capture both phases of a dispatch and a combine of constant answers, and replay them over other inputs."""
    with communicator(group, case, place, two_phase=True) as comm:
        device, inputs = place.device, [case.inputs(step)[group.rank] for step in range(4)]
        arrays = [to_device(array, device) for array in (inputs[0].x, inputs[0].topk_ids, inputs[0].weights)]
        y = torch.empty((len(inputs[0].x), case.hidden_size), dtype=torch.bfloat16, device=device)
        kept: list[Any] = []

        def calls() -> None:
            out, handle = comm.dispatch_async(*arrays).wait()
            comm.combine_async(out.combine_input_buffer, handle, out=y).wait()
            kept[:] = [out]

        calls()
        graph = capture(calls, barrier, lock)
        received = []
        for step, given in enumerate(inputs[1:], 1):
            for array, value in zip(arrays, (given.x, given.topk_ids, given.weights), strict=True):
                array.copy_(to_device(value, device))
            # The answers that this step's rows will get; dispatch and combine are one graph.
            rows = reference.dispatch(case.config, case.inputs(step))[group.rank]
            answer = expert_output(case.config, rows, local_experts(comm))
            kept[0].combine_input_buffer.copy_(to_device(answer, device))
            poison(y)
            graph.replay()
            received.append(Received(copy_output(kept[0], to_host), to_host(y)))
        return received


@EVERY_WAY
def test_both_phases_in_a_graph(way: tuple) -> None:
    name = f"graph-two-phase-{way_name(*way)}"
    case = Case(name, (5, 4, 6), 9, 64, 3, layout=way[0], combine_mode=way[1], weights="router")
    of_ranks = run_virtual(_replay, share(3), case, threading.Barrier(3), threading.Lock())
    for step in range(3):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step + 1)), f"replay {step}")


def _wait_in_vain(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier) -> str:
    with communicator(group, case, place, two_phase=True, timeout_s=1.0) as comm:
        exchange_in_phases(comm, case.inputs()[group.rank])
        if group.rank == 1:
            barrier.wait()  # its memory stays until nobody stores into it
            return ""
        request = send(comm, case.inputs()[group.rank])
        torch.cuda.current_stream().synchronize()  # the send waits for nobody
        out, handle = request.wait()
        torch.cuda.current_stream().synchronize()
        counts = out.layout.num_tokens_per_expert if case.layout is EXPERT_MAJOR else out.layout.num_tokens_per_rank
        assert not to_host(counts).any()
        with pytest.raises(ew.PeerLostError) as caught:
            comm.check()
        with pytest.raises(ew.PeerLostError):
            comm.combine_async(out.combine_input_buffer, handle)
        barrier.wait()
        return str(caught.value)


@pytest.mark.parametrize(("layout", "mode"), [(EXPERT_MAJOR, REDUCE), (RANK_MAJOR, DIRECT)], ids=["expert", "rank"])
def test_a_rank_that_does_not_send_is_lost(layout: Any, mode: Any) -> None:
    case = replace(SMALL, name=f"in-vain-{way_name(layout, mode)}", layout=layout, combine_mode=mode)
    told = run_virtual(_wait_in_vain, share(3), case, threading.Barrier(3, timeout=60))
    assert "did not arrive" in told[0]
    assert "did not arrive" in told[2]


def test_the_table_has_every_way() -> None:
    assert {(case.layout, case.combine_mode) for case in PART_OF_TABLE} == set(WAYS)
