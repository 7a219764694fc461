"""The push protocol of the CUDA backend under every interleaving, and proof that each way of getting it wrong shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol_model import GiveUp
from push_model import PushProtocol
from push_scenario import Break, Scenario
from state_explorer import Outcome, explore

LONGEST_TRACE = 60
MOST_STATES = 200_000


def check(scenario: Scenario) -> Outcome:
    return explore(PushProtocol(scenario), MOST_STATES)


def assert_holds(scenario: Scenario) -> None:
    outcome = check(scenario)
    assert not outcome.fault, "\n".join([outcome.fault, *outcome.trace])
    assert outcome.num_finals > 0


def one_way(num_operations: int) -> frozenset[tuple[int, int, int]]:
    return frozenset((index, 0, 1) for index in range(num_operations))


@pytest.mark.parametrize("program", ["D0 D0 D0", "D0 C0 D0 C0", "C0 C0 C0", "D0 D1 C0 C1", "D0 W0 D0 W0"])
def test_nobody_is_late(program: str) -> None:
    num_operations = len(program.split())
    assert_holds(Scenario(2, program))
    assert_holds(Scenario(2, program, sends=one_way(num_operations)))
    assert_holds(Scenario(2, program, sends=frozenset()))


def test_three_ranks() -> None:
    assert_holds(Scenario(3, "C0 C0 C0", num_blocks=1, in_turn=True))
    assert_holds(Scenario(3, "D0 D0", num_blocks=1, in_turn=True))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("program", ["D0 D0 D0", "D0 C0 D0", "D0 D1 C0"])
def test_two_ranks_of_which_any_dies(program: str, mask: bool) -> None:
    assert_holds(Scenario(2, program, mask, GiveUp.GONE, max_deaths=1))


@pytest.mark.parametrize("program", ["D0 D0", "D0 C0"])
def test_two_ranks_of_which_any_is_late_or_dies(program: str) -> None:
    assert_holds(Scenario(2, program, True, GiveUp.ANY_TIME, max_deaths=1))


@pytest.mark.parametrize("program", ["D0 C0", "D0 D0", "C0 C0", "W0 W0", "D0 D0 D0"])
def test_two_ranks_of_which_any_is_late_and_the_other_ends(program: str) -> None:
    assert_holds(Scenario(2, program, give_up=GiveUp.ANY_TIME))


@pytest.mark.parametrize("program", ["D0 D0", "C0 C0 C0", "W0 W0"])
def test_three_ranks_of_which_one_is_late_and_others_end(program: str) -> None:
    late = frozenset({1})
    assert_holds(Scenario(3, program, give_up=GiveUp.ANY_TIME, late=late, num_blocks=1, in_turn=True))


@pytest.mark.parametrize("program", ["D0", "C0 C0"])
def test_three_ranks_of_which_any_dies(program: str) -> None:
    assert_holds(Scenario(3, program, True, GiveUp.GONE, max_deaths=1, num_blocks=1, in_turn=True))


LATE = Scenario(2, "D0 D0", True, GiveUp.ANY_TIME)
ONE_OF_THREE = Scenario(3, "C0 C0", True, GiveUp.ANY_TIME, late=frozenset({1}), num_blocks=1, in_turn=True)
CUT = replace(ONE_OF_THREE, late=frozenset(), cut=frozenset({(0, 1), (1, 0)}))
LATE_ROWS = replace(ONE_OF_THREE, program="C0 C0 C0", sends=frozenset({(0, 1, 0), (0, 1, 2), (2, 2, 0), (2, 2, 1)}))


def test_one_of_three_ranks_is_late() -> None:
    assert_holds(replace(ONE_OF_THREE, program="D0"))


ONE_BLOCK = Scenario(2, "C0 C0 C0", num_blocks=1)
TWO = Scenario(2, "D0 D0 D0")
MISTAKES = [
    (Break.SINGLE_BUFFER, TWO, "wrong row"),
    (Break.CONSTANT_PACKET, replace(ONE_BLOCK, program="C0 C0 C0 C0", sends=one_way(4)), "wrong row"),
    (Break.CAPTURED_EPOCH, TWO, "wrong row"),
    (Break.UNPERFORMED_CLEARING, TWO, "waits for ever"),
    (Break.SKIP_SILENT, replace(ONE_BLOCK, sends=one_way(3)), "wrong row"),
    (Break.NO_CLEARING, TWO, "wrong row"),
    (Break.NO_DEPENDENCY_WAIT, TWO, "waits for ever"),
    (Break.NO_SETTLING, LATE, "blocks of rank 0 disagree"),
    (Break.UNDATED_WORD, LATE, "blocks of rank 0 disagree"),
    (Break.NO_BEATS, ONE_OF_THREE, "a rank that was never late is lost"),
    (Break.NO_VERDICT, LATE, "two ranks go on without each other"),
    (Break.SILENT_PACKETS, CUT, "has not heard of a loss"),
    (Break.TRUST_LOST, replace(LATE, program="C0 C0 C0", num_blocks=1), "wrong row"),
    (Break.SHARED_SLOTS, LATE_ROWS, "wrong row"),
    (Break.ENDED_SENDS, Scenario(2, "D0 C0", give_up=GiveUp.ANY_TIME), "wrong row"),
    (Break.SUMS_WITHOUT_WEIGHTS, Scenario(2, "D0 W0", give_up=GiveUp.ANY_TIME), "wrong row"),
]


@pytest.mark.parametrize(("change", "scenario", "fault"), MISTAKES, ids=[row[0].name for row in MISTAKES])
def test_the_checker_notices(change: Break, scenario: Scenario, fault: str) -> None:
    assert_holds(scenario)
    outcome = check(replace(scenario, change=change))
    assert fault in outcome.fault
    assert 0 < len(outcome.trace) <= LONGEST_TRACE


def test_every_mistake_is_tried() -> None:
    assert {row[0] for row in MISTAKES} == set(Break) - {Break.NONE}
