"""Lifetimes on CUDA: graphs past their communicator, streams within a capture, and memory that no call takes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import EXPERT_MAJOR, RANK_MAJOR, Case
from crew import assert_not_the_childs, in_a_forked_child
from cuda_driving import Place, capture, communicator, exchange, living_at, run_virtual, share, to_device, to_host
from driving import Received, assert_received, expected
from expertwire import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TIMEOUT_S = 1.0
BOTH_LAYOUTS = pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR], ids=lambda layout: layout.value)


class Echo:
    """A pair whose experts return what they receive, on arrays that stay where they are."""

    def __init__(self, comm: ew.MoECommunicator, case: Case, step: int) -> None:
        device, given = str(comm.config.device), case.inputs(step)[comm.rank]
        self.comm = comm
        self.arrays = [to_device(array, device) for array in (given.x, given.topk_ids, given.weights)]
        self.combined = torch.empty_like(self.arrays[0])

    def dispatch(self) -> None:
        self.received, self.handle = self.comm.dispatch(*self.arrays)

    def combine(self) -> None:
        self.comm.combine(self.received.tokens, self.handle, out=self.combined)

    def call(self) -> None:
        self.dispatch()
        self.combine()

    def assert_right(self, wanted: list[Any], what: str) -> None:
        assert_same_bits(to_host(self.combined), wanted[self.comm.rank], f"{what} on rank {self.comm.rank}")


def combined_of(case: Case, step: int) -> list[Any]:
    inputs = case.inputs(step)
    answers = [out.tokens for out in reference.dispatch(case.config, inputs)]
    return reference.combine(case.config, inputs, answers)


def _outlive(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock, again: list[ew.Group]
) -> Received:
    """Close, and drop all, while replays of some ranks wait for those that make none; replay once more afterwards."""
    pair = Echo(communicator(group, case, place, timeout_s=TIMEOUT_S), case, 0)
    graph = capture(pair.call, barrier, lock)
    graph.replay()
    pair.assert_right(combined_of(case, 0), "before")
    barrier.wait()
    stays_away = group.rank == 1
    if not stays_away:
        graph.replay()
    pair.comm.close()
    del pair
    gc.collect()
    barrier.wait()
    torch.cuda.current_stream().synchronize()  # fails if memory is gone under a kernel
    graph.replay()
    torch.cuda.current_stream().synchronize()
    barrier.wait()
    with lock:  # may wait for the device
        del graph
    barrier.wait()
    with communicator(again[group.rank], case, place) as comm:
        return exchange(comm, case.inputs(1)[comm.rank])


@BOTH_LAYOUTS
def test_a_graph_may_outlive_its_communicator(layout: Any) -> None:
    case = Case(f"outlive-{layout.value}", (5, 5, 5), 6, 64, 3, layout=layout, weights="router")
    barrier, lock = threading.Barrier(3, timeout=60), threading.Lock()
    of_ranks = run_virtual(_outlive, share(3), case, barrier, lock, ew.local_group(3))
    assert_received(of_ranks, expected(case.config, case.inputs(1)), "with another communicator")


def _fork(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock) -> None:
    """Capture two dispatches on two streams of one capture, after a plain call on the first of them."""
    with communicator(group, case, place) as comm:
        pairs = [Echo(comm, case, step) for step in range(2)]
        pairs[0].call()
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def calls() -> None:
            side.wait_stream(main)
            pairs[0].dispatch()
            with torch.cuda.stream(side):
                pairs[1].dispatch()
                pairs[1].combine()
            pairs[0].combine()
            main.wait_stream(side)

        graph = capture(calls, barrier, lock)
        wanted = [combined_of(case, step) for step in range(2)]
        for number in range(20):
            for pair in pairs:
                pair.combined.copy_(torch.full(pair.combined.shape, 7.0, dtype=torch.bfloat16))
            graph.replay()
            for pair, combined in zip(pairs, wanted, strict=True):
                pair.assert_right(combined, f"replay {number}")
        pairs[0].call()
        graph = capture(pairs[0].call, barrier, lock)  # another capture, on the stream of the plain call before
        graph.replay()
        pairs[0].assert_right(wanted[0], "another graph")


@BOTH_LAYOUTS
def test_a_capture_forks_over_streams(layout: Any) -> None:
    case = Case(f"fork-{layout.value}", (5, 5, 5), 6, 64, 3, layout=layout, weights="router", max_in_flight=2)
    run_virtual(_fork, share(3), case, threading.Barrier(3, timeout=60), threading.Lock())


def _call_beside_a_capture(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock
) -> None:
    """Call on one stream while another one, on which the call before was made, is being captured."""
    with communicator(group, case, place, two_phase=True) as comm:
        pair, side = Echo(comm, case, 0), torch.cuda.Stream()
        wanted = combined_of(case, 0)

        def refuse(call: Callable[[], object]) -> None:
            told = "stream: the call before was made on another"
            with torch.cuda.stream(side), pytest.raises(ew.InvalidArgumentError, match=told):
                call()
            pair.combined.zero_()

        pair.call()
        graph = capture(lambda: (refuse(pair.dispatch), pair.call()), barrier, lock)
        graph.replay()
        pair.assert_right(wanted, "the graph")
        request = comm.dispatch_async(*pair.arrays)
        capture(lambda: (refuse(request.wait), refuse(request.wait)), barrier, lock)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            pair.received, pair.handle = request.wait()
            pair.combine()
            torch.cuda.synchronize()
            pair.assert_right(wanted, "received after the capture")


@BOTH_LAYOUTS
def test_a_call_beside_a_capture_is_refused(layout: Any) -> None:
    case = Case(f"beside-{layout.value}", (5,), 6, 64, 3, layout=layout, weights="router")
    run_virtual(_call_beside_a_capture, share(1), case, threading.Barrier(1, timeout=60), threading.Lock())


def _have_a_child(group: ew.Group, place: Place, case: Case) -> None:
    with communicator(group, case, place) as comm:
        pair = Echo(comm, case, 0)
        pair.call()
        stream = torch.cuda.current_stream().cuda_stream
        torch.cuda.synchronize()

        def be_a_child() -> None:
            assert_not_the_childs(comm, lambda: comm.dispatch(*pair.arrays, stream=stream))
            comm.close()
            pair.__dict__.clear()
            gc.collect()

        in_a_forked_child(be_a_child)
        pair.combined.zero_()
        pair.call()
        pair.assert_right(combined_of(case, 0), "after the child")


@BOTH_LAYOUTS
def test_a_forked_child_has_no_part_in_it(layout: Any) -> None:
    case = Case(f"child-{layout.value}", (5,), 6, 64, 3, layout=layout, weights="router")
    run_virtual(_have_a_child, share(1), case)


def _take_turns(group: ew.Group, place: Place, cases: list[Case], barrier: threading.Barrier, lock: Any) -> None:
    """Two communicators of one group, with a graph each, replayed in any order on one stream."""
    with communicator(group, cases[0], place) as first, communicator(group, cases[1], place) as second:
        pairs = [Echo(comm, case, 0) for comm, case in zip((first, second), cases, strict=True)]
        graphs = [capture(pair.call, barrier, lock) for pair in pairs]
        for number in range(30):
            which = (number * number // 3) % 2
            graphs[which].replay()
            if number % 5 == 0:
                pairs[1 - which].call()
            pairs[which].assert_right(combined_of(cases[which], 0), f"replay {number}")


def test_two_communicators_of_a_group_take_turns() -> None:
    first = Case("turns-1", (5, 5, 5), 6, 64, 3, layout=EXPERT_MAJOR, weights="router")
    second = replace(first, name="turns-2", layout=RANK_MAJOR, num_experts=9, hidden_size=128)
    run_virtual(_take_turns, share(3), [first, second], threading.Barrier(3, timeout=60), threading.Lock())


@BOTH_LAYOUTS
def test_calls_take_no_memory_and_wait_for_nothing(layout: Any) -> None:
    case = Case(f"memory-{layout.value}", (64,), 8, 256, 4, layout=layout, weights="router")
    place = Place()
    with living_at(place), communicator(*ew.local_group(1), case, place) as comm:
        pair = Echo(comm, case, 0)
        for _ in range(3):
            pair.call()
        torch.cuda.synchronize()
        torch.cuda._sleep(1000)  # loaded, before it is timed
        torch.cuda.synchronize()
        before = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0])
        torch.cuda._sleep(1_000_000_000)  # about half a second
        started = time.monotonic()
        for _ in range(100):
            pair.call()
        seconds = time.monotonic() - started
        assert not torch.cuda.current_stream().query()  # still asleep, or it would prove nothing
        assert seconds < 0.2
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) == before
        pair.assert_right(combined_of(case, 0), "afterwards")
