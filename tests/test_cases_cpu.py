"""Every case of the table through the public API on the CPU backend, bit for bit against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

import expertwire as ew
from cases import ALL_CASES, CASES, RANK_COUNTS, WAYS, Case, way_name
from driving import Received, assert_received, expected_of_case, rank_of_case, run_processes, run_threads

AS_PROCESSES = (
    *(f"tokens-0-4-4-{way_name(*way)}" for way in WAYS),
    *(f"ids-half-{way_name(*way)}" for way in WAYS),
    "fp8-ue8m0-column-expert",
    "fp8-float32-given-rank",
    "lanes-2-rank-reduce",
    "new-weights-even-ranks-over-router-expert-reduce",
)


def test_names_are_unique() -> None:
    assert len(CASES) == len(ALL_CASES)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_threads(case: Case) -> None:
    _check(case, run_threads(rank_of_case, case.num_ranks, case, 2))


@pytest.mark.parametrize("name", AS_PROCESSES)
def test_processes(name: str) -> None:
    _check(CASES[name], run_processes(rank_of_case, CASES[name].num_ranks, CASES[name], 2))


def _be_in_all(group: ew.Group, cases: list[Case]) -> list[list[Received]]:
    return [rank_of_case(group, case, 2) for case in cases]


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_every_rank_count_as_processes(num_ranks: int) -> None:
    cases = [case for case in ALL_CASES if case.name.startswith(f"ranks-{num_ranks}-")]
    assert len(cases) == len(WAYS)
    of_ranks = run_processes(_be_in_all, num_ranks, cases)
    for case, of_case in zip(cases, zip(*of_ranks, strict=True), strict=True):
        _check(case, list(of_case))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way_name(*way))
def test_int32_and_int64_ids_give_the_same(way: tuple) -> None:
    case = CASES[f"ids-half-{way_name(*way)}"]
    narrow = run_threads(rank_of_case, case.num_ranks, replace(case, ids_dtype="int32"), 1)
    _check(case, narrow)


def _check(case: Case, of_ranks: list) -> None:
    for step in range(len(of_ranks[0])):
        assert_received([results[step] for results in of_ranks], expected_of_case(case, step), case.name)
