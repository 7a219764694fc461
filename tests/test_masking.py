"""``on_peer_loss="mask"``, with processes: the others go on, agree on who took part, and never return torn rows."""

from __future__ import annotations

import itertools
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

import expertwire as ew
from cases import RANK_MAJOR, Case
from crew import Me, crew
from driving import Received, assert_received, expected
from expertwire.reference import BF16
from losses import BOTH_WAYS, GRACE_S, LONG_S, OTHERS, SHORT_S, TOUR, VICTIM, WAYS, Loop, communicator, die_at


def without_victim(case: Case, step: int, sent: bool) -> list[Received]:
    """Return what the reference says without the victim's answers, and, unless ``sent``, without its tokens."""
    inputs = case.inputs(step)
    own = case.config.num_experts // case.num_ranks
    masked = []
    for rank, given in enumerate(inputs):
        kept = slice(None) if sent or rank != VICTIM else slice(0)
        ids = np.where(given.topk_ids // own == VICTIM, -1, given.topk_ids)
        weights = None if given.weights is None else given.weights[kept]
        masked.append(replace(given, x=given.x[kept], topk_ids=ids[kept], weights=weights))
    return expected(case.config, masked)


def _go_on(me: Me, case: Case, moment: str) -> list[Received]:
    comm = communicator(me.group, case, timeout_s=LONG_S, on_peer_loss="mask")
    loop = Loop(comm, case)
    loop.exchange()
    if me.group.rank == VICTIM:
        die_at(moment, loop)
    results = [loop.exchange() for _ in range(6)]
    assert comm.lost_ranks() == (VICTIM,)
    assert comm.is_available
    comm.close()
    return results


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before dispatch", "between"])
def test_mask_goes_on_with_the_right_results(moment: str, case: Case) -> None:
    with crew(_go_on, 4, case, moment) as ranks:
        results = [ranks[rank].result() for rank in OTHERS]
    for index in range(6):
        sent = moment == "between" and index == 0
        wanted = without_victim(case, (index + 1) % TOUR, sent)
        got = [received[index] for received in results]
        assert_received(got, [wanted[rank] for rank in OTHERS], f"step {index}")


FULL, NO_ANSWER, ABSENT = "full", "no answer", "absent"


def _masked_until(me: Me, case: Case, num_after: int) -> list[str]:
    """Exchange until so many steps have gone by without the victim; say of each step how far the victim took part."""
    rank = me.group.rank
    options = [
        {
            FULL: expected(case.config, case.inputs(step))[rank],
            NO_ANSWER: without_victim(case, step, sent=True)[rank],
            ABSENT: without_victim(case, step, sent=False)[rank],
        }
        for step in range(TOUR)
    ]
    seen: list[str] = []
    with communicator(me.group, case, timeout_s=LONG_S, on_peer_loss="mask") as comm:
        loop = Loop(comm, case)
        loop.exchange()
        me.line.send("running")
        while seen.count(ABSENT) < num_after:
            option = options[loop.num_combines % TOUR]
            seen.append(_which(loop.exchange(), option, f"step {len(seen)} after {seen[-1:]}"))
    return seen


def _which(got: Received, options: dict[str, Received], what: str) -> str:
    misses = {name: _difference(got, wanted) for name, wanted in options.items()}
    matches = [name for name, miss in misses.items() if not miss]
    assert matches, f"{what}: {misses}"
    return matches[0]


def _difference(got: Received, wanted: Received) -> str:
    try:
        assert_received([got], [wanted])
    except AssertionError as error:
        return str(error)
    return ""


def assert_agreed(of_survivors: list[list[str]]) -> None:
    assert all(seen == of_survivors[0] for seen in of_survivors), "survivors disagree who took part"
    order = [FULL, NO_ANSWER, ABSENT]
    steps = [order.index(name) for name in of_survivors[0]]
    assert steps == sorted(steps), "a lost rank came back"
    assert of_survivors[0].count(NO_ANSWER) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_mask_survivors_agree_on_who_took_part(seed: int) -> None:
    case = replace(WAYS[seed % 2], hidden_size=512)
    with crew(_masked_until, 4, case, 5) as ranks:
        for rank in ranks:
            rank.result()
        time.sleep(np.random.default_rng(seed).uniform(0, 0.1))
        ranks[VICTIM].signal(signal.SIGKILL)
        assert_agreed([ranks[rank].result() for rank in OTHERS])


def _dispatch_until_lost(me: Me, case: Case, num_after: int) -> tuple[int, ...]:
    """Dispatch rows that tell their source and step, one call right after the other, and look at every row received."""
    rank, size = me.group.rank, me.group.size
    ids = np.tile(np.arange(size), (case.max_tokens, 1))
    num_without = 0
    with communicator(me.group, case, timeout_s=SHORT_S, on_peer_loss="mask") as comm:
        me.line.send("running")
        for step in itertools.count():
            x = np.full((case.max_tokens, case.hidden_size), _mark(rank, step), np.uint16).view(BF16)
            start = time.monotonic()
            try:
                out, _ = comm.dispatch(x, ids)
            except ew.PeerLostError as error:
                return error.ranks
            assert rank == VICTIM or time.monotonic() - start <= SHORT_S + GRACE_S
            rows = out.tokens.view(np.uint16).reshape(size, case.max_tokens, case.hidden_size)
            for source, count in enumerate(np.asarray(out.layout.num_tokens_per_rank).tolist()):
                assert count == (0 if source in comm.lost_ranks() else case.max_tokens)
                assert (rows[source, :count] == _mark(source, step)).all(), f"torn rows of rank {source}, step {step}"
            num_without += bool(comm.lost_ranks())
            if num_without == num_after:
                return comm.lost_ranks()
    raise AssertionError


def _mark(source: int, step: int) -> int:
    return 1 + source + 4 * (step % 4000)


@pytest.mark.parametrize("seed", range(6))
def test_mask_a_rank_stopped_anywhere_returns_no_torn_rows(seed: int) -> None:
    case = Case("stopped", (64,) * 4, num_experts=4, hidden_size=4096, num_topk=4, max_tokens=64, layout=RANK_MAJOR)
    with crew(_dispatch_until_lost, 4, case, 5) as ranks:
        for rank in ranks:
            rank.result()
        time.sleep(np.random.default_rng(seed).uniform(0.05, 0.1))
        ranks[VICTIM].signal(signal.SIGSTOP)
        for other in OTHERS:
            assert ranks[other].result() == (VICTIM,)
        ranks[VICTIM].signal(signal.SIGCONT)
        assert ranks[VICTIM].result() == (VICTIM,)
