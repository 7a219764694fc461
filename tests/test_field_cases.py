"""Situations that broke such libraries in the field: races, re-use, lifetimes, and mistakes of one rank alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import DIRECT, RANK_MAJOR, REDUCE, WAYS, Case, way_name
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
from expertwire.reference import RankInput

BOTH = pytest.mark.parametrize("run", [run_threads, run_processes], ids=["threads", "processes"])
PAIR = Case("pair", (4, 3), 6, 16, 3, max_tokens=4)


# Many calls, no barrier between them


def _tokens_of_step(case: Case, step: int) -> tuple[int, ...]:
    rng = np.random.default_rng(step)
    return tuple(rng.integers(0, case.max_tokens + 1, size=case.num_ranks).tolist())


def _many_calls(group: ew.Group, case: Case, num_calls: int) -> list[Received]:
    naps = np.random.default_rng(1000 + group.rank)
    results = []
    with ew.MoECommunicator(group, case.config) as comm:
        for step in range(num_calls):
            given = case.input(group.rank, _tokens_of_step(case, step)[group.rank], step)
            if naps.random() < 0.05:
                time.sleep(naps.uniform(0, 0.002))
            results.append(exchange(comm, given))
    return results


@BOTH
@pytest.mark.parametrize("case", [
    Case("many-expert", (4, 4, 4), 6, 16, 3, max_tokens=4, ids="half"),
    Case("many-rank-direct", (2, 2, 2), 3, 8, 2, max_tokens=2, layout=RANK_MAJOR, combine_mode=DIRECT, max_in_flight=2),
], ids=lambda case: case.name)  # fmt: skip
def test_thousand_calls_with_changing_token_counts(run: Callable[..., Any], case: Case) -> None:
    of_ranks = run(_many_calls, case.num_ranks, case, 1000)
    for step, wanted in enumerate(_expected_of_calls(case, 1000)):
        assert_received([results[step] for results in of_ranks], wanted, f"call {step}")


@cache
def _expected_of_calls(case: Case, num_calls: int) -> list[list[Received]]:
    return [expected(case.config, case.inputs(step, _tokens_of_step(case, step))) for step in range(num_calls)]


# Several communicators over one group


COMMUNICATORS = (
    Case("first", (1, 1, 1), 3, 8, 1, max_tokens=1),
    Case("second", (2, 1, 2), 5, 24, 2, max_tokens=2, experts_per_rank=(2, 0, 3), layout=RANK_MAJOR),
    Case("third", (2, 0, 1), 6, 40, 3, max_tokens=2, combine_mode=DIRECT, max_in_flight=2),
)


def _interleaved(group: ew.Group, cases: tuple[Case, ...], num_steps: int, delayed: int) -> list[list[Received]]:
    results = []
    comms = [ew.MoECommunicator(group, case.config) for case in cases]
    for step in range(num_steps):
        if group.rank == delayed:
            time.sleep(0.001)
        given = [case.inputs(step)[group.rank] for case in cases]
        outs, handles = zip(*[dispatch(comm, own) for comm, own in zip(comms, given, strict=True)], strict=True)
        received = [copy_output(out) for out in outs]
        combined: list[np.ndarray] = [np.empty(0)] * len(cases)
        for index in reversed(range(len(cases))) if step % 2 else range(len(cases)):
            answer = expert_output(cases[index].config, received[index], local_experts(comms[index]))
            combined[index] = comms[index].combine(answer, handles[index])
        results.append([Received(out, y) for out, y in zip(received, combined, strict=True)])
    for comm in comms:
        comm.close()
    return results


@BOTH
@pytest.mark.parametrize("count", [2, 3])
def test_communicators_of_one_group_do_not_mix(run: Callable[..., Any], count: int) -> None:
    cases = COMMUNICATORS[:count]
    of_ranks = run(_interleaved, 3, cases, 40, count - 1)
    for step in range(40):
        for index, case in enumerate(cases):
            got = [results[step][index] for results in of_ranks]
            assert_received(got, expected(case.config, case.inputs(step)), f"{case.name} {step}")


def _in_turn(group: ew.Group, cases: tuple[Case, ...]) -> list[Received]:
    """Make, use and close one communicator after the other."""
    results = []
    for case in cases:
        with ew.MoECommunicator(group, case.config) as comm:
            results.append(exchange(comm, case.inputs()[group.rank]))
    return results


@BOTH
def test_communicators_one_after_the_other(run: Callable[..., Any]) -> None:
    cases = COMMUNICATORS * 2
    of_ranks = run(_in_turn, 3, cases)
    for index, case in enumerate(cases):
        assert_received([r[index] for r in of_ranks], expected(case.config, case.inputs()), case.name)


# Handles and lanes


AHEAD = tuple(
    (replace(PAIR, name="ahead", layout=layout, combine_mode=mode, max_in_flight=len(order)), order)
    for layout, mode in WAYS
    for order in ((0, 1), (1, 0), (1, 2, 0))
)


def _dispatch_ahead(group: ew.Group) -> list[list[Received]]:
    """Dispatch as many times as there are entries in an order, then combine in that order."""
    return [_combine_in_order(group, case, order) for case, order in AHEAD]


def _combine_in_order(group: ew.Group, case: Case, order: tuple[int, ...]) -> list[Received]:
    with ew.MoECommunicator(group, case.config) as comm:
        outs, handles = zip(*[dispatch(comm, case.inputs(step)[group.rank]) for step in range(len(order))], strict=True)
        received = [copy_output(out) for out in outs]  # only now: outputs live until F newer dispatches
        answers = [expert_output(case.config, out, local_experts(comm)) for out in received]
        combined = {step: comm.combine(answers[step], handles[step]) for step in order}
        return [Received(out, combined[step]) for step, out in enumerate(received)]


@BOTH
def test_dispatches_ahead_of_their_combines(run: Callable[..., Any]) -> None:
    of_ranks = run(_dispatch_ahead, 2)
    for index, (case, order) in enumerate(AHEAD):
        for step in range(len(order)):
            got = [results[index][step] for results in of_ranks]
            what = f"{way_name(case.layout, case.combine_mode)} {order} dispatch {step}"
            assert_received(got, expected(case.config, case.inputs(step)), what)


def _stale_handle(group: ew.Group, lanes: int) -> Received:
    case = replace(PAIR, max_in_flight=lanes)
    with ew.MoECommunicator(group, case.config) as comm:
        handles = []
        for step in range(lanes + 1):
            out, handle = dispatch(comm, case.inputs(step)[group.rank])
            handles.append(handle)
        received = copy_output(out)
        answer = expert_output(case.config, received, local_experts(comm))
        num_tokens = len(case.inputs()[group.rank].x)
        with pytest.raises(ew.HandleError, match="stale"):
            comm.combine(answer, handles[0], out=np.empty((num_tokens, case.hidden_size), reference.BF16))
        return Received(received, comm.combine(answer, handles[-1]))


@pytest.mark.parametrize("lanes", [1, 2])
def test_stale_handle_says_so_and_costs_nothing(lanes: int) -> None:
    assert_received(run_threads(_stale_handle, 2, lanes), expected(PAIR.config, PAIR.inputs(lanes)))


PAIRS = tuple(replace(PAIR, layout=layout, combine_mode=mode) for layout, mode in WAYS)


def _combine_again(group: ew.Group) -> list[list[np.ndarray]]:
    results = []
    for case in PAIRS:
        with ew.MoECommunicator(group, case.config) as comm:
            out, handle = dispatch(comm, case.inputs()[group.rank])
            answer = expert_output(case.config, copy_output(out), local_experts(comm))
            twice = (answer.astype(np.float32) * 2).astype(reference.BF16)
            results.append([comm.combine(rows, handle) for rows in (answer, twice, answer)])
    return results


@BOTH
def test_one_handle_combined_again(run: Callable[..., Any]) -> None:
    for rank, of_cases in enumerate(run(_combine_again, 2)):
        for case, (first, doubled, again) in zip(PAIRS, of_cases, strict=True):
            wanted = expected(case.config, case.inputs())[rank].combined
            assert_same_bits(first, wanted, "first")
            assert_same_bits(doubled, (wanted.astype(np.float32) * 2).astype(reference.BF16), "doubled")
            assert_same_bits(again, wanted, "again")


def _foreign_handles(group: ew.Group) -> np.ndarray:
    case = PAIR
    first, second = (ew.MoECommunicator(group, case.config) for _ in range(2))
    with first, second:
        out, handle = dispatch(first, case.inputs()[group.rank])
        answer = expert_output(case.config, copy_output(out), local_experts(first))
        with pytest.raises(ew.HandleError):
            second.combine(answer, handle)
        with pytest.raises(ew.HandleError):
            first.combine(answer, None)
        return first.combine(answer, handle)


def test_handles_of_others_and_empty_ones_are_refused() -> None:
    wanted = expected(PAIR.config, PAIR.inputs())
    for rank, y in enumerate(run_threads(_foreign_handles, 2)):
        assert_same_bits(y, wanted[rank].combined, f"rank {rank}")


def _inputs_overwritten(group: ew.Group) -> list[Received]:
    results = []
    for case in PAIRS:
        given = case.inputs()[group.rank]
        with ew.MoECommunicator(group, case.config) as comm:
            out, handle = comm.dispatch(given.x, given.topk_ids, given.weights)
            given.x[...], given.topk_ids[...], given.weights[...] = 7, 0, 7
            received = copy_output(out)
            answer = expert_output(case.config, received, local_experts(comm))
            results.append(Received(received, comm.combine(answer, handle)))
    return results


@BOTH
def test_inputs_may_change_after_dispatch(run: Callable[..., Any]) -> None:
    of_ranks = run(_inputs_overwritten, 2)
    for index, case in enumerate(PAIRS):
        assert_received([results[index] for results in of_ranks], expected(case.config, case.inputs()))


# Buffers


def _own_buffers(group: ew.Group, case: Case) -> Received:
    """Use the caller's output buffer, the lane's combine input, and dispatch once more in between."""
    given = case.inputs()[group.rank]
    with ew.MoECommunicator(group, case.config) as comm:
        mine = np.full_like(comm.get_dispatch_output_buffer(), 0.75)
        out, handle = comm.dispatch(given.x, given.topk_ids, given.weights, output_buffer=mine)
        assert out.tokens is mine
        received = copy_output(out)
        answer = comm.get_combine_input_buffer()
        answer[...] = expert_output(case.config, received, local_experts(comm))
        return Received(received, comm.combine(answer, handle))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way_name(*way))
def test_buffers_of_the_caller_and_of_the_lane(way: tuple) -> None:
    case = replace(PAIR, layout=way[0], combine_mode=way[1], max_in_flight=2)
    assert_received(run_threads(_own_buffers, 2, case), expected(case.config, case.inputs()))


def _rows_beyond_the_counts(group: ew.Group, case: Case) -> Received:
    """Answer with NaN in every row that is nobody's."""
    with ew.MoECommunicator(group, case.config) as comm:
        return exchange(comm, case.inputs()[group.rank], fill=float("nan"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way_name(*way))
def test_rows_beyond_the_counts_are_never_read(way: tuple) -> None:
    case = Case("beyond", (3, 0, 2), 6, 16, 2, max_tokens=5, layout=way[0], combine_mode=way[1], ids="half")
    assert_received(run_threads(_rows_beyond_the_counts, 3, case), expected(case.config, case.inputs()))


# Mistakes of one rank


MISTAKES = ("M + 1", "repeated", "E", "2^31", "2^40")


def _wrong_then_right(group: ew.Group, case: Case, culprit: int) -> list[Received]:
    """Make every mistake on one rank alone, each followed by the right call of all."""
    given, results = case.inputs()[group.rank], []
    with ew.MoECommunicator(group, case.config) as comm:
        for mistake in MISTAKES:
            if group.rank == culprit:
                with pytest.raises(ew.InvalidArgumentError):
                    comm.dispatch(*_mistaken(case, given, mistake))
            results.append(exchange(comm, given))
    return results


def _mistaken(case: Case, given: RankInput, mistake: str) -> tuple[np.ndarray, np.ndarray]:
    if mistake == "M + 1":
        num_tokens = case.max_tokens + 1
        x = np.zeros((num_tokens, case.hidden_size), reference.BF16)
        return x, np.tile(np.arange(case.num_topk), (num_tokens, 1))
    ids = given.topk_ids.copy()
    ids[-1, -1] = {"repeated": ids[-1, 0], "E": case.num_experts, "2^31": 2**31, "2^40": 2**40}[mistake]
    return given.x, ids


@BOTH
@pytest.mark.parametrize("case", PAIRS[::2], ids=lambda case: case.layout.value)
def test_a_refused_call_costs_the_others_nothing(run: Callable[..., Any], case: Case) -> None:
    wanted = expected(case.config, case.inputs())
    of_ranks = run(_wrong_then_right, 2, case, 1)
    for index, mistake in enumerate(MISTAKES):
        assert_received([results[index] for results in of_ranks], wanted, f"after {mistake}")


def _weights_for_rank_major(group: ew.Group, case: Case) -> Received:
    given = case.inputs()[group.rank]
    with ew.MoECommunicator(group, case.config) as comm:
        out, handle = dispatch(comm, given)
        received = copy_output(out)
        answer = expert_output(case.config, received, local_experts(comm))
        with pytest.raises(ew.InvalidArgumentError, match="weights"):
            comm.combine(answer, handle, weights=given.weights)
        with pytest.raises(ew.InvalidArgumentError, match="expert_output"):
            comm.combine(answer[:-1], handle)
        return Received(received, comm.combine(answer, handle))


@pytest.mark.parametrize("mode", [REDUCE, DIRECT])
def test_refused_combines_leave_the_handle_usable(mode: Any) -> None:
    case = replace(PAIR, layout=RANK_MAJOR, combine_mode=mode)
    assert_received(run_threads(_weights_for_rank_major, 2, case), expected(case.config, case.inputs()))


def _num_blocks(group: ew.Group, num_blocks: Any) -> Received:
    config = replace(PAIR.config, num_blocks=num_blocks)
    with ew.MoECommunicator(group, config) as comm:
        return exchange(comm, PAIR.inputs()[group.rank])


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 131, (1, 131)])
def test_num_blocks_changes_no_bit(num_blocks: Any) -> None:
    assert_received(run_threads(_num_blocks, 2, num_blocks), expected(PAIR.config, PAIR.inputs()))


def _bytes_moved(group: ew.Group, case: Case) -> tuple[int, int]:
    with ew.MoECommunicator(group, case.config) as comm:
        received = exchange(comm, case.inputs()[group.rank])
        assert not np.asarray(received.combined).any()
        stats = comm.stats()
        assert not any(stats.expert_tokens)
        return stats.bytes_sent, stats.bytes_received


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way_name(*way))
def test_tokens_that_select_nothing_move_no_rows(way: tuple) -> None:
    case = replace(PAIR, hidden_size=4096, layout=way[0], combine_mode=way[1], ids="none")
    for sent, received in run_threads(_bytes_moved, 2, case):
        assert sent < 4096
        assert received < 4096
