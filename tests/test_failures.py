"""Ranks that die, stop, are slow or leave, as processes: who is told what and when, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import DIRECT, EXPERT_MAJOR, REDUCE, Case
from crew import AT_ONCE_S, Me, assert_not_the_childs, crew, in_a_forked_child, maps_segments, named_shared_memory
from driving import Received, assert_received, copy_output, dispatch, exchange, expected
from expertwire.reference import BF16
from losses import (
    BASE,
    BOTH_WAYS,
    GRACE_S,
    LONG_S,
    OTHERS,
    SHORT_S,
    VICTIM,
    WAYS,
    Loop,
    Lost,
    assert_told,
    communicator,
    die_at,
)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not named_shared_memory()


# A rank is killed


def _lose_one(me: Me, case: Case, moment: str) -> tuple[Lost, Received]:
    """Be a rank that loses another, and then go on without it in the same process; or be the one that is killed."""
    comm = communicator(me.group, case, timeout_s=LONG_S)
    loop = Loop(comm, case)
    loop.exchange()
    if me.group.rank == VICTIM:
        die_at(moment, loop)
    keeps_waiting = moment.startswith("inside") and me.group.rank == VICTIM + 1
    lost = loop.until_lost(late_by_s=0.4, late_for=moment.rsplit(maxsplit=1)[-1] if keeps_waiting else "")
    assert not comm.is_available
    assert comm.lost_ranks() == lost.ranks
    with pytest.raises(ew.PeerLostError):
        loop.dispatch()
    assert time.monotonic() - loop.called_at < AT_ONCE_S
    comm.close()
    del comm, loop
    gc.collect()
    assert not maps_segments()
    fewer = replace(case, tokens=tuple(case.tokens[rank] for rank in OTHERS), experts_per_rank=(3, 2, 3))
    with communicator(me.group_without(VICTIM), fewer) as again:
        return lost, exchange(again, fewer.inputs()[again.rank])


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before dispatch", "inside dispatch", "between", "inside combine"])
def test_a_killed_rank_is_named_at_once_and_the_others_can_start_again(moment: str, case: Case) -> None:
    with crew(_lose_one, 4, case, moment) as ranks:
        results = [ranks[rank].result() for rank in OTHERS]
        assert ranks[VICTIM].exit_code() == -signal.SIGKILL
    after = {"before dispatch": "dispatch", "inside dispatch": "combine", "between": "combine"}
    # A rank that has posted its combine rows has done its part of that operation.
    operation = after.get(moment, "dispatch" if case.combine_mode is DIRECT else "combine")
    for lost, _ in results:
        assert_told(lost, (VICTIM,), AT_ONCE_S)
        assert lost.operation == operation
    fewer = replace(case, tokens=tuple(case.tokens[rank] for rank in OTHERS), experts_per_rank=(3, 2, 3))
    assert_received([received for _, received in results], expected(fewer.config, fewer.inputs()), "after the loss")


def _until_killed(me: Me, case: Case) -> tuple[Lost, int, int]:
    with communicator(me.group, case, timeout_s=LONG_S) as comm:
        loop = Loop(comm, case)
        loop.exchange()
        me.line.send("running")
        return loop.until_lost(), loop.num_dispatches, loop.num_combines


@pytest.mark.parametrize("seed", range(6))
def test_an_operation_completes_on_all_survivors_or_on_none(seed: int) -> None:
    case = replace(WAYS[seed % 2], hidden_size=512)
    with crew(_until_killed, 4, case) as ranks:
        for rank in ranks:
            rank.result()
        time.sleep(np.random.default_rng(seed).uniform(0, 0.1))
        ranks[VICTIM].signal(signal.SIGKILL)
        results = [ranks[rank].result() for rank in OTHERS]
    for lost, num_dispatches, num_combines in results:
        assert_told(lost, (VICTIM,), AT_ONCE_S)
        assert (num_dispatches, num_combines) == results[0][1:]


# A rank is merely slow


def _stop_once(me: Me, case: Case, fields: dict[str, Any]) -> Lost:
    with communicator(me.group, case, timeout_s=SHORT_S, **fields) as comm:
        loop = Loop(comm, case)
        loop.exchange()
        if comm.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGSTOP)
        return loop.until_lost()


@BOTH_WAYS
def test_a_slow_rank_is_given_up_after_the_timeout_and_learns_of_it(case: Case) -> None:
    with crew(_stop_once, 4, case, {}) as ranks:
        for rank in OTHERS:
            lost = ranks[rank].result()
            assert_told(lost, (VICTIM,), SHORT_S + GRACE_S)
        ranks[VICTIM].signal(signal.SIGCONT)
        assert_told(ranks[VICTIM].result(), (VICTIM,), AT_ONCE_S)


# What a lost operation leaves


def _lose_dispatch(me: Me, case: Case) -> tuple[ew.DispatchOutput, int] | None:
    """Return the output that a dispatch which lost a rank left in the lane, over the one that was there before."""
    with communicator(me.group, case, timeout_s=SHORT_S) as comm:
        loop = Loop(comm, case)
        loop.exchange()
        out, _ = loop.dispatch()
        if comm.rank == VICTIM:
            me.line.recv()
            return None
        with pytest.raises(ew.PeerLostError):
            loop.dispatch()
        return copy_output(out), comm.stats().timeouts


@BOTH_WAYS
def test_a_lost_dispatch_leaves_no_rows(case: Case) -> None:
    for out, _ in _results_of_others(_lose_dispatch, case):
        counts = out.layout.num_tokens_per_expert if case.layout is EXPERT_MAJOR else out.layout.num_tokens_per_rank
        assert not counts.any()
        assert out.layout.rank_ranges is None or not out.layout.rank_ranges.any()
        assert out.topk_ids is None or (out.topk_ids == case.invalid_id).all()
        assert out.weights is None or not out.weights.any()


def _lose_combine(me: Me, case: Case) -> tuple[np.ndarray, int] | None:
    """Return what a combine that lost a rank left in ``out``."""
    with communicator(me.group, case, timeout_s=SHORT_S) as comm:
        loop = Loop(comm, case)
        loop.exchange()
        given = loop.given()
        out, handle = loop.dispatch()
        if comm.rank == VICTIM:
            me.line.recv()
            return None
        y = np.zeros((len(given.x), case.hidden_size), BF16)
        with pytest.raises(ew.PeerLostError):
            comm.combine(np.zeros(out.combine_input_buffer.shape, BF16), handle, out=y)
        return y.astype(np.float32), comm.stats().timeouts


@BOTH_WAYS
def test_a_lost_combine_leaves_nan(case: Case) -> None:
    for combined, _ in _results_of_others(_lose_combine, case):
        assert combined.size
        assert np.isnan(combined).all()


def _results_of_others(fn: Callable[..., Any], case: Case) -> list[Any]:
    """Run a loss by time-out, which whoever reached it first counts; return what the survivors say."""
    with crew(fn, 4, case) as ranks:
        results = [ranks[rank].result() for rank in OTHERS]
        ranks[VICTIM].line.send("go")
        assert ranks[VICTIM].exit_code() == 0
    assert sum(timeouts for _, timeouts in results) >= 1
    return results


# A rank leaves


def _leave(me: Me, case: Case, how: str) -> Lost | None:
    comm = communicator(me.group, case, timeout_s=LONG_S)
    loop = Loop(comm, case)
    loop.exchange()
    if comm.rank != VICTIM:
        return loop.until_lost()
    if how == "closes":
        comm.close()
        comm.close()
        me.line.recv()  # stays, so that only the mark tells
    elif how == "fails":
        raise SystemExit(3)
    elif how == "vanishes":
        os._exit(0)
    return None


@pytest.mark.parametrize(("how", "code"), [("closes", 0), ("returns", 0), ("fails", 3), ("vanishes", 0)])
def test_a_rank_that_leaves_is_noticed_at_once(how: str, code: int) -> None:
    with crew(_leave, 4, BASE, how) as ranks:
        for rank in OTHERS:
            lost = ranks[rank].result()
            assert_told(lost, (VICTIM,), AT_ONCE_S)
            assert lost.operation == "dispatch"
            assert ("closed" if how == "closes" else "") in lost.text
        if how == "closes":
            ranks[VICTIM].line.send("go")
        assert ranks[VICTIM].exit_code() == code


def _finish_at_different_times(me: Me, case: Case) -> Received:
    """Close as soon as the own part is done, which for some is before others have read it."""
    comm = communicator(me.group, case, timeout_s=LONG_S)
    loop = Loop(comm, case)
    loop.exchange()
    out, handle = loop.dispatch()
    copied = copy_output(out)
    if comm.rank == VICTIM:
        time.sleep(0.2)
    received = Received(copied, loop.combine(out, handle))
    comm.close()
    return received


@BOTH_WAYS
def test_what_was_posted_before_closing_is_still_read(case: Case) -> None:
    with crew(_finish_at_different_times, 4, case) as ranks:
        results = [rank.result() for rank in ranks]
    assert_received(results, expected(case.config, case.inputs(1)), "last step")


def _fork_a_child(me: Me, case: Case, how: str) -> list[Received]:
    """Have a child process inherit the communicator, use it and drop it: that is no business of the ranks."""
    comm = communicator(me.group, case, timeout_s=LONG_S)
    loop = Loop(comm, case)
    results = [loop.exchange()]
    if comm.rank == VICTIM:

        def be_a_child() -> None:
            nonlocal comm, loop
            if how == "calls":
                assert_not_the_childs(comm, loop.exchange)
            if how != "drops":
                comm.close()
            del comm, loop
            gc.collect()

        in_a_forked_child(be_a_child)
    results += [loop.exchange() for _ in range(2)]
    comm.close()
    return results


@pytest.mark.parametrize("how", ["calls", "closes", "drops"])
def test_a_forked_child_does_not_end_its_parents_communicator(how: str) -> None:
    with crew(_fork_a_child, 3, replace(BASE, tokens=BASE.tokens[:3], num_experts=9), how) as ranks:
        results = [rank.result() for rank in ranks]
    case = replace(BASE, tokens=BASE.tokens[:3], num_experts=9)
    for step in range(3):
        assert_received([received[step] for received in results], expected(case.config, case.inputs(step)), f"{step}")


def test_any_order_of_collection_is_fine() -> None:
    for order in itertools.permutations(("group", "comm", "out", "handle")):
        alive: dict[str, Any] = {"group": ew.local_group(1)[0]}
        case = Case("collected", (3,), num_experts=2, hidden_size=16, num_topk=2)
        alive["comm"] = communicator(alive["group"], case)
        alive["out"], alive["handle"] = dispatch(alive["comm"], case.inputs()[0])
        for name in order:
            del alive[name]
            if "out" in alive:
                assert alive["out"].tokens.sum() is not None  # readable as long as it is held


# Ranks that were constructed differently


DIFFERENCES: dict[str, Any] = {
    "num_experts": 16,
    "hidden_size": 128,
    "num_topk": 2,
    "max_tokens_per_rank": 9,
    "output_layout": "rank_major",
    "combine_mode": "direct_send",
    "experts_per_rank": (1, 3, 2, 2),
    "max_in_flight": 2,
    "timeout_s": 5.0,
    "on_peer_loss": "mask",
}


def _disagree(me: Me, case: Case) -> dict[str, str]:
    told = {}
    for name, value in DIFFERENCES.items():
        with pytest.raises(ew.InvalidArgumentError) as caught:
            communicator(me.group, case, **({name: value} if me.group.rank == VICTIM else {}))
        told[name] = str(caught.value)
    with communicator(me.group, case) as comm:
        exchange(comm, case.inputs()[comm.rank])
    return told


def test_ranks_with_different_configurations_are_all_told_which_field() -> None:
    assert BASE.combine_mode is REDUCE
    with crew(_disagree, 4, BASE) as ranks:
        for rank in ranks:
            told = rank.result()
            assert all(name in text for name, text in told.items())
