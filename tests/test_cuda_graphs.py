"""Captured graphs of dispatch and combine: replayed with new inputs, they do what fresh calls would do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_dispatch_equal, assert_same_bits
from cases import DIRECT, EXPERT_MAJOR, RANK_MAJOR, Case, way_name
from cuda_driving import (
    EVERY_PAYLOAD,
    EVERY_WAY,
    Place,
    capture,
    communicator,
    exchange,
    run_virtual,
    share,
    to_device,
    to_host,
)
from driving import Received, assert_received, copy_output, expected
from expertwire import reference
from expertwire.reference import RankInput
from expertwire.types import QuantConfig

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TOUR = 8  # steps whose inputs differ


@dataclass(frozen=True)
class Step:
    """One exchange of all ranks through a graph: T is M for all, and ids of -1 make up for tokens that are missing."""

    inputs: list[RankInput]
    answers: list[np.ndarray] | None  # None: experts return what they receive
    dispatched: list[ew.DispatchOutput]
    combined: list[np.ndarray]


def tour_of(case: Case, new_answers_alone: bool = False) -> list[Step]:
    """Return steps whose inputs differ, or of which only the experts' answers do."""
    config = case.config
    echo = case.quant == QuantConfig() and (case.layout, case.combine_mode) != (RANK_MAJOR, DIRECT)
    echo = echo and not new_answers_alone
    steps = []
    for number in range(TOUR):
        tokens = tuple((3 * rank + 5 * number) % (config.max_tokens_per_rank + 1) for rank in range(case.num_ranks))
        drawn = case.inputs(0) if new_answers_alone else case.inputs(number, tokens)
        inputs = [_padded(given, config.max_tokens_per_rank) for given in drawn]
        dispatched = reference.dispatch(config, inputs)
        answers = [_random_answer(case, out, number) for out in dispatched]
        if echo:
            answers = [out.tokens for out in dispatched]
        combined = reference.combine(config, inputs, answers)
        steps.append(Step(inputs, None if echo else answers, dispatched, combined))
    return steps


def _padded(given: RankInput, num_tokens: int) -> RankInput:
    missing = num_tokens - len(given.x)
    assert given.weights is not None
    return RankInput(
        np.concatenate([given.x, np.full((missing, given.x.shape[1]), 0.75, given.x.dtype)]),
        np.concatenate([given.topk_ids, np.full((missing, given.topk_ids.shape[1]), -1, given.topk_ids.dtype)]),
        np.concatenate([given.weights, np.full((missing, given.weights.shape[1]), 0.75, np.float32)]),
    )


def _random_answer(case: Case, out: ew.DispatchOutput, number: int) -> np.ndarray:
    shape = list(out.tokens.shape)
    if (case.layout, case.combine_mode) == (RANK_MAJOR, DIRECT):
        shape.insert(1, case.num_topk)
    rng = np.random.default_rng(number)
    return rng.standard_normal(shape, np.float32).astype(reference.BF16)


class Pair:
    """One rank's static arrays, and the graph that goes from them to the combined tokens."""

    def __init__(self, comm: ew.MoECommunicator, step: Step) -> None:
        self.comm = comm
        self.device = str(comm.config.device)
        given = step.inputs[comm.rank]
        self.arrays = [to_device(array, self.device) for array in (given.x, given.topk_ids, given.weights)]
        self.answer = None if step.answers is None else to_device(step.answers[comm.rank], self.device)
        self.combined = torch.empty_like(to_device(step.combined[comm.rank], self.device))
        self.outputs: list[ew.DispatchOutput] = []
        self.graph: Any = None

    def set(self, step: Step) -> None:
        given = step.inputs[self.comm.rank]
        for static, array in zip(self.arrays, (given.x, given.topk_ids, given.weights), strict=True):
            static.copy_(to_device(array, self.device))
        if step.answers is not None:
            self.answer.copy_(to_device(step.answers[self.comm.rank], self.device))

    def call(self) -> None:
        """Dispatch and combine; what to look at afterwards is in ``outputs`` and ``combined``."""
        out, handle = self.comm.dispatch(*self.arrays)
        self.outputs.append(out)
        self.comm.combine(out.tokens if self.answer is None else self.answer, handle, out=self.combined)

    def capture(self, calls: Callable[[], object], barrier: threading.Barrier, lock: threading.Lock) -> None:
        """Capture while nothing runs on any rank, one rank at a time: torch waits for the device before a capture."""
        self.graph = capture(calls, barrier, lock)

    def check(self, step: Step, what: str) -> None:
        rank = self.comm.rank
        assert_same_bits(to_host(self.combined), step.combined[rank], f"{what}: combined on rank {rank}")
        received = copy_output(self.outputs[-1], to_host)
        assert_dispatch_equal(received, step.dispatched[rank], f"{what}: dispatched on rank {rank}")


def run_tour(fn: Callable[..., Any], case: Case, *args: Any, new_answers_alone: bool = False) -> list[Any]:
    """Run fn(comm, steps, barrier, lock, *args) as every rank of a case, side by side on one GPU."""
    steps = tour_of(case, new_answers_alone)
    barrier, lock = threading.Barrier(case.num_ranks, timeout=60.0), threading.Lock()

    def rank_of(group: ew.Group, place: Place) -> Any:
        try:
            with communicator(group, case, place) as comm:
                return fn(comm, steps, barrier, lock, *args)
        except BaseException:
            barrier.abort()
            raise

    return run_virtual(rank_of, share(case.num_ranks))


