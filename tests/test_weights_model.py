"""Weights given to combine under every interleaving, whichever ranks have rows, and what goes wrong otherwise."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from state_explorer import explore
from weights_model import LateWeights, Scenario

NO_ROWS, BOTH, ONE, OTHER = (False, False), (True, True), (False, True), (True, False)
#: A handle is combined twice, which no dispatch comes between.
PROGRAMS = [
    tuple(itertools.chain.from_iterable((None, *(rows,) * 2) for rows in all_rows))
    for all_rows in itertools.product((NO_ROWS, BOTH, ONE, OTHER), repeat=2)
]


@pytest.mark.parametrize("rows", [*PROGRAMS, (BOTH, ONE) * 4, (ONE, OTHER, NO_ROWS) * 3, (None, BOTH) * 4])
def test_every_sum_has_its_own_weights(rows: tuple[tuple[bool, bool] | None, ...]) -> None:
    outcome = explore(LateWeights(Scenario(rows)))
    assert not outcome.fault, "\n".join([outcome.fault, *outcome.trace])
    assert outcome.num_finals > 0


def test_weights_for_a_rank_that_does_not_wait_for_them_are_noticed() -> None:
    stray = Scenario((None, NO_ROWS, NO_ROWS, None, ONE, ONE), to_all=True)
    assert not explore(LateWeights(replace(stray, to_all=False))).fault
    assert explore(LateWeights(stray)).fault == "rank 1 sums for combine 4 with the weights of 1"


def test_two_buffers_are_noticed() -> None:
    assert explore(LateWeights(Scenario((BOTH,) * 4, num_buffers=2))).fault
