"""Mistakes that only the device can see, told at the next call: wrong expert ids, replays whose handle is stale."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import Case, way_name
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
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts, run_threads
from driving import exchange as exchange_on_cpu
from expertwire.reference import RankInput

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("faults", (5, 3, 7), 6, 64, 3, weights="router")
WRONG = 2  # the rank whose ids are wrong
FAR = 1 << 40


def _with_wrong_ids(case: Case) -> list[RankInput]:
    """Return inputs in which one rank names an expert twice, and later one that does not exist."""
    inputs = case.inputs()
    ids = inputs[WRONG].topk_ids
    ids[2, 2] = ids[2, 0]
    ids[4, 1] = 6 if case.ids_dtype == "int32" else FAR
    return inputs


def _told(comm: ew.MoECommunicator) -> str:
    torch.cuda.current_stream().synchronize()
    try:
        comm.check()
    except ew.InvalidArgumentError as error:
        return str(error)
    return ""


def _validate(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier) -> list[Any]:
    """Exchange with wrong ids, asking in between; go on, and be told by a call that then is made again."""
    inputs = _with_wrong_ids(case)
    with communicator(group, case, place, validate=True) as comm:
        out, handle = dispatch(comm, inputs[comm.rank])
        told = _told(comm)
        assert _told(comm) == ""
        received = copy_output(out, to_host)
        answer = to_device(expert_output(case.config, received, local_experts(comm)), place.device)
        results: list[Any] = [Received(received, to_host(comm.combine(answer, handle))), told]
        inputs[WRONG].topk_ids[2, 2] = -1
        dispatch(comm, inputs[comm.rank])
        torch.cuda.current_stream().synchronize()
        barrier.wait()
        refusal = ""
        try:
            dispatch(comm, inputs[comm.rank])
        except ew.InvalidArgumentError as error:
            refusal = str(error)
            dispatch(comm, inputs[comm.rank])
        torch.cuda.current_stream().synchronize()
        results.append(refusal)
        results.append(_told(comm))
        assert comm.is_available
        return results


@EVERY_WAY
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_wrong_ids_are_dropped_and_told(way: tuple, dtype: str) -> None:
    case = replace(CASE, name=f"validate-{way_name(*way)}-{dtype}", layout=way[0], combine_mode=way[1], ids_dtype=dtype)
    inputs = _with_wrong_ids(case)
    of_ranks = run_virtual(_validate, share(3), case, threading.Barrier(3, timeout=60))
    assert_received([results[0] for results in of_ranks], expected(case.config, inputs), "with wrong ids")
    for rank, results in enumerate(of_ranks):
        if rank != WRONG:
            assert results[1:] == ["", "", ""]
    repeated, beyond = inputs[WRONG].topk_ids[2, 2], inputs[WRONG].topk_ids[4, 1]
    where = f"on lane 0 of rank {WRONG}: "
    assert of_ranks[WRONG][1].startswith(
        f"topk_ids[2, 2] = {repeated} in dispatch 1 {where}the token names this expert"
    )
    assert of_ranks[WRONG][2].startswith(
        f"topk_ids[4, 1] = {beyond} in dispatch 2 {where}must be below num_experts = 6"
    )
    assert of_ranks[WRONG][3].startswith(f"topk_ids[4, 1] = {beyond} in dispatch 3 ")


def _do_not_validate(group: ew.Group, place: Place, case: Case) -> tuple[Received, str]:
    with communicator(group, case, place, validate=False) as comm:
        return exchange(comm, _with_wrong_ids(case)[comm.rank]), _told(comm)


@EVERY_WAY
def test_without_validate_wrong_ids_are_dropped_in_silence(way: tuple) -> None:
    case = replace(CASE, name=f"drop-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    of_ranks = run_virtual(_do_not_validate, share(3), case)
    assert_received([received for received, _ in of_ranks], expected(case.config, _with_wrong_ids(case)))
    assert [told for _, told in of_ranks] == ["", "", ""]


def _replay_too_late(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock, late: Sequence[int]
) -> tuple[str, np.ndarray, list[Received]]:
    """Capture the combine of a dispatch of M tokens, dispatch others, and replay the graph on the ``late`` ranks."""
    most = (case.config.max_tokens_per_rank,) * 3
    with communicator(group, case, place) as comm:
        given, other = case.inputs(0, most)[comm.rank], case.inputs(1)[comm.rank]
        out, handle = dispatch(comm, given)
        combined = torch.empty((most[0], case.hidden_size), dtype=torch.bfloat16, device=place.device)
        graph = capture(lambda: comm.combine(out.combine_input_buffer, handle, out=combined), barrier, lock)
        graph.replay()
        out, handle = dispatch(comm, other)
        received = copy_output(out, to_host)
        answer = to_device(expert_output(case.config, received, local_experts(comm)), place.device)
        if comm.rank in late:
            graph.replay()
            result = to_host(combined)
        else:
            result = to_host(comm.combine(answer, handle))
        told = ""
        try:
            comm.check()
        except ew.HandleError as error:
            told = str(error)
        after = [exchange(comm, case.inputs(step)[comm.rank]) for step in range(3)]
        return told, result, after


@EVERY_WAY
@pytest.mark.parametrize("late", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_a_replay_with_a_stale_handle_is_told_and_does_no_harm(way: tuple, late: tuple[int, ...]) -> None:
    case = replace(CASE, name=f"stale-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    barrier, lock = threading.Barrier(3, timeout=60), threading.Lock()
    of_ranks = run_virtual(_replay_too_late, share(3), case, barrier, lock, late)
    for rank, (told, result, _) in enumerate(of_ranks):
        assert told.startswith("handle is stale: combine 2 on lane 0") == (rank in late)
        assert np.isnan(result.astype(np.float32)).all() == (rank in late)
    for step in range(3):
        got = [after[step] for _, _, after in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step} after")


def _count(group: ew.Group, place: Place | None, case: Case) -> tuple[int, int, tuple[int, ...]]:
    with ew.MoECommunicator(group, case.config) if place is None else communicator(group, case, place) as comm:
        for step in range(5):
            given = case.inputs(step)[comm.rank]
            exchange_on_cpu(comm, given) if place is None else exchange(comm, given)
        stats = comm.stats()
        return stats.bytes_sent, stats.bytes_received, stats.expert_tokens


@EVERY_WAY
def test_stats_count_what_the_cpu_counts(way: tuple) -> None:
    case = Case(f"stats-{way_name(*way)}", (5, 0, 7), 6, 64, 3, layout=way[0], combine_mode=way[1], ids="half")
    on_cpu = run_threads(_count, 3, None, case)
    assert run_virtual(_count, share(3), case) == on_cpu


LATE, LATE_BY_S = 1, 0.2


def _come_late(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier) -> tuple[float, ...]:
    with communicator(group, case, place) as comm:
        given = case.inputs()[comm.rank]
        exchange(comm, given)
        (counters,) = comm.get_source_wait_counters()
        before = counters.clone()
        barrier.wait()
        if comm.rank == LATE:
            time.sleep(LATE_BY_S)
        exchange(comm, given)
        assert comm.stats().source_wait_seconds == tuple(ns * 1e-9 for ns in counters.tolist())
        return tuple(ns * 1e-9 for ns in (counters - before).tolist())


@EVERY_WAY
def test_the_rank_that_all_wait_for_is_seen_by_all(way: tuple) -> None:
    case = Case(f"late-{way_name(*way)}", (5, 4, 7), 6, 64, 3, layout=way[0], combine_mode=way[1])
    of_ranks = run_virtual(_come_late, share(3), case, threading.Barrier(3, timeout=60))
    for rank, waited in enumerate(of_ranks):
        assert waited[rank] == 0.0
        for other in range(3):
            assert (waited[other] > 0.5 * LATE_BY_S) == (other == LATE != rank), of_ranks


WITH_A_WRONG_ID = """
import torch, expertwire as ew
torch.cuda.set_device(0)
config = ew.MoECommunicatorConfig(num_experts=2, hidden_size=64, num_topk=1, max_tokens_per_rank=2, device="cuda:0")
with ew.MoECommunicator(ew.local_group(1)[0], config) as comm:
    comm.dispatch(torch.ones(2, 64, device="cuda").bfloat16(), torch.tensor([[1], [2]], device="cuda"))
    torch.cuda.synchronize()
    try:
        comm.check()
        print("not told")
    except ew.InvalidArgumentError as error:
        print(error)
"""


@pytest.mark.parametrize(("value", "told"), [("0", "not told"), ("1", "topk_ids[1, 0] = 2 in dispatch 1")])
def test_the_environment_asks_for_validation(value: str, told: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("list_kernels", None) is not None:
        pytest.skip("compiles its kernels as it runs")
    command, environment = [sys.executable, "-c", WITH_A_WRONG_ID], os.environ | {"EXPERTWIRE_VALIDATE": value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.startswith(told), done.stdout + done.stderr