def _replay(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any, num_replays: int) -> None:
    pair = Pair(comm, steps[0])
    pair.call()
    pair.capture(pair.call, barrier, lock)
    for number in range(num_replays):
        step = steps[number % TOUR]
        pair.set(step)
        pair.graph.replay()
        pair.check(step, f"replay {number}")


@EVERY_PAYLOAD
@EVERY_WAY
def test_a_replayed_pair_follows_its_inputs(way: tuple, quant: QuantConfig) -> None:
    name = f"graph-{way_name(*way)}-{quant.format.value}"
    case = Case(name, (7, 7, 7, 7), 12, 256, 4, layout=way[0], combine_mode=way[1], quant=quant, weights="router")
    run_tour(_replay, case, 200)


def _replay_often(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any, num_replays: int) -> None:
    """Compare every combined row, which shows every dispatched one, and all that dispatch gives now and then."""
    pair = Pair(comm, steps[0])
    pair.call()
    pair.capture(pair.call, barrier, lock)
    on_device = []
    for step in steps:
        pair.set(step)
        on_device.append([array.clone() for array in pair.arrays])
    torch.cuda.current_stream().synchronize()
    barrier.wait()
    wanted = [step.combined[comm.rank].view(np.int16) for step in steps]
    for number in range(num_replays):
        for static, array in zip(pair.arrays, on_device[number % TOUR], strict=True):
            static.copy_(array)
        pair.graph.replay()
        got = to_host(pair.combined).view(np.int16)
        assert np.array_equal(got, wanted[number % TOUR]), f"replay {number} on rank {comm.rank}"
        if number % 499 == 0:
            pair.check(steps[number % TOUR], f"replay {number}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR])
def test_ten_thousand_replays_of_one_or_two_tokens(layout: Any, max_tokens: int) -> None:
    case = Case(f"often-{layout.value}-{max_tokens}", (max_tokens,) * 2, 6, 64, 3, layout=layout, weights="router")
    run_tour(_replay_often, case, 10_000)


def _start_with_a_capture(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any) -> None:
    pair = Pair(comm, steps[0])
    pair.capture(pair.call, barrier, lock)
    for number, step in enumerate(steps):
        pair.set(step)
        pair.graph.replay()
        pair.check(step, f"replay {number}")


def test_the_very_first_call_may_be_captured() -> None:
    run_tour(_start_with_a_capture, Case("first", (5, 5), 6, 64, 3, weights="router"))


def _alternate(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any, case: Case) -> list[Received]:
    """Replay the graph and make plain calls in turn. Returns what the plain calls gave."""
    pair = Pair(comm, steps[0])
    pair.call()
    pair.capture(pair.call, barrier, lock)
    received = []
    for number in range(3 * TOUR):
        step = steps[number % TOUR]
        pair.set(step)
        for _ in range(number % 3):
            pair.graph.replay()
        if number % 3:
            pair.check(step, f"replay {number}")
        received.append(exchange(comm, case.inputs(number)[comm.rank]))
    return received


@EVERY_WAY
def test_replays_and_plain_calls_alternate(way: tuple) -> None:
    case = Case(f"mixed-{way_name(*way)}", (6, 6, 6), 6, 64, 3, layout=way[0], combine_mode=way[1], weights="router")
    of_ranks = run_tour(_alternate, case, case)
    for number in range(3 * TOUR):
        got = [received[number] for received in of_ranks]
        assert_received(got, expected(case.config, case.inputs(number)), f"call {number}")


def _combine_alone(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any) -> None:
    """Capture combine by itself, and replay it for one dispatch with other answers."""
    pair = Pair(comm, steps[0])
    out, handle = comm.dispatch(*pair.arrays)
    pair.outputs.append(out)
    pair.capture(lambda: comm.combine(pair.answer, handle, out=pair.combined), barrier, lock)
    for number, step in enumerate([*steps, *steps]):
        pair.set(step)
        pair.graph.replay()
        pair.check(step, f"combine {number}")


@EVERY_WAY
def test_a_graph_of_combine_alone(way: tuple) -> None:
    case = Case(f"alone-{way_name(*way)}", (5, 5), 6, 64, 3, layout=way[0], combine_mode=way[1], weights="router")
    run_tour(_combine_alone, case, new_answers_alone=True)


def _two_lanes(comm: ew.MoECommunicator, steps: Sequence[Step], barrier: Any, lock: Any) -> None:
    """Capture dispatch, dispatch, combine, combine over two lanes."""
    pairs = [Pair(comm, step) for step in steps[:2]]

    def calls() -> None:
        handles = []
        for pair in pairs:
            out, handle = comm.dispatch(*pair.arrays)
            pair.outputs.append(out)
            handles.append(handle)
        for pair, handle in zip(pairs, handles, strict=True):
            comm.combine(pair.outputs[-1].tokens, handle, out=pair.combined)

    pairs[0].capture(calls, barrier, lock)
    for number, (first, second) in enumerate(itertools.pairwise([*steps, *steps])):
        pairs[0].set(first)
        pairs[1].set(second)
        pairs[0].graph.replay()
        pairs[0].check(first, f"replay {number}, first")
        pairs[1].check(second, f"replay {number}, second")


@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR])
def test_a_graph_of_two_pairs_in_flight(layout: Any) -> None:
    case = Case(f"flight-{layout.value}", (6, 6, 6), 6, 64, 3, layout=layout, weights="router", max_in_flight=2)
    run_tour(_two_lanes, case)
