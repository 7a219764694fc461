"""``on_peer_loss="mask"`` on CUDA: the others go on, agree from the next operation on, and a late rank does no harm."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import RANK_MAJOR, WAYS, Case, way_name
from crew import Me, crew, die
from cuda_driving import (
    EVERY_WAY,
    Place,
    capture,
    communicator,
    dispatch,
    exchange,
    living_at,
    run_virtual,
    share,
    to_device,
)
from driving import Received, assert_received, expected
from expertwire import reference
from losses import BASE, OTHERS, TOUR, VICTIM
from test_masking import without_victim

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TIMEOUT_S = 1.5
MARGIN_S = 1.0
NUM_AFTER = 6


def _until_told(comm: ew.MoECommunicator) -> tuple[int, ...]:
    started = time.monotonic()
    while time.monotonic() - started < 4 * TIMEOUT_S:
        try:
            comm.check()
        except ew.PeerLostError as error:
            return error.ranks
        time.sleep(0.005)
    return ()


def _come_too_late(comm: ew.MoECommunicator, given: Any, dispatched: Any) -> tuple[int, ...]:
    """Make the call that was missed: it ends this rank, which is told that it is the one."""
    if dispatched is None:
        dispatch(comm, given)
    else:
        comm.combine(dispatched[0].combine_input_buffer, dispatched[1])
    told = _until_told(comm)
    assert not comm.is_available
    assert comm.lost_ranks() == told
    return told


def _go_on(group: ew.Group, place: Place, case: Case, plan: dict[str, Any]) -> Any:
    try:
        with communicator(group, case, place, timeout_s=TIMEOUT_S, on_peer_loss="mask") as comm:
            told = _miss(comm, case, plan) if comm.rank == VICTIM else _do_without(comm, case, plan)
            plan["end"].wait()  # closing may wait for the device, where the others still are
            return told
    except BaseException:
        for name in ("step", "half", "end"):
            plan[name].abort()
        plan["over"].set()
        plan["came"].set()
        raise


def _miss(comm: ew.MoECommunicator, case: Case, plan: dict[str, Any]) -> tuple[int, ...]:
    exchange(comm, case.inputs(0)[VICTIM])
    given = case.inputs(1)[VICTIM]
    plan["step"].wait()
    dispatched = dispatch(comm, given) if plan["misses"] == "combine" else None
    torch.cuda.current_stream().synchronize()
    assert plan["over"].wait(60)
    told = _come_too_late(comm, given, dispatched)
    plan["came"].set()
    return told


def _do_without(comm: ew.MoECommunicator, case: Case, plan: dict[str, Any]) -> tuple[list[Received], int]:
    received = [exchange(comm, case.inputs(0)[comm.rank])]
    assert comm.lost_ranks() == ()
    plan["step"].wait()
    for step in range(1, NUM_AFTER + 1):
        started = time.monotonic()
        received.append(exchange(comm, case.inputs(step % TOUR)[comm.rank]))
        assert time.monotonic() - started < TIMEOUT_S + MARGIN_S
        assert comm.lost_ranks() == (VICTIM,)
        if step == NUM_AFTER // 2 and plan["half"].wait() == 0:
            plan["over"].set()  # the late rank comes, and is told, while the others go on
    comm.check()
    assert comm.is_available
    plan["half"].wait()
    assert plan["came"].wait(60)
    stats = comm.stats()
    assert stats.timeouts <= 1
    assert stats.source_wait_seconds[VICTIM] >= (0.5 * TIMEOUT_S if plan["misses"] == "dispatch" else 0.0)
    return received, stats.timeouts


@EVERY_WAY
@pytest.mark.parametrize("misses", ["dispatch", "combine"])
def test_the_others_go_on_and_the_late_rank_is_told(way: tuple, misses: str) -> None:
    case = replace(BASE, name=f"mask-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    plan = {
        "misses": misses,
        "step": threading.Barrier(4, timeout=60),
        "half": threading.Barrier(3, timeout=60),
        "over": threading.Event(),
        "came": threading.Event(),
        "end": threading.Barrier(4, timeout=60),
    }
    results = run_virtual(_go_on, share(4), case, plan)
    assert results[VICTIM] == (VICTIM,)
    assert sum(results[rank][1] for rank in OTHERS) >= 1
    for step in range(NUM_AFTER + 1):
        sent = misses == "combine" and step == 1
        wanted = expected(case.config, case.inputs(0)) if step == 0 else without_victim(case, step % TOUR, sent)
        got = [results[rank][0][step] for rank in OTHERS]
        assert_received(got, [wanted[rank] for rank in OTHERS], f"step {step}")


def _replay_on(group: ew.Group, place: Place, case: Case, barrier: Any, lock: Any) -> np.ndarray | None:
    """Replay a captured pair; one rank stops doing so."""
    with communicator(group, case, place, timeout_s=TIMEOUT_S, on_peer_loss="mask") as comm:
        given = case.inputs()[comm.rank]
        arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids, given.weights)]
        combined = torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device)

        def pair() -> None:
            out, handle = comm.dispatch(*arrays)
            comm.combine(out.tokens, handle, out=combined)

        pair()
        graph, stream = capture(pair, barrier, lock), torch.cuda.current_stream()
        graph.replay()
        stream.synchronize()
        for _ in range(0 if comm.rank == VICTIM else 5):
            graph.replay()
        stream.synchronize()
        assert comm.lost_ranks() == (() if comm.rank == VICTIM else (VICTIM,))
        result = combined.view(torch.uint8).cpu().numpy()
        barrier.wait()
        return None if comm.rank == VICTIM else result


def test_replays_go_on_without_a_lost_rank() -> None:
    case = replace(BASE, name="mask-replays")
    barrier, lock = threading.Barrier(4, timeout=60), threading.Lock()
    results = run_virtual(_replay_on, share(4), case, barrier, lock)
    inputs = case.inputs()
    own = case.config.num_experts // 4
    masked = [
        replace(given, topk_ids=np.where(given.topk_ids // own == VICTIM, -1, given.topk_ids)) for given in inputs
    ]
    dispatched = reference.dispatch(case.config, masked)
    wanted = reference.combine(case.config, masked, [out.tokens for out in dispatched])
    for rank in OTHERS:
        assert np.array_equal(results[rank], wanted[rank].view(np.uint8)), f"rank {rank}"


def _die_somewhere(me: Me, case: Case, late_s: float) -> int:
    """Exchange; the victim dies at some moment from the third one on. Return how many exchanges went without it."""
    place = Place()
    with living_at(place), communicator(me.group, case, place, timeout_s=TIMEOUT_S, on_peer_loss="mask") as comm:
        rank, num_without = comm.rank, 0
        for step in range(40):
            if rank == VICTIM and step == 3:
                threading.Timer(late_s, die).start()
            known = comm.lost_ranks()
            received = exchange(comm, case.inputs(step % TOUR)[rank])
            if known:
                num_without += 1
                assert known == (VICTIM,)
                assert_received([received], [_absent(case, step, rank)], f"step {step} on rank {rank}")
        return num_without


def _absent(case: Case, step: int, rank: int) -> Received:
    return without_victim(case, step % TOUR, sent=False)[rank]


@pytest.mark.parametrize("late_s", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=lambda way: way_name(*way))
def test_a_rank_that_is_killed_anywhere(way: tuple, late_s: float) -> None:
    case = replace(BASE, name=f"killed-{way_name(*way)}", hidden_size=512, layout=way[0], combine_mode=way[1])
    with crew(_die_somewhere, 4, case, late_s) as ranks:
        num_without = [ranks[rank].result() for rank in OTHERS]
    assert min(num_without) > 0
    assert max(num_without) - min(num_without) <= 1, "they learn of a loss at most one operation apart"


def test_ranks_that_come_within_the_time_out_are_waited_for() -> None:
    case = replace(BASE, name="patient", layout=RANK_MAJOR)
    results = run_virtual(_be_late_in_turn, share(4), case)
    for step in range(8):
        got = [received[step] for received in results]
        assert_received(got, expected(case.config, case.inputs(step % TOUR)), f"step {step}")


def _be_late_in_turn(group: ew.Group, place: Place, case: Case) -> list[Received]:
    """Be late by less than the time-out, one rank after another, so that the others wait longer than that in all."""
    received = []
    with communicator(group, case, place, timeout_s=TIMEOUT_S, on_peer_loss="mask") as comm:
        for step in range(8):
            if step % 4 == comm.rank:
                time.sleep(0.6 * TIMEOUT_S)
            received.append(exchange(comm, case.inputs(step % TOUR)[comm.rank]))
        assert comm.lost_ranks() == ()
    return received
