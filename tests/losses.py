"""What tests of lost ranks share: a loop of checked exchanges, how a rank dies in it, and what the others are told."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import DIRECT, RANK_MAJOR, Case
from crew import die
from driving import Received, assert_received, copy_output, dispatch, expected, expert_output, local_experts
from expertwire.reference import RankInput

VICTIM = 2
OTHERS = (0, 1, 3)
LONG_S = 60.0  # a time-out that no test reaches
SHORT_S = 1.0
#: A rank that gives another up returns at most this much after its time-out, by its own clock.
GRACE_S = 1.0
TOUR = 4  # steps of a loop whose inputs differ

BASE = Case("failures", (5, 7, 6, 4), num_experts=8, hidden_size=64, num_topk=3, max_tokens=7)
WAYS = [BASE, replace(BASE, layout=RANK_MAJOR, combine_mode=DIRECT)]
BOTH_WAYS = pytest.mark.parametrize("case", WAYS, ids=["expert-reduce", "rank-direct"])


@dataclass(frozen=True)
class Lost:
    """What a rank was told by PeerLostError."""

    ranks: tuple[int, ...]
    operation: str
    text: str
    seconds: float  # from the call that raised to the error


class Loop:
    """One rank's exchanges, one after another, until a peer is lost."""

    def __init__(self, comm: ew.MoECommunicator, case: Case) -> None:
        self.comm = comm
        self.case = case
        self.num_dispatches = self.num_combines = 0
        self.called_at = 0.0

    def given(self) -> RankInput:
        return self.case.inputs(self.num_combines % TOUR)[self.comm.rank]

    def dispatch(self) -> tuple[ew.DispatchOutput, Any]:
        self.called_at = time.monotonic()
        received = dispatch(self.comm, self.given())
        self.num_dispatches += 1
        return received

    def combine(self, out: ew.DispatchOutput, handle: Any) -> np.ndarray:
        answer = expert_output(self.comm.config, out, local_experts(self.comm))
        self.called_at = time.monotonic()
        combined: np.ndarray = self.comm.combine(answer, handle)
        self.num_combines += 1
        return combined

    def exchange(self) -> Received:
        out, handle = self.dispatch()
        copied = copy_output(out)
        return Received(copied, self.combine(out, handle))

    def until_lost(self, late_by_s: float = 0.0, late_for: str = "") -> Lost:
        """Exchange, and hold every result against the reference, until PeerLostError. May be late for one operation."""
        wanted = [expected(self.comm.config, self.case.inputs(step))[self.comm.rank] for step in range(TOUR)]
        try:
            if late_for == "combine":
                received = self.dispatch()
                time.sleep(late_by_s)
                self.combine(*received)
            elif late_for == "dispatch":
                time.sleep(late_by_s)
            while True:
                step = self.num_combines
                assert_received([self.exchange()], [wanted[step % TOUR]], f"step {step}")
        except ew.PeerLostError as error:
            return Lost(error.ranks, error.operation, str(error), time.monotonic() - self.called_at)


def communicator(group: ew.Group, case: Case, **fields: Any) -> ew.MoECommunicator:
    return ew.MoECommunicator(group, case.config, **fields)


def assert_told(lost: Lost, ranks: tuple[int, ...], within_s: float) -> None:
    assert lost.ranks == ranks
    assert all(str(rank) in lost.text for rank in ranks)
    assert lost.seconds < within_s


def die_at(moment: str, loop: Loop) -> None:
    if moment == "before dispatch":
        die()
    if moment == "inside dispatch":
        threading.Timer(0.2, die).start()
    received = loop.dispatch()
    if moment == "inside dispatch":  # the dispatch has ended too soon to be killed in
        time.sleep(LONG_S)
    if moment == "between":
        die()
    threading.Timer(0.2, die).start()
    loop.combine(*received)
    time.sleep(LONG_S)
