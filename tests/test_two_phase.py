"""dispatch_async and combine_async: the same bits in two phases, in every order that is allowed, and no other order."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_memory_order, assert_same_bits
from cases import ALL_CASES, DIRECT, EXPERT_MAJOR, RANK_MAJOR, REDUCE, Case
from crew import Me, crew, die
from driving import (
    Received,
    assert_received,
    copy_output,
    exchange,
    expected,
    expected_of_case,
    expert_output,
    local_experts,
    poison,
    run_processes,
    run_threads,
    steps_of_case,
)
from expertwire.reference import BF16, RankInput
from losses import BOTH_WAYS, LONG_S, OTHERS, VICTIM, communicator
from test_communicator import ids, rows, single
from test_masking import without_victim

SMALL = Case("two-phase", (5, 3, 6), num_experts=9, hidden_size=48, num_topk=3, max_tokens=6, max_in_flight=2)
WAYS = [
    replace(SMALL, layout=layout, combine_mode=mode, weights="router")
    for layout in (EXPERT_MAJOR, RANK_MAJOR)
    for mode in (REDUCE, DIRECT)
]
ALL_WAYS = pytest.mark.parametrize("case", WAYS, ids=lambda c: f"{c.layout.value}-{c.combine_mode.value}")


def send(comm: ew.MoECommunicator, given: RankInput) -> ew.MoERequest:
    """Send copies that are spoilt at once: what was sent may not be looked at again."""
    poison(comm.get_dispatch_output_buffer())
    x, topk_ids = given.x.copy(), given.topk_ids.copy()
    weights = None if given.weights is None else given.weights.copy()
    scales = None if given.block_scales is None else given.block_scales.copy()
    quant = None if scales is None else ew.QuantConfig(block_scales=scales)
    request = comm.dispatch_async(x, topk_ids, weights, quant=quant)
    for array in (x, topk_ids, weights, scales):
        if array is not None:
            array.view(np.uint8)[...] = 0x3F
    return request


def send_back(comm: ew.MoECommunicator, out: Any, handle: Any, weights: np.ndarray | None = None) -> ew.MoERequest:
    answer = expert_output(comm.config, out, local_experts(comm))
    result = poison(np.empty((handle.num_tokens, comm.config.hidden_size), BF16))
    weights = None if weights is None else weights.copy()
    request = comm.combine_async(answer, handle, weights=weights, out=result)
    for array in (answer, weights):
        if array is not None:
            array.view(np.uint8)[...] = 0x3F
    return request


def exchange_in_phases(comm: ew.MoECommunicator, given: RankInput, weights: np.ndarray | None = None) -> Received:
    request = send(comm, given)
    out, handle = request.wait()
    assert request.done()
    assert_memory_order(out)
    received = copy_output(out)
    replaced = weights is not None and given.weights is not None
    if replaced and comm.config.combine_mode is REDUCE and comm.config.output_layout is EXPERT_MAJOR:
        with pytest.raises(ew.UnsupportedError, match="weights: in two phases RANK_LOCAL_REDUCE"):
            send_back(comm, received, handle, weights)
        weights = None
    return Received(received, send_back(comm, received, handle, weights).wait())


def rank_of_cases(group: ew.Group, cases: list[Case]) -> list[list[Received]]:
    results = []
    for case in cases:
        with ew.MoECommunicator(group, case.config) as comm:
            results.append(steps_of_case(comm, case, 2, exchange_in_phases))
    return results


def wanted(case: Case, step: int) -> list[Received]:
    if case.new_weights and case.combine_mode is REDUCE and case.layout is EXPERT_MAJOR and case.weights != "none":
        case = replace(case, new_weights="")
    return expected_of_case(case, step)


def by_ranks() -> dict[int, list[Case]]:
    """Choose a part of the case table in which every layout, mode, payload and kind of weights occurs."""
    chosen: dict[int, list[Case]] = {}
    seen: set[object] = set()
    for case in ALL_CASES:
        if case.num_ranks > 4 or case.weights == "mixed":
            continue
        traits = {
            ("way", case.layout, case.combine_mode, case.quant, case.prequantized),
            ("weights", case.layout, case.combine_mode, case.weights, case.new_weights),
            ("ids", case.ids, case.num_ranks),
            ("lanes", case.max_in_flight),
        }
        if traits - seen:
            seen |= traits
            chosen.setdefault(case.num_ranks, []).append(case)
    return chosen


BY_RANKS = by_ranks()


@pytest.mark.parametrize("num_ranks", sorted(BY_RANKS))
def test_cases_in_two_phases(num_ranks: int) -> None:
    cases = BY_RANKS[num_ranks]
    for case, *results in zip(cases, *run_threads(rank_of_cases, num_ranks, cases), strict=True):
        for step in range(2):
            assert_received([result[step] for result in results], wanted(case, step), case.name)


def test_the_part_of_the_table_is_worth_it() -> None:
    cases = [case for group in BY_RANKS.values() for case in group]
    assert {(case.layout, case.combine_mode) for case in cases} == {(c.layout, c.combine_mode) for c in WAYS}
    assert {"", "all", "even-ranks"} <= {case.new_weights for case in cases}
    assert any(case.weights == "none" and case.new_weights == "all" for case in cases)


# Two micro-batches: what is sent (D, C) and received (d, c) of each in turn.
ORDERS = [
    "D0 D1 d0 d1 C0 C1 c0 c1",
    "D0 D1 d1 d0 C1 C0 c0 c1",
    "D0 d0 C0 D1 c0 d1 C1 c1",
    "D0 d0 C0 D1 d1 c0 C1 c1",
    "D0 d0 C0 D1 d1 C1 c1 c0",
]


def rank_of_order(group: ew.Group, case: Case, mine: dict[int, str], num_rounds: int) -> list[Received]:
    results: list[Received] = []
    with ew.MoECommunicator(group, case.config) as comm:
        for step in range(num_rounds):
            requests: dict[str, ew.MoERequest] = {}
            got: dict[str, Any] = {}
            for name in mine[group.rank % len(mine)].split():
                what, batch = name[0], name[1]
                if what == "D":
                    requests[name] = send(comm, case.inputs(2 * step + int(batch))[group.rank])
                elif what == "d":
                    out, handle = requests["D" + batch].wait()
                    got[batch] = copy_output(out), handle
                elif what == "C":
                    requests[name] = send_back(comm, *got[batch])
                else:
                    got["c" + batch] = requests["C" + batch].wait()
            results += [Received(got[batch][0], got["c" + batch]) for batch in "01"]
    return results


def assert_order(case: Case, results: list[list[Received]]) -> None:
    for step in range(len(results[0])):
        assert_received([result[step] for result in results], expected(case.config, case.inputs(step)), f"step {step}")


@ALL_WAYS
def test_two_micro_batches(case: Case) -> None:
    for order in ORDERS:
        assert_order(case, run_threads(rank_of_order, case.num_ranks, case, {0: order}, 3))


def test_ranks_may_receive_in_orders_of_their_own() -> None:
    mine = {0: "D0 D1 d0 d1 C0 C1 c0 c1", 1: "D0 D1 d1 d0 C0 C1 c1 c0", 2: "D0 D1 d0 C0 d1 C1 c1 c0"}
    assert_order(WAYS[0], run_processes(rank_of_order, 3, WAYS[0], mine, 4))


def rank_of_mixture(group: ew.Group, case: Case, num_rounds: int) -> list[Received]:
    """Do in two phases what others do in one."""
    with ew.MoECommunicator(group, case.config) as comm:
        return [
            (exchange_in_phases if (group.rank + step) % 2 else exchange)(comm, case.inputs(step)[group.rank])
            for step in range(num_rounds)
        ]


@ALL_WAYS
def test_others_may_do_it_in_one_phase(case: Case) -> None:
    assert_order(case, run_threads(rank_of_mixture, case.num_ranks, case, 5))


def rank_that_replaces(group: ew.Group, case: Case) -> str:
    """Bring other weights to a blocking combine, where rank 1 combines in two phases and keeps those of dispatch."""
    with ew.MoECommunicator(group, case.config) as comm:
        given = case.inputs(0)[group.rank]
        out, handle = comm.dispatch(given.x, given.topk_ids, given.weights)
        answer = expert_output(comm.config, copy_output(out), local_experts(comm))
        told = ""
        try:
            if group.rank == 1:
                comm.combine_async(answer, handle).wait()
            else:
                comm.combine(answer, handle, weights=given.weights * np.float32(2) if group.rank == 0 else None)
        except ew.InvalidArgumentError as error:
            told = str(error)
        assert_same_bits(exchange(comm, given).combined, expected(case.config, case.inputs(0))[group.rank].combined, "")
        return told


def test_weights_that_were_not_heard_are_told() -> None:
    told = run_threads(rank_that_replaces, 3, WAYS[0])
    assert "rank 1 combines in two phases" in told[0]
    assert told[1:] == ["", ""]


def test_waiting_twice_gives_the_same() -> None:
    with single() as comm:
        request = comm.dispatch_async(rows(), ids())
        assert request.done()  # alone, nothing is waited for
        assert request.result is request.wait()
        assert request.wait() is request.wait()
        out, handle = request.wait()
        with comm.combine_async(out.tokens, handle) as back:
            assert "combine on lane 0, sent" in repr(back)
        assert "received" in repr(back)
        assert back.wait() is back.wait()
    assert back.wait() is back.result  # also after close
    assert back.done()


def rank_that_looks(group: ew.Group) -> None:
    with ew.MoECommunicator(group, SMALL.config) as comm:
        given = SMALL.inputs(0)[group.rank]
        if group.rank == 1:
            time.sleep(0.3)
        request = send(comm, given)
        if group.rank == 0:
            assert not request.done()
            before = time.process_time()
            while not request.done():
                time.sleep(0.01)
            assert time.process_time() - before < 0.2
        request.wait()


def test_done_looks_and_does_not_wait() -> None:
    run_processes(rank_that_looks, 3)


def test_wrong_orders_are_refused() -> None:
    with single(max_in_flight=2) as comm:
        first = comm.dispatch_async(rows(), ids())
        second = comm.dispatch_async(rows(), ids())
        with pytest.raises(ew.HandleError, match=r"dispatch_send: the dispatch 1 in lane 0 has been sent and not rece"):
            comm.dispatch_async(rows(), ids())
        with pytest.raises(ew.HandleError, match=r"dispatch: the dispatch 1 in lane 0 has been sent and not received"):
            comm.dispatch(rows(), ids())
        out, handle = first.result
        with pytest.raises(ew.HandleError, match="combine: the dispatch 1 in lane 0 has been sent and not received"):
            comm.combine(out.tokens, handle)
        with pytest.raises(ew.HandleError, match="combine_send: the dispatch 1 in lane 0"):
            comm.combine_async(out.tokens, handle)
        first.wait()
        back = comm.combine_async(out.tokens, handle)
        for again in (comm.combine, comm.combine_async):
            with pytest.raises(ew.HandleError, match="the combine of dispatch 1 in lane 0 has been sent and not rece"):
                again(out.tokens, handle)
        with pytest.raises(ew.HandleError, match="the combine of dispatch 1 in lane 0 has been sent and not received"):
            comm.dispatch(rows(), ids())
        back.wait()
        third = comm.dispatch_async(rows(), ids())
        with pytest.raises(ew.HandleError, match="stale"):
            comm.combine(out.tokens, handle)
        second.wait()
        third.wait()


def test_mistakes_send_nothing() -> None:
    with single() as comm:
        with pytest.raises(ew.InvalidArgumentError, match=r"topk_ids\[0, 0\] = 7: must be below num_experts"):
            comm.dispatch_async(rows(), np.full((3, 2), 7))
        with pytest.raises(ew.InvalidArgumentError, match="stream = 5: the CPU has no streams"):
            comm.dispatch_async(rows(), ids(), stream=5)
        with pytest.raises(ew.HandleError, match="must be the handle that dispatch returned"):
            comm.combine_async(rows(), comm)  # type: ignore[arg-type]
        request = comm.dispatch_async(rows(), ids())
        with pytest.raises(ew.InvalidArgumentError, match="stream = 5: the CPU has no streams"):
            request.wait(stream=5)
        out, handle = request.wait()
        assert_same_bits(comm.combine_async(out.tokens, handle).wait(), comm.combine(out.tokens, handle), "combine")
    for late in (comm.dispatch_async, comm.combine_async):
        with pytest.raises(ew.InvalidArgumentError, match="closed"):
            late(rows(), ids())


def test_a_request_outlives_its_communicator() -> None:
    comm = single()
    request = comm.dispatch_async(rows(), ids())
    comm.close()
    assert request.done()
    for _ in range(2):
        with pytest.raises(ew.InvalidArgumentError, match="closed before this dispatch was received"):
            request.wait()
    del comm, request
    gc.collect()  # and nothing is reported: closing was deliberate


def rank_that_drops(group: ew.Group, case: Case) -> list[Received]:
    config = replace(case.config, max_in_flight=1)
    with ew.MoECommunicator(group, config) as comm:
        given = [case.inputs(step)[group.rank] for step in range(4)]
        if group.rank == 0:
            with pytest.warns(ResourceWarning, match="dispatch_async: a request was dropped without wait"):
                send(comm, given[0])
        else:
            send(comm, given[0]).wait()
        first = exchange(comm, given[1])
        out, handle = send(comm, given[2]).wait()
        received = copy_output(out)
        if group.rank == 1:
            with pytest.warns(ResourceWarning, match="combine_async: a request was dropped without wait"):
                send_back(comm, received, handle)
        else:
            send_back(comm, received, handle).wait()
        second = Received(received, send_back(comm, received, handle).wait())
        if group.rank == 2:
            with pytest.warns(ResourceWarning):
                send(comm, given[3])
        else:
            with pytest.raises(RuntimeError, match="of the body"), send(comm, given[3]):
                raise RuntimeError("of the body")  # drops it in silence
        return [first, second]


@ALL_WAYS
def test_dropped_requests_are_reported_and_received_later(case: Case) -> None:
    results = run_threads(rank_that_drops, 3, case)
    for step, of_ranks in zip((1, 2), zip(*results, strict=True), strict=True):
        assert_received(of_ranks, expected(case.config, case.inputs(step)), f"step {step}")


def _lose_one(me: Me, case: Case, policy: str, moment: str) -> Any:
    """Be a rank of which one dies: before its first dispatch, before the second one, or before its combines.

    Ranks receive in different orders, and agree all the same on who took part in what.
    """
    rank = me.group.rank
    comm = communicator(me.group, replace(case, max_in_flight=2), timeout_s=LONG_S, on_peer_loss=policy)
    exchange_in_phases(comm, case.inputs(0)[rank])
    exchange_in_phases(comm, case.inputs(1)[rank])
    requests = []
    for step in range(2):
        if rank == VICTIM and moment == ("before", "between")[step]:
            die()
        requests.append(send(comm, case.inputs(step)[rank]))
    results = []
    try:
        for request in requests if rank % 2 else reversed(requests):
            request.wait()
        received = [(copy_output(out), handle) for out, handle in (request.wait() for request in requests)]
        if rank == VICTIM:
            die()
        requests = [send_back(comm, *of_one) for of_one in received]
        for request in requests if rank % 2 else reversed(requests):
            request.wait()
        results = [Received(out, back.wait()) for (out, _), back in zip(received, requests, strict=True)]
    except ew.PeerLostError as error:
        for request in requests:
            if request._sent.error is None and request._sent.is_over:
                continue  # what was received before the loss stays
            with pytest.raises(ew.PeerLostError):
                request.wait()
            shown = request.result[0].layout if moment != "combine" else request.result
            if moment == "combine":
                assert np.isnan(shown.astype(np.float32)).all()
            else:
                assert not np.any(
                    shown.num_tokens_per_expert if shown.num_tokens_per_rank is None else shown.num_tokens_per_rank
                )
        with pytest.raises(ew.PeerLostError):
            comm.dispatch_async(case.inputs(0)[rank].x, case.inputs(0)[rank].topk_ids)
        return error.ranks
    finally:
        comm.close()
    return results


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before", "between", "combine"])
def test_a_rank_dies_and_the_others_raise(moment: str, case: Case) -> None:
    with crew(_lose_one, 4, case, "raise", moment) as ranks:
        assert [ranks[rank].result() for rank in OTHERS] == [(VICTIM,)] * 3


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before", "between", "combine"])
def test_a_rank_dies_and_the_others_agree_and_go_on(moment: str, case: Case) -> None:
    with crew(_lose_one, 4, case, "mask", moment) as ranks:
        results = [ranks[rank].result() for rank in OTHERS]
    for step in range(2):
        sent = moment == "combine" or (moment == "between" and step == 0)
        wanted = without_victim(case, step, sent)
        assert_received([of_rank[step] for of_rank in results], [wanted[rank] for rank in OTHERS], f"step {step}")


def _wait_in_vain(group: ew.Group) -> float:
    """Time the wait for a rank that never sends: the clock starts with the wait, not with the send."""
    with ew.MoECommunicator(group, SMALL.config, timeout_s=0.6) as comm:
        given = SMALL.inputs(0)[group.rank]
        exchange(comm, given)
        if group.rank == 1:
            time.sleep(2.0)
            return 0.0
        request = send(comm, given)
        time.sleep(0.5)
        before = time.monotonic()
        with pytest.raises(ew.PeerLostError, match=r"did not arrive within timeout_s|had ended with an error"):
            request.wait()
        return time.monotonic() - before


def test_waits_are_bounded_from_their_own_start() -> None:
    waited = run_threads(_wait_in_vain, 3)
    assert 0.55 < max(waited[0], waited[2]) < 1.5
