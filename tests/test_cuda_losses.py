"""Ranks on CUDA that never call, or die: the others are told which and when, and their CUDA context stays usable."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import DIRECT, RANK_MAJOR, Case, way_name
from crew import Me, crew, die
from cuda_driving import (
    EVERY_WAY,
    Place,
    communicator,
    dispatch,
    exchange,
    living_at,
    poison,
    run_virtual,
    share,
    to_device,
    to_host,
)
from driving import Received, assert_received, expected
from expertwire import reference
from losses import BOTH_WAYS, Lost

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

VICTIM = 1
SURVIVORS = (0, 2)
TIMEOUT_S = 1.5
LATE_TIMEOUT_S = 1.0
MARGIN_S = 1.0


def _wait_for_the_loss(comm: ew.MoECommunicator, asking: str, call: Any) -> Lost:
    """Ask after a call that returned at once, until the loss is told; ``call`` is the host's next one."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < 4 * TIMEOUT_S:
            if asking == "check":
                comm.check()
                time.sleep(0.005)
            else:
                torch.cuda.current_stream().synchronize()
                call()
    except ew.PeerLostError as error:
        return Lost(error.ranks, error.operation, str(error), time.monotonic() - started)
    raise AssertionError("nothing was told")


def _cuda_works(device: str) -> None:
    numbers = np.arange(1000, dtype=np.int64)
    assert (to_host(to_device(numbers, device)) == numbers).all()
    torch.cuda.current_stream().synchronize()


def _lose(group: ew.Group, place: Place, case: Case, plan: dict[str, Any]) -> tuple[Lost, Received] | None:
    comm = communicator(group, case, place, timeout_s=TIMEOUT_S)
    given = case.inputs()[group.rank]
    exchange(comm, given)
    if group.rank == VICTIM and plan["misses"] == "combine":
        dispatch(comm, given)
    if group.rank == VICTIM:
        assert plan["over"].wait(60)
        comm.close()
        return None
    out, handle = dispatch(comm, given)
    if plan["misses"] == "combine":
        comm.combine(out.combine_input_buffer, handle)
    lost = _wait_for_the_loss(comm, plan["asking"], lambda: comm.combine(out.combine_input_buffer, handle))
    with pytest.raises(ew.PeerLostError):
        comm.dispatch(*(to_device(array, place.device) for array in (given.x, given.topk_ids)))
    assert not comm.is_available
    assert comm.lost_ranks() == lost.ranks
    _cuda_works(place.device)
    comm.close()
    plan["done"].wait()
    if group.rank == SURVIVORS[0]:
        plan["over"].set()
    fewer = _without_victim(case)
    with communicator(plan["groups"][SURVIVORS.index(group.rank)], fewer, place) as again:
        return lost, exchange(again, fewer.inputs()[again.rank])


def _without_victim(case: Case) -> Case:
    return replace(case, tokens=tuple(case.tokens[rank] for rank in SURVIVORS))


@pytest.mark.parametrize("asking", ["check", "call"])
@pytest.mark.parametrize("misses", ["dispatch", "combine"])
@BOTH_WAYS
def test_a_rank_that_never_calls_is_named_in_time(case: Case, misses: str, asking: str) -> None:
    case = replace(case, tokens=case.tokens[:3], num_experts=6)
    plan = {
        "misses": misses,
        "asking": asking,
        "over": threading.Event(),
        "done": threading.Barrier(len(SURVIVORS), timeout=60),
        "groups": ew.local_group(len(SURVIVORS)),
    }
    results = run_virtual(_lose, share(3), case, plan)
    for rank in SURVIVORS:
        lost: Lost = results[rank][0]
        assert lost.ranks == (VICTIM,)
        assert lost.operation == misses
        assert str(VICTIM) in lost.text
        assert lost.seconds < TIMEOUT_S + MARGIN_S
    fewer = _without_victim(case)
    got = [results[rank][1] for rank in SURVIVORS]
    assert_received(got, expected(fewer.config, fewer.inputs()), "after the loss")


def _lose_a_process(me: Me, case: Case) -> Lost | None:
    place = Place()
    with living_at(place):
        comm = communicator(me.group, case, place, timeout_s=TIMEOUT_S)
        given = case.inputs()[comm.rank]
        exchange(comm, given)
        if comm.rank == VICTIM:
            die()
        out, handle = dispatch(comm, given)
        lost = _wait_for_the_loss(comm, "check", lambda: comm.combine(out.combine_input_buffer, handle))
        _cuda_works(place.device)
        comm.close()
        return lost


@BOTH_WAYS
def test_a_killed_process_is_named_in_time(case: Case) -> None:
    case = replace(case, tokens=case.tokens[:3], num_experts=6)
    with crew(_lose_a_process, 3, case) as ranks:
        for rank in SURVIVORS:
            lost = ranks[rank].result()
            assert lost.ranks == (VICTIM,)
            assert lost.operation == "dispatch"
            assert lost.seconds < TIMEOUT_S + MARGIN_S


