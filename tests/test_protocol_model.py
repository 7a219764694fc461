"""The wire protocol under every interleaving, and proof that the checker would notice each way of getting it wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol_model import Change, GiveUp, PullProtocol, Scenario
from sleep_model import SleepProtocol
from state_explorer import Outcome, explore

LONGEST_TRACE = 40  # a counterexample that nobody can read helps nobody


def check(scenario: Scenario) -> Outcome:
    return explore(PullProtocol(scenario))


def assert_holds(scenario: Scenario) -> None:
    outcome = check(scenario)
    assert not outcome.fault, "\n".join([outcome.fault, *outcome.trace])
    assert outcome.num_finals > 0


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("give_up", GiveUp)
@pytest.mark.parametrize(
    "program",
    ["D0 D0 D0 D0", "D0 C0 D0 C0 D0 C0", "D0 E0 C0 E0 C0 D0 E0 C0", "D0 D1 E0 C0 E1 C1 D0 D1", "D0 D1 D0 D1 D0 D1"],
)
def test_two_ranks(program: str, give_up: GiveUp, mask: bool) -> None:
    deaths = 0 if give_up is GiveUp.NEVER else 2
    assert_holds(Scenario(2, program, mask=mask, give_up=give_up, max_deaths=deaths))


PHASES = [
    "D0< D1< D0> D1> C0< C1< C0> C1>",
    "D0< D0> C0< D1< C0> D1> C1< D0< C1> D0>",
    "D0< D1< D1> D0> D0< D1< D0> D1> D0 D1",
]


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("give_up", GiveUp)
@pytest.mark.parametrize("program", PHASES)
def test_two_ranks_in_two_phases(program: str, give_up: GiveUp, mask: bool) -> None:
    deaths = 0 if give_up is GiveUp.NEVER else 1
    assert_holds(Scenario(2, program, mask=mask, give_up=give_up, max_deaths=deaths))


OUT_OF_ORDER = Scenario(
    3, "D0< D1< D0> D1>", ((1, "D0< D1< D1> D0>"),), mask=True, give_up=GiveUp.GONE, max_deaths=1, in_turn=True
)


def test_ranks_that_receive_in_different_orders_agree() -> None:
    assert_holds(OUT_OF_ORDER)
    assert_holds(replace(OUT_OF_ORDER, programs=((0, "D0< D0> D1< D1>"), (2, "D0< D1< D1> D0>"))))
    assert_holds(replace(OUT_OF_ORDER, mask=False))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("program", ["D0 E0 C0 E0 C0 D0 E0 C0", "D0 E0 C0< D1 C0> E0 C0< D1 C0> D0"])
def test_entries_that_are_not_waited_for(program: str, mask: bool) -> None:
    sent = [name for name in program.split() if name[-1] != ">"]
    links = [(index, rank, 1 - rank) for index, name in enumerate(sent) if name[0] == "E" for rank in (0, 1)]
    for unheard in (links, links[::3], links[1::2]):
        assert_holds(Scenario(2, program, mask=mask, max_deaths=1, unheard=frozenset(unheard)))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
def test_three_ranks_given_up_at_any_time(mask: bool) -> None:
    assert_holds(Scenario(3, "D0 D0", mask=mask))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("program", ["D0 D1 E0 C0", "D0 D0 D0"])
def test_three_ranks_of_which_one_dies(program: str, mask: bool) -> None:
    assert_holds(Scenario(3, program, mask=mask, give_up=GiveUp.GONE, max_deaths=1))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("program", ["D0 D0 D0", "D0 E0 C0"])
def test_three_ranks_in_turn_of_which_one_dies_and_others_are_late(program: str, mask: bool) -> None:
    assert_holds(Scenario(3, program, mask=mask, max_deaths=1, in_turn=True))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
def test_three_ranks_in_turn_of_which_two_die(mask: bool) -> None:
    assert_holds(Scenario(3, "D0 D0 D0 D0", mask=mask, give_up=GiveUp.GONE, max_deaths=2, in_turn=True))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
@pytest.mark.parametrize("num_completed", [0, 1, 2])
def test_a_rank_that_leaves_early_is_noticed_without_a_timeout(num_completed: int, mask: bool) -> None:
    assert_holds(Scenario(3, "D0 E0 C0", mask=mask, give_up=GiveUp.GONE, leaves_after=(1, num_completed)))


@pytest.mark.parametrize("mask", [False, True], ids=["raise", "mask"])
def test_ranks_with_nothing_to_send(mask: bool) -> None:
    silent = frozenset({(0, 1, 0), (1, 1, 0), (2, 1, 0), (1, 0, 2), (2, 2, 1), (0, 2, 0)})
    assert_holds(Scenario(3, "D0 D0 D0", mask=mask, give_up=GiveUp.GONE, max_deaths=1, silent=silent))
    assert_holds(Scenario(2, "D0 D0 D0 D0", mask=mask, silent=silent))


def test_epochs_start_again_after_an_even_number() -> None:
    assert_holds(Scenario(2, "D0 D0 D0 D0 D0 D0", num_epochs=4, max_deaths=1))
    assert_holds(Scenario(2, "D0 D0 D0 D0 D0 D0", mask=True, give_up=GiveUp.GONE, num_epochs=4, max_deaths=1))


def test_an_odd_number_of_epochs_uses_one_buffer_twice_in_a_row() -> None:
    outcome = check(Scenario(2, "D0 D0 D0 D0", give_up=GiveUp.NEVER, num_epochs=3))
    assert "wrong data" in outcome.fault


TWO = Scenario(2, "D0 D0 D0", give_up=GiveUp.NEVER)
TWO_LATE = Scenario(2, "D0 D0 D0", mask=True)
MISTAKES = [
    (Change.SINGLE_BUFFER, TWO, "wrong data"),
    (Change.POST_BEFORE_WRITE, TWO, "wrong data"),
    (Change.SKIP_SILENT, replace(TWO, silent=frozenset({(0, 1, 0), (1, 1, 0), (2, 1, 0)})), "wrong data"),
    (Change.CONSTANT_FLAG, TWO, "wrong data"),
    (Change.EXACT_WAIT, TWO, "waits for ever"),
    (Change.BLIND_LOST, TWO_LATE, "disagree"),
    (Change.BLIND_LOST, replace(TWO_LATE, mask=False), "on one live rank and not on another"),
    (Change.BLIND_POST, TWO_LATE, "disagree"),
    (Change.BLIND_POST, replace(TWO_LATE, mask=False), "on one live rank and not on another"),
    (Change.LOST_WITHOUT_EPOCH, Scenario(3, "D0 D0", mask=True, in_turn=True), "disagree"),
    (Change.NO_RECHECK, TWO_LATE, "wrong data"),
    (Change.RECHECK_UNDER_RAISE, replace(TWO_LATE, mask=False), "on one live rank and not on another"),
    (Change.IGNORE_AHEAD, TWO_LATE, "waits for ever"),
    (Change.SKIP_KNOWN_LOST, replace(TWO_LATE, program="D0 C0 D0 C0 D0"), "wrong data"),
    (
        Change.TRUST_KNOWN_LOST,
        Scenario(2, "D0 D0 D0 D0", mask=True, give_up=GiveUp.GONE, num_epochs=4, max_deaths=1),
        "wrong data",
    ),
    (Change.LOST_IS_ABSENT, OUT_OF_ORDER, "disagree"),
    (Change.SINGLE_BUFFER, replace(TWO, program="D0< D0> D0< D0> D0< D0>"), "wrong data"),
    (Change.NO_CLOSE, replace(TWO, give_up=GiveUp.GONE, leaves_after=(1, 1)), "waits for ever"),
]


@pytest.mark.parametrize(("change", "scenario", "fault"), MISTAKES, ids=[f"{row[0].name}-{row[2]}" for row in MISTAKES])
def test_the_checker_notices(change: Change, scenario: Scenario, fault: str) -> None:
    assert_holds(scenario)
    outcome = check(replace(scenario, change=change))
    assert fault in outcome.fault
    assert 0 < len(outcome.trace) <= LONGEST_TRACE


def test_every_mistake_is_tried() -> None:
    assert {row[0] for row in MISTAKES} == set(Change) - {Change.NONE}


def test_no_post_is_slept_through() -> None:
    outcome = explore(SleepProtocol())
    assert not outcome.fault, outcome.trace
    outcome = explore(SleepProtocol(count_first=True))
    assert outcome.fault == "a waiter sleeps for ever"
