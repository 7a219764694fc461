"""dispatch_async and combine_async: the same bits in two phases, in every order that is allowed, and no other order."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import DIRECT, EXPERT_MAJOR, RANK_MAJOR, REDUCE, Case
from driving import (
    Received,
    assert_received,
    copy_output,
    exchange,
    expected,
    expert_output,
    local_experts,
    run_processes,
    run_threads,
    steps_of_case,
)
from test_communicator import ids, rows, single
from two_phase import ORDERS, SMALL, by_ranks, exchange_in_phases, send, send_back, wanted

WAYS = [
    replace(SMALL, layout=layout, combine_mode=mode, weights="router")
    for layout in (EXPERT_MAJOR, RANK_MAJOR)
    for mode in (REDUCE, DIRECT)
]
ALL_WAYS = pytest.mark.parametrize("case", WAYS, ids=lambda c: f"{c.layout.value}-{c.combine_mode.value}")


def rank_of_cases(group: ew.Group, cases: list[Case]) -> list[list[Received]]:
    results = []
    for case in cases:
        with ew.MoECommunicator(group, case.config) as comm:
            results.append(steps_of_case(comm, case, 2, exchange_in_phases))
    return results


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


def test_what_is_done_stays_done() -> None:
    with single() as comm:
        first = comm.dispatch_async(rows(), ids())
        first.wait()
        assert first.done()
        second = comm.dispatch_async(rows(), ids())
        assert first.done()
        second.wait()
        assert first.done()
        assert second.done()


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


# In processes: warnings are caught for a whole process at once.
@pytest.mark.parametrize("case", [WAYS[0], WAYS[-1]], ids=["expert-reduce", "rank-direct"])
def test_dropped_requests_are_reported_and_received_later(case: Case) -> None:
    results = run_processes(rank_that_drops, 3, case)
    for step, of_ranks in zip((1, 2), zip(*results, strict=True), strict=True):
        assert_received(of_ranks, expected(case.config, case.inputs(step)), f"step {step}")


def test_what_a_dropped_request_sent_is_not_received_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with single() as comm:
        with pytest.warns(ResourceWarning):
            comm.dispatch_async(rows(), ids())
        with monkeypatch.context() as patch:
            patch.setattr("expertwire._core.is_stream_capturing", lambda stream: stream == 0x10)
            with pytest.raises(ew.HandleError, match="dispatch_async: a request was dropped without wait"):
                comm._sent.settle(0, 0x10)
        out, handle = comm.dispatch(rows(), ids())
        assert comm.combine(out.tokens, handle).shape == (3, 16)


# Of two that wait for a third, one gives it up first and the other may hear of that.
HOW_ONE_IS_LOST = "did not arrive within timeout_s|had ended with an error|was given up by another rank"


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
        with pytest.raises(ew.PeerLostError, match=HOW_ONE_IS_LOST):
            request.wait()
        return time.monotonic() - before


def test_waits_are_bounded_from_their_own_start() -> None:
    waited = run_threads(_wait_in_vain, 3)
    assert 0.55 < max(waited[0], waited[2]) < 1.5