#: When each rank makes its calls, in time-outs: one that comes just after the others have given up; and one that comes
#: while a third, which began later than the first, still waits for it.
DELAYS = {"one is late": (0.0, 1.3, 0.0), "one still waits": (0.0, 1.6, 0.8)}
NUM_LATE_STEPS = 3


def _come_late(group: ew.Group, place: Place, case: Case, delays: tuple[float, ...], barrier: threading.Barrier) -> int:
    """Go on until the loss is told. Returns how many steps were right before that."""
    with communicator(group, case, place, timeout_s=LATE_TIMEOUT_S) as comm:
        exchange(comm, case.inputs(NUM_LATE_STEPS)[comm.rank])
        steps = []
        for step in range(NUM_LATE_STEPS):
            inputs = case.inputs(step)
            answers, wanted = _answers(case, step)
            given, replaced = inputs[comm.rank], case.replaced_weights(step)
            arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids, given.weights)]
            weights = to_device(replaced[comm.rank] if replaced else None, place.device)
            combined = poison(torch.empty_like(arrays[0]))
            steps.append((arrays, to_device(answers[comm.rank], place.device), weights, combined, wanted[comm.rank]))
        torch.cuda.current_stream().synchronize()
        barrier.wait()
        time.sleep(delays[comm.rank] * LATE_TIMEOUT_S)
        looks = delays[comm.rank] > 0  # the first makes all its calls at once
        num_right = 0
        try:
            for arrays, answer, weights, combined, wanted in steps:
                _, handle = comm.dispatch(*arrays)
                comm.combine(answer, handle, weights=weights, out=combined)
                if not looks:
                    continue
                torch.cuda.current_stream().synchronize()
                comm.check()
                assert_same_bits(
                    to_host(combined), wanted, f"step {num_right} on rank {comm.rank}, of which nothing was told"
                )
                num_right += 1
            torch.cuda.current_stream().synchronize()
            comm.check()
        except ew.PeerLostError:
            return num_right
        raise AssertionError("nothing was told")


def _answers(case: Case, step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return what experts answer whatever they receive, and what comes of it."""
    inputs = case.inputs(step)
    answers = []
    for rank, out in enumerate(reference.dispatch(case.config, inputs)):
        shape = list(out.tokens.shape)
        if case.layout is RANK_MAJOR and case.combine_mode is DIRECT:
            shape.insert(1, case.num_topk)
        rng = np.random.default_rng((step, rank))
        answers.append(rng.standard_normal(shape, np.float32).astype(reference.BF16))
    return answers, reference.combine(case.config, inputs, answers, case.replaced_weights(step))


@EVERY_WAY
@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS.keys())
def test_who_comes_after_a_time_out_gets_right_rows_or_an_error(way: tuple, delays: tuple[float, ...]) -> None:
    """What an ended rank would go on to send is made of rows that never came."""
    case = Case(f"late-{way_name(*way)}", (9, 9, 9), 6, 64, 3, layout=way[0], combine_mode=way[1], weights="router")
    num_right = run_virtual(_come_late, share(3), case, delays, threading.Barrier(3, timeout=60))
    assert max(num_right) == 0  # the first rank never answered


@pytest.mark.parametrize("given", ["none", "router"])
@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS.keys())
def test_who_comes_late_with_weights_for_combine_gets_no_sums_without_them(
    given: str, delays: tuple[float, ...]
) -> None:
    case = Case(f"late-weights-{given}", (9, 9, 9), 6, 64, 3, weights=given, new_weights="all")
    num_right = run_virtual(_come_late, share(3), case, delays, threading.Barrier(3, timeout=60))
    assert max(num_right) == 0


def _take_down_beside(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier) -> float:
    """Rank 0 waits on the GPU for rank 1, which takes down another communicator of that GPU meanwhile."""
    with communicator(group, case, place, timeout_s=2 * TIMEOUT_S) as comm:
        if comm.rank == 0:
            barrier.wait()
            dispatch(comm, case.inputs()[0])
            barrier.wait()
            barrier.wait()
            torch.cuda.current_stream().synchronize()
            with pytest.raises(ew.PeerLostError):
                comm.check()
            return 0.0
        alone = replace(case, tokens=case.tokens[:1], num_experts=3)
        stream = torch.cuda.Stream()
        other = communicator(*ew.local_group(1), alone, place)
        with torch.cuda.stream(stream):
            exchange(other, alone.inputs()[0])
        barrier.wait()
        barrier.wait()
        time.sleep(0.1)
        started = time.monotonic()
        other.close()
        del other
        seconds = time.monotonic() - started
        barrier.wait()
        return seconds


def test_taking_one_down_does_not_wait_for_the_kernels_of_another() -> None:
    case = Case("beside", (5, 5), 6, 64, 3)
    seconds = run_virtual(_take_down_beside, share(3)[:2], case, threading.Barrier(2, timeout=60))[1]
    assert seconds < TIMEOUT_S
