"""Placements: logical experts, copies of them, and updates between calls. The case table has some that stay."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import expertwire as ew
from bits import assert_same_bits
from cases import EXPERT_MAJOR, PLACEMENTS, WAYS, Case, way_name
from driving import (
    Received,
    assert_received,
    copy_output,
    dispatch,
    exchange,
    expected,
    expert_output,
    local_experts,
    run_processes,
    run_threads,
)
from expertwire import reference
from expertwire.reference import physical_experts
from one_rank import rows, single

COUNTS, COPIES = PLACEMENTS["copies"]
CASE = Case("placement", (6, 3, 0, 7), 10, 64, 3, 8, COUNTS, placement=COPIES, ids="half", weights="router")
MOVED = (5, 4, 3, 2, 1, 0, 0, -1, 1, 2)


def on_every_way(case: Case) -> list[Case]:
    return [replace(case, layout=way[0], combine_mode=way[1], name=f"{case.name}-{way_name(*way)}") for way in WAYS]


# Tables


def test_experts_are_put_on_the_ranks_that_a_table_names() -> None:
    assert ew.place_experts([1, 0, [0, 2], (2,), 2], (3, 2, 3)) == (1, 2, -1, 0, -1, 2, 3, 4)
    assert ew.place_experts([0, [0, 0]], [3]) == (0, 1, 1)
    assert ew.place_experts([np.int64(1), 0], np.array([1, 1]).tolist()) == (1, 0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([0, 2], r"expert_to_rank\[1\] = 2: ranks must lie between 0 and 1"),
        ([0, [-1]], r"expert_to_rank\[1\] = \[-1\]: ranks must lie"),
        ([[], 1], r"expert_to_rank\[0\] = \[\]: must be a rank"),
        ([0, 1, 1], r"puts 2 experts on rank 1: its room in experts_per_rank is 1"),
        (["0"], r"expert_to_rank\[0\] = '0': must be an integer"),
    ],
)
def test_wrong_tables_are_refused(table: list[Any], words: str) -> None:
    with pytest.raises(ew.InvalidArgumentError, match=words):
        ew.place_experts(table, [1, 1])


def test_a_rank_uses_its_own_copy_and_the_others_take_turns() -> None:
    # Ranks hold (0 1 2), (3 0), (- 4 5), (0 3): expert 0 three times, 3 twice.
    assert physical_experts(COPIES, COUNTS, 0) == (0, 1, 2, 3, 6, 7)
    assert physical_experts(COPIES, COUNTS, 1) == (4, 1, 2, 3, 6, 7)
    assert physical_experts(COPIES, COUNTS, 2) == (0, 1, 2, 9, 6, 7)
    assert physical_experts(COPIES, COUNTS, 3) == (8, 1, 2, 9, 6, 7)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), st.randoms(use_true_random=False))
def test_copies_are_shared_out_evenly(counts: list[int], random: Any) -> None:
    placement = [random.randrange(sum(counts)) for _ in range(sum(counts))]
    names = sorted(set(placement))
    placement = [names.index(expert) for expert in placement]
    rank_of = [rank for rank, count in enumerate(counts) for _ in range(count)]
    for expert in range(len(names)):
        copies = [physical for physical, held in enumerate(placement) if held == expert]
        chosen = [physical_experts(placement, counts, rank)[expert] for rank in range(len(counts))]
        assert set(chosen) <= set(copies)
        holders = {rank_of[physical] for physical in copies}
        assert all(rank_of[chosen[rank]] == rank for rank in holders)
        turns = Counter(dict.fromkeys(copies, 0))
        turns.update(chosen[rank] for rank in range(len(counts)) if rank not in holders)
        assert max(turns.values()) - min(turns.values()) <= 1


# Exchanges


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Case, list[tuple[int, ...]]]:
    """Draw a case with a placement, and placements of the same experts to follow it."""
    num_ranks = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks).filter(any))
    num_experts = sum(counts)
    num_logical = draw(st.integers(1, num_experts))
    num_spare = num_experts - num_logical

    def placement() -> tuple[int, ...]:
        spare = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_spare, max_size=num_spare))
        return tuple(draw(st.permutations([*range(num_logical), *spare])))

    layout, mode = draw(st.sampled_from(WAYS))
    case = Case(
        name=f"journey-{draw(st.integers(0, 2**20))}",
        tokens=tuple(draw(st.lists(st.integers(0, 6), min_size=num_ranks, max_size=num_ranks))),
        num_experts=num_experts,
        num_topk=draw(st.integers(1, min(num_logical, 4))),
        max_tokens=6,
        experts_per_rank=tuple(counts),
        placement=placement(),
        layout=layout,
        combine_mode=mode,
        ids=draw(st.sampled_from(["uniform", "half", "none", "zipf:2"])),
        ids_dtype=draw(st.sampled_from(["int32", "int64"])),
        weights="router",
    )
    return case, [placement() for _ in range(draw(st.integers(0, 3)))]


def _journey(group: ew.Group, case: Case, placements: list[tuple[int, ...]]) -> list[Received]:
    with ew.MoECommunicator(group, case.config) as comm:
        results = [exchange(comm, case.inputs()[comm.rank])]
        for step, placement in enumerate(placements, 1):
            comm.update_placement(placement)
            assert comm.config.placement == placement
            results.append(exchange(comm, case.inputs(step)[comm.rank]))
        return results


def _check_journey(case: Case, placements: list[tuple[int, ...]], of_ranks: list[list[Received]]) -> None:
    for step, placement in enumerate([case.placement, *placements]):
        wanted = expected(replace(case.config, placement=placement), case.inputs(step))
        assert_received([results[step] for results in of_ranks], wanted, f"{case.name} step {step}")


@settings(max_examples=40)
@given(journeys())
def test_any_placements_after_one_another_equal_the_reference(journey: tuple[Case, list[tuple[int, ...]]]) -> None:
    case, placements = journey
    _check_journey(case, placements, run_threads(_journey, case.num_ranks, case, placements))


@pytest.mark.parametrize("case", on_every_way(CASE), ids=lambda case: case.name)
def test_placements_of_processes_change_between_calls(case: Case) -> None:
    placements = [MOVED, COPIES, MOVED]
    _check_journey(case, placements, run_processes(_journey, case.num_ranks, case, placements))


def _update_between(group: ew.Group, case: Case) -> list[Received]:
    """Dispatch twice, with an update before each combine: answers come from the experts that were asked."""
    with ew.MoECommunicator(group, case.config) as comm:
        results, open_ones = [], []
        for step, placement in enumerate((MOVED, COPIES)):
            out, handle = dispatch(comm, case.inputs(step)[comm.rank])
            open_ones.append((copy_output(out), handle))
            comm.update_placement(placement)
        for received, handle in open_ones:
            answer = expert_output(comm.config, received, local_experts(comm))
            results.append(Received(received, comm.combine(answer, handle)))
        return results


@pytest.mark.parametrize("case", on_every_way(replace(CASE, max_in_flight=2)), ids=lambda case: case.name)
def test_dispatches_under_way_keep_their_placement(case: Case) -> None:
    of_ranks = run_threads(_update_between, case.num_ranks, case)
    for step, placement in enumerate((COPIES, MOVED)):
        wanted = expected(replace(case.config, placement=placement), case.inputs(step))
        assert_received([results[step] for results in of_ranks], wanted, f"step {step}")


def _update_within(group: ew.Group, case: Case) -> list[Received]:
    """Update between the two phases of a dispatch, and of its combine."""
    with ew.MoECommunicator(group, case.config) as comm:
        given = case.inputs()[comm.rank]
        sent = comm.dispatch_async(given.x, given.topk_ids, given.weights)
        comm.update_placement(MOVED)
        out, handle = sent.wait()
        received = copy_output(out)
        answer = expert_output(comm.config, received, local_experts(comm))
        sent_back = comm.combine_async(answer, handle)
        comm.update_placement(COPIES)
        return [Received(received, sent_back.wait())]


@pytest.mark.parametrize("case", on_every_way(CASE), ids=lambda case: case.name)
def test_operations_between_their_phases_keep_their_placement(case: Case) -> None:
    of_ranks = run_threads(_update_within, case.num_ranks, case)
    assert_received([results[0] for results in of_ranks], expected(case.config, case.inputs()), case.name)


def test_a_placement_in_order_changes_nothing() -> None:
    plain = replace(CASE, placement=None, num_topk=4, ids="half")
    placed = replace(plain, placement=tuple(range(10)))
    assert_received(
        [results[0] for results in run_threads(_journey, 4, placed, [])], expected(plain.config, placed.inputs())
    )


def _totals(group: ew.Group, case: Case) -> tuple[int, ...]:
    with ew.MoECommunicator(group, case.config) as comm:
        exchange(comm, case.inputs()[comm.rank])
        comm.update_placement(MOVED)
        exchange(comm, case.inputs()[comm.rank])
        return comm.stats().expert_tokens


@pytest.mark.parametrize("case", on_every_way(CASE), ids=lambda case: case.name)
def test_totals_are_of_physical_experts(case: Case) -> None:
    totals = [count for of_rank in run_threads(_totals, 4, case) for count in of_rank]
    wanted = np.zeros(10, int)
    for placement in (COPIES, MOVED):
        for rank, own in enumerate(case.inputs()):
            experts = reference.chosen_experts(replace(case.config, placement=placement), own.topk_ids, rank, 4)
            wanted += np.bincount(experts[experts >= 0], minlength=10)
    assert totals == wanted.tolist()


# Mistakes

LOGICAL_IDS = np.array([[0, 1], [2, 0], [1, 2]])
FOUR = {"num_experts": 4, "num_topk": 2, "placement": (1, 0, 2, 0)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": (0, 1, 2)}, r"placement has 3 entries: must be one logical expert, or -1 for none, for each"),
        ({"placement": (0, 1, 2, 4)}, r"placement\[3\] = 4: must be one logical expert"),
        ({"placement": (0, -2, 1, 2)}, r"placement\[1\] = -2"),
        ({"placement": (0, 1, 3, 3)}, r"holds logical expert 3 but not 2: every logical expert needs a physical one"),
        ({"placement": (-1,) * 4}, r"placement holds no expert"),
        ({"placement": (0, 0, 0, 0)}, r"num_topk = 2: must be between 1 and the logical experts of placement = 1"),
        ({"placement": ()}, r"placement = \[\]: must be one logical expert, or -1, for each physical expert"),
        ({"placement": 3}, r"placement = 3: must be one logical expert"),
        ({"placement": (0, 1, 2, 0.5)}, r"placement = 0.5: must be an integer"),
    ],
)
def test_a_wrong_placement_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ew.InvalidArgumentError, match=words):
        single(**{**FOUR, **fields})


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((0, 1, 2), r"placement has 3 entries"),
        ((0, 1, 0, 1), r"placement holds 2 logical experts: must hold 3, as at construction"),
        ((0, 1, 2, 3), r"placement holds 4 logical experts: must hold 3"),
        ((0, 0, 2, 2), r"holds logical expert 2 but not 1"),
        (None, r"placement = None: must be one logical expert"),
    ],
)
def test_a_wrong_update_leaves_the_placement_as_it_was(placement: Any, words: str) -> None:
    with single(**FOUR) as comm:
        for collective in (True, False):
            with pytest.raises(ew.InvalidArgumentError, match=words):
                comm.update_placement(placement, collective=collective)
        assert comm.config.placement == FOUR["placement"]
        comm.dispatch(rows(), LOGICAL_IDS)


def test_other_mistakes_with_updates() -> None:
    with single(num_experts=4, num_topk=2) as comm:
        assert comm.config.placement is None
        with pytest.raises(ew.InvalidArgumentError, match="only a communicator constructed with a placement"):
            comm.update_placement((0, 1, 2, 3))
    comm = single(**FOUR)
    with pytest.raises(ew.InvalidArgumentError, match="stream = 5: the CPU has no streams"):
        comm.update_placement(FOUR["placement"], stream=5)
    with pytest.raises(ew.InvalidArgumentError, match="collective = 1: must be True or False"):
        comm.update_placement(FOUR["placement"], collective=1)  # type: ignore[arg-type]
    comm.close()
    with pytest.raises(ew.InvalidArgumentError, match="update_placement: this communicator is closed"):
        comm.update_placement(FOUR["placement"])


def test_ids_are_of_logical_experts() -> None:
    with single(**FOUR) as comm:
        wrong = LOGICAL_IDS.copy()
        wrong[1, 1] = 3
        with pytest.raises(
            ew.InvalidArgumentError, match=r"topk_ids\[1, 1\] = 3: must be below the number of logical experts = 3"
        ):
            comm.dispatch(rows(), wrong)
        wrong[1] = 2, 2
        with pytest.raises(ew.InvalidArgumentError, match=r"topk_ids\[1, 1\] = 2: the token names this expert twice"):
            comm.dispatch(rows(), wrong)
        comm.dispatch(rows(), LOGICAL_IDS)


def _refused(group: ew.Group, given: list[tuple[int, ...]]) -> tuple[str, list[Received]]:
    """Be refused, then agree, and exchange."""
    with ew.MoECommunicator(group, CASE.config) as comm:
        with pytest.raises(ew.InvalidArgumentError) as refusal:
            comm.update_placement(given[comm.rank])
        results = [exchange(comm, CASE.inputs(0)[comm.rank])]
        comm.update_placement(MOVED)
        results.append(exchange(comm, CASE.inputs(1)[comm.rank]))
        return str(refusal.value), results


def test_ranks_that_differ_are_all_told_and_keep_the_old_one() -> None:
    of_ranks = run_processes(_refused, 4, [MOVED, COPIES, MOVED, MOVED])
    for text, _ in of_ranks:
        assert text.startswith(
            "ranks gave different placements: placement is [0, 1, 2, 3, 0, -1, 4, 5, 0, 3] on rank 1; "
        )
        assert text.endswith("[5, 4, 3, 2, 1, 0, 0, -1, 1, 2] on ranks 0, 2, 3")
    _check_journey(CASE, [MOVED], [results for _, results in of_ranks])


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    of_ranks = run_processes(_refused, 4, [MOVED, MOVED, MOVED[:9], MOVED])
    for rank, (text, _) in enumerate(of_ranks):
        assert ("rank 2 could not update the placement: " in text) == (rank != 2)
        assert "placement has 9 entries" in text
    _check_journey(CASE, [MOVED], [results for _, results in of_ranks])


def _constructed_apart(group: ew.Group) -> str:
    with pytest.raises(ew.InvalidArgumentError) as refusal:
        ew.MoECommunicator(group, CASE.config, placement=MOVED if group.rank else None)
    return str(refusal.value)


def test_ranks_constructed_with_different_placements_are_told() -> None:
    for text in run_threads(_constructed_apart, 4):
        assert "placement is [5, 4, 3, 2, 1, 0, 0, -1, 1, 2] on ranks 1, 2, 3; none on rank 0" in text


# Lost ranks

GONE = 3
WITHOUT = (0, 1, 2, 3, 5, -1, 4, 3, -1, -1)  # rank 3 holds nothing


def _go_on(group: ew.Group, case: Case, closed: threading.Event) -> Received | None:
    comm = ew.MoECommunicator(group, case.config, on_peer_loss="mask", timeout_s=10.0)
    with comm:
        exchange(comm, case.inputs()[comm.rank])
        if comm.rank == GONE:
            comm.close()
            closed.set()
            return None
        closed.wait()
        exchange(comm, case.inputs(1)[comm.rank])
        assert comm.lost_ranks() == (GONE,)
        comm.update_placement(WITHOUT, collective=False)
        return exchange(comm, case.inputs(2)[comm.rank])


def test_those_who_are_left_move_the_experts_of_a_lost_rank() -> None:
    case = replace(CASE, layout=EXPERT_MAJOR)
    results = run_threads(_go_on, 4, case, threading.Event())
    inputs = case.inputs(2)
    inputs[GONE] = replace(inputs[GONE], topk_ids=np.full_like(inputs[GONE].topk_ids, -1))
    wanted = expected(replace(case.config, placement=WITHOUT), inputs)
    for rank in range(3):
        assert results[rank] is not None
        assert_same_bits(results[rank].combined, wanted[rank].combined, f"rank {rank}")
    assert any((wanted[rank].combined != 0).any() for rank in range(3))


# What the page says

ROOT = Path(__file__).resolve().parent.parent


def _printed_by(program: Path) -> str:
    return subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=True
    ).stdout


def test_the_program_of_the_page_prints_what_it_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "placement.md").read_text(), re.DOTALL)
    file = tmp_path / "placement.py"
    file.write_text(program)
    assert f"# {_printed_by(file).strip()}" in program


def test_the_example_evens_out_the_load() -> None:
    printed = _printed_by(ROOT / "examples" / "rebalance.py")
    before, after = (float(number) for number in re.findall(r"\d+\.\d+", printed))
    assert before > 1.5
    assert after < 1.2
    assert "every result was right" in printed
    assert printed in (ROOT / "docs" / "placement.md").read_text()
