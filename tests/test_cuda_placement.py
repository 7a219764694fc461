"""Placements on CUDA: replaced between calls, with dispatches under way, and under graphs that are replayed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import expertwire as ew
from bits import assert_dispatch_equal
from cases import EXPERT_MAJOR, PLACEMENTS, Case, way_name
from cuda_driving import (
    EVERY_WAY,
    Place,
    capture,
    communicator,
    dispatch,
    exchange,
    run_virtual,
    share,
    to_device,
    to_host,
)
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts
from expertwire import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

COUNTS, COPIES = PLACEMENTS["copies"]
MOVED = (5, 4, 3, 2, 1, 0, 0, -1, 1, 2)
CASE = Case("placement", (6, 3, 0, 7), 10, 64, 3, 8, COUNTS, placement=COPIES, ids="half", weights="router")


def _check(case: Case, placements: tuple[tuple[int, ...], ...], of_ranks: list[list[Received]]) -> None:
    for step, placement in enumerate(placements):
        wanted = expected(replace(case.config, placement=placement), case.inputs(step))
        assert_received([results[step] for results in of_ranks], wanted, f"step {step}")


def _journey(group: ew.Group, place: Place, case: Case) -> list[Received]:
    """Exchange, with updates on the current stream and on another."""
    with communicator(group, case, place) as comm:
        results = [exchange(comm, case.inputs()[comm.rank])]
        comm.update_placement(MOVED)
        results.append(exchange(comm, case.inputs(1)[comm.rank]))
        comm.update_placement(COPIES, stream=torch.cuda.Stream(place.device))
        results.append(exchange(comm, case.inputs(2)[comm.rank]))
        return results


@EVERY_WAY
def test_placements_change_between_calls(way: tuple) -> None:
    case = replace(CASE, name=f"journey-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    _check(case, (COPIES, MOVED, COPIES), run_virtual(_journey, share(4), case))


def _update_between(group: ew.Group, place: Place, case: Case) -> list[Received]:
    """Dispatch twice, with an update before each combine and without waiting for the device before it."""
    with communicator(group, case, place) as comm:
        open_ones = []
        for step, placement in enumerate((MOVED, COPIES)):
            open_ones.append(dispatch(comm, case.inputs(step)[comm.rank]))
            comm.update_placement(placement)
        results = []
        for out, handle in open_ones:
            received = copy_output(out, to_host)
            answer = to_device(expert_output(comm.config, received, local_experts(comm)), place.device)
            results.append(Received(received, to_host(comm.combine(answer, handle))))
        return results


@EVERY_WAY
def test_dispatches_under_way_keep_their_placement(way: tuple) -> None:
    case = replace(CASE, name=f"between-{way_name(*way)}", layout=way[0], combine_mode=way[1], max_in_flight=2)
    _check(case, (COPIES, MOVED), run_virtual(_update_between, share(4), case))


def _replay(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock
) -> list[ew.DispatchOutput]:
    """Capture a pair, and replay it under one placement and another."""
    given = case.inputs()[group.rank]
    with communicator(group, case, place) as comm:
        arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids, given.weights)]
        y = torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device)
        outputs: list[ew.DispatchOutput] = []

        def pair() -> None:
            with pytest.raises(ew.InvalidArgumentError, match="stream is being captured"):
                comm.update_placement(MOVED, collective=False)
            out, handle = comm.dispatch(*arrays)
            outputs.append(out)
            comm.combine(out.combine_input_buffer, handle, out=y)

        graph = capture(pair, barrier, lock)
        results = []
        for placement in (None, MOVED, COPIES):
            if placement:
                comm.update_placement(placement)
            graph.replay()
            results.append(copy_output(outputs[0], to_host))
        return results


@EVERY_WAY
def test_replayed_graphs_go_by_the_placement_of_their_time(way: tuple) -> None:
    case = replace(CASE, name=f"replay-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    barrier, lock = threading.Barrier(4, timeout=60.0), threading.Lock()
    of_ranks = run_virtual(_replay, share(4), case, barrier, lock)
    for step, placement in enumerate((COPIES, MOVED, COPIES)):
        wanted = reference.dispatch(replace(case.config, placement=placement), case.inputs())
        for rank, results in enumerate(of_ranks):
            assert_dispatch_equal(results[step], wanted[rank], f"replay {step} on rank {rank}")


def _told(group: ew.Group, place: Place, case: Case) -> tuple[Received, str, tuple[int, ...]]:
    """Choose an expert that no placement has; say what became of it, and what was counted."""
    given = case.inputs()[group.rank]
    if group.rank == 0:
        given.topk_ids[1, 2] = 6
    with communicator(group, case, place, validate=True) as comm:
        out, handle = dispatch(comm, given)
        torch.cuda.current_stream().synchronize()
        told = ""
        try:
            comm.check()
        except ew.InvalidArgumentError as error:
            told = str(error)
        received = copy_output(out, to_host)
        answer = to_device(expert_output(comm.config, received, local_experts(comm)), place.device)
        return Received(received, to_host(comm.combine(answer, handle))), told, comm.stats().expert_tokens


def test_ids_are_of_logical_experts_and_totals_of_physical_ones() -> None:
    case = replace(CASE, layout=EXPERT_MAJOR)
    of_ranks = run_virtual(_told, share(4), case)
    inputs = case.inputs()
    inputs[0].topk_ids[1, 2] = -1
    wanted = expected(case.config, inputs)
    assert_received([received for received, *_ in of_ranks], wanted)
    for rank, (_, told, totals) in enumerate(of_ranks):
        assert ("topk_ids[1, 2] = 6" in told and "below the number of logical experts = 6" in told) == (rank == 0)
        assert list(totals) == wanted[rank].dispatched.layout.num_tokens_per_expert.tolist()
