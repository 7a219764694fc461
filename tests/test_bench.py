"""The benchmark measures: it checks before it times, and its figures are what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from expertwire.bench import adapters, measure, routing
from expertwire.bench.adapters.floor import Floor
from expertwire.bench.adapters.torch_a2a import TorchAllToAll
from expertwire.bench.inputs import Observation, rank_input, reference_observations
from expertwire.bench.request import Sweep
from expertwire.bench.schema import Problem, Run, Settings, Status
from expertwire.bench.summary import summarize, with_ratios
from expertwire.errors import InvalidArgumentError
from expertwire.trace import RoutingTrace, TraceInfo, save_trace
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

SMALL = Problem(num_experts=8, num_tokens=5, hidden_size=128, num_topk=3, num_ranks=2)
QUICK = Settings(warmup=1, iters=4, rounds=2, threads=True, timeout_s=20.0)


def only_result(run: Run) -> Any:
    (result,) = run.results
    return result


# Figures


def test_figures_are_of_the_slowest_rank_of_each_iteration() -> None:
    pair = np.array([[1000, 9000, 3000, 4000], [2000, 1000, 8000, 1000]])
    figures = summarize({"pair": pair}, Settings(iters=4, rounds=2), bytes_per_rank=12e6)["pair"]
    assert (figures.min_us, figures.median_us, figures.p99_us, figures.max_us) == (2.0, 6.0, 9.0, 9.0)
    assert figures.fastest_rank_us == 1.0
    assert figures.gb_per_s == pytest.approx(2 * 12e6 / 6e-6 / 1e9)
    assert figures.spread == pytest.approx((6.0 - 5.5) / 6.0)


def test_ratios_are_between_every_two_measured_libraries() -> None:
    def result(lib: str, ns: int) -> measure.LibResult:
        samples = {phase: np.full((2, 3), ns) for phase in ("dispatch", "combine", "pair")}
        return measure.LibResult(lib, Status.OK, phases=summarize(samples, Settings(iters=3), 1.0))

    skipped = measure.LibResult("none", Status.SKIPPED, "why")
    a, b, none = with_ratios([result("a", 300), result("b", 100), skipped])
    assert a.phases["pair"].ratio_to == {"b": pytest.approx(3)}
    assert b.phases["combine"].ratio_to == {"a": pytest.approx(1 / 3)}
    assert none.phases == {}


@pytest.mark.parametrize(("iters", "rounds", "parts"), [(10, 3, [4, 3, 3]), (2, 5, [1, 1]), (6, 1, [6])])
def test_timed_pairs_are_cut_into_rounds(iters: int, rounds: int, parts: list[int]) -> None:
    assert Settings(iters=iters, rounds=rounds).parts() == parts


# Libraries, checked and timed

FLOOR_PROBLEMS = {
    "one rank": replace(SMALL, num_ranks=1),
    "two ranks": SMALL,
    "uneven experts": replace(SMALL, num_ranks=3),
    "more ranks than experts": replace(SMALL, num_experts=3, num_ranks=4),
    "fp8": replace(SMALL, dispatch_dtype=DispatchDataType.FP8_E4M3),
    "mxfp8": replace(SMALL, dispatch_dtype=DispatchDataType.MXFP8),
    "a rank that receives nothing": replace(SMALL, routing="empty-experts"),
}


@pytest.mark.parametrize("problem", FLOOR_PROBLEMS.values(), ids=FLOOR_PROBLEMS.keys())
def test_floor_moves_the_rows_it_says(problem: Problem) -> None:
    result = only_result(measure.measure(problem, replace(QUICK, validate=True), ["floor"]))
    assert result.status is Status.OK, result.reason
    assert result.samples["pair"].shape == (problem.num_ranks, QUICK.iters)
    assert (result.samples["dispatch"] + result.samples["combine"] == result.samples["pair"]).all()
    assert (result.samples["dispatch"] > 0).all()


LAYOUTS = [(layout, mode) for layout in list(DispatchLayout)[:2] for mode in CombineMode]


@pytest.mark.parametrize(("layout", "mode"), LAYOUTS)
@pytest.mark.parametrize("dtype", DispatchDataType)
def test_expertwire_is_held_against_the_reference(
    layout: DispatchLayout, mode: CombineMode, dtype: DispatchDataType
) -> None:
    problem = replace(SMALL, num_ranks=3, layout=layout, combine_mode=mode, dispatch_dtype=dtype)
    result = only_result(measure.measure(problem, replace(QUICK, validate=True), ["expertwire"]))
    assert result.status is Status.OK, result.reason


def test_libraries_are_compared_across_processes() -> None:
    run = measure.measure(SMALL, replace(QUICK, threads=False), ["expertwire", "floor"])
    assert [result.status for result in run.results] == [Status.OK, Status.OK], [r.reason for r in run.results]
    ours, floor = run.results
    assert ours.phases["pair"].ratio_to["floor"] == pytest.approx(1 / floor.phases["pair"].ratio_to["expertwire"])
    assert run.bytes_per_rank == 5 * 3 * 128 * 2


def test_the_way_to_the_figures_is_told() -> None:
    told: list[tuple[int, str]] = []
    libs = ["floor", "deepep", "expertwire"]
    measure.measure(SMALL, replace(QUICK, iters=40), libs, lambda count, doing: told.append((count, doing)))
    counts = [count for count, _ in told]
    assert counts == sorted(set(counts))
    assert told[-1] == (measure.num_steps(SMALL, QUICK, libs), "last check")
    assert counts[-1] == 6  # two libraries that can run here, set up once and timed in two rounds


def test_every_step_has_a_name() -> None:
    job = measure.Job(SMALL, QUICK, ("a", "b"), kernels=False, folder=Path())
    assert [job.doing(count) for count in range(7)] == [
        *("a: set-up and warm-up", "b: set-up and warm-up"),
        *("a: round 1", "b: round 1", "a: round 2", "b: round 2", "last check"),
    ]


def trace_file(folder: Path, num_ranks: int = 2) -> Path:
    """Write a trace of 8 experts, 2 layers and 12 tokens, some of whose slots select nothing."""
    rng = np.random.default_rng(3)
    ids = rng.permuted(np.tile(np.arange(8), (2, 12, 1)), axis=2)[:, :, :3]
    ids[0, ::3, 1] = -1
    ids[0, 1] = -1
    weights = rng.random(ids.shape, np.float32)
    offsets = np.array([0, 7, 12]) if num_ranks == 2 else np.arange(num_ranks + 1) * 12 // num_ranks
    save_trace(folder / "trace.npz", RoutingTrace(ids, weights, offsets, TraceInfo(8, 128, num_ranks, 5, 0, "test")))
    return folder / "trace.npz"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("routing_name", ["empty-experts", "trace"])
def test_torch_is_held_against_the_reference(routing_name: str, tmp_path: Path) -> None:
    named = str(trace_file(tmp_path)) if routing_name == "trace" else routing_name
    problem = replace(SMALL, routing=named)
    result = only_result(measure.measure(problem, replace(QUICK, threads=False, validate=True), ["torch-a2a"]))
    assert result.status is Status.OK, result.reason


def test_torch_sums_may_differ_by_one_rounding_and_no_more() -> None:
    problem = replace(SMALL, layout=DispatchLayout.RANK_MAJOR)
    (expected, _) = TorchAllToAll.expected(problem, [rank_input(problem, rank) for rank in range(2)])
    assert expected.dispatch.keys() == {"num_tokens_per_expert", "tokens"}
    assert np.abs(expected.combined.astype(np.float32)).min() > 0

    def off_by(ulps: int) -> Observation:
        bits = expected.combined.view(np.uint16).copy()
        bits[3, 17] += ulps
        return Observation(expected.dispatch, bits.view(ml_dtypes.bfloat16))

    assert TorchAllToAll.difference(off_by(1), expected) == ""
    assert "combined tokens[3, 17]" in TorchAllToAll.difference(off_by(4), expected)
    swapped = {**expected.dispatch, "tokens": expected.dispatch["tokens"][::-1]}
    assert "dispatch tokens" in TorchAllToAll.difference(Observation(swapped, expected.combined), expected)


@pytest.mark.parametrize("layout", list(DispatchLayout)[:2])
def test_every_part_of_an_observation_counts(layout: DispatchLayout) -> None:
    problem = replace(SMALL, layout=layout, dispatch_dtype=DispatchDataType.FP8_E4M3)
    (expected, _) = reference_observations(problem, [rank_input(problem, rank) for rank in range(2)])
    assert Floor.difference(expected, expected) == ""
    for name, values in expected.dispatch.items():
        wrong = values.copy()
        wrong.reshape(-1).view(np.uint8)[-1] ^= 1
        changed = Observation({**expected.dispatch, name: wrong}, expected.combined)
        assert f"dispatch {name}" in Floor.difference(changed, expected)
    assert "shape" in Floor.difference(Observation(expected.dispatch, expected.combined[1:]), expected)


# Libraries that are wrong, broken or missing


class WrongCombine(Floor):
    """Turns one bit of one returned row."""

    name = "wrong-combine"

    def combine(self) -> None:
        super().combine()
        self._returned[self._rank][0, 0] ^= 1


class WrongLater(Floor):
    """Is right at first, and wrong from the sixth dispatch."""

    name = "wrong-later"

    def dispatch(self) -> None:
        super().dispatch()
        if self._epoch > 5:
            self._received[self._rank][0, 0] ^= 1


class BreaksOnOneRank(Floor):
    """Raises on rank 1 alone, before anything is sent."""

    name = "breaks-on-one-rank"

    def __init__(self, context: adapters.RankContext) -> None:
        if context.group.rank == 1:
            raise OSError("no more\nmemory")
        super().__init__(context)


class LeavesTheOthersWaiting(Floor):
    """Raises on rank 1 inside the third dispatch, when rank 0 waits for its rows."""

    name = "leaves-the-others-waiting"

    def __init__(self, context: adapters.RankContext) -> None:
        super().__init__(replace(context, settings=replace(context.settings, timeout_s=1.5)))

    def dispatch(self) -> None:
        if self._rank == 1 and self._epoch == 2:
            raise ValueError("no")
        super().dispatch()


@pytest.fixture
def add_adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[adapters.Adapter]], str]:
    def add(adapter: type[adapters.Adapter]) -> str:
        monkeypatch.setitem(adapters.ADAPTERS, adapter.name, adapter)
        return adapter.name

    return add


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(WrongCombine, "wrong result: combined tokens[0, 0]"), (WrongLater, "wrong result: dispatch tokens[0]")],
)
def test_a_wrong_library_has_no_figures(
    add_adapter: Callable[[type[adapters.Adapter]], str], adapter: type[adapters.Adapter], said: str
) -> None:
    run = measure.measure(SMALL, QUICK, [add_adapter(adapter), "floor"])
    wrong, floor = run.results
    assert (wrong.status, wrong.samples, wrong.phases) == (Status.FAILED, None, {})
    assert said in wrong.reason
    assert floor.status is Status.OK


def test_a_library_that_breaks_on_one_rank_is_left_alone_by_all(
    add_adapter: Callable[[type[adapters.Adapter]], str],
) -> None:
    run = measure.measure(SMALL, QUICK, [add_adapter(BreaksOnOneRank), "floor"])
    broken, floor = run.results
    assert broken.status is Status.FAILED
    assert broken.reason == "rank 1: OSError: no more memory"
    assert floor.status is Status.OK, floor.reason


def test_what_is_not_here_has_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertwire.bench.adapters.torch_a2a.find_spec", lambda _name: None)
    run = measure.measure(SMALL, QUICK, ["torch-a2a", "deepep"])
    assert [result.status for result in run.results] == [Status.SKIPPED] * 2
    assert run.results[0].reason == "not installed: pip install torch"
    assert all(result.reason for result in run.results)


def test_a_rank_that_waits_for_a_broken_one_gives_up(
    add_adapter: Callable[[type[adapters.Adapter]], str],
) -> None:
    run = measure.measure(SMALL, QUICK, ["floor", add_adapter(LeavesTheOthersWaiting)])
    floor, broken = run.results
    assert broken.reason == "rank 0: PeerLostError: floor: no rows arrived within 1.5 s; rank 1: ValueError: no"
    assert floor.status is Status.OK, floor.reason


# Routing


def test_a_trace_replays_each_ranks_share_of_layer_0(tmp_path: Path) -> None:
    path = trace_file(tmp_path)
    with np.load(path) as stored:
        ids, weights = stored["topk_ids"], stored["weights"]
    problem = replace(SMALL, routing=str(path))
    for rank, first in ((0, 0), (1, 7)):
        replayed = routing.make_routing(problem, rank)
        np.testing.assert_array_equal(replayed.topk_ids, ids[0, first : first + 5])
        np.testing.assert_array_equal(replayed.weights, weights[0, first : first + 5])
    three = replace(problem, num_ranks=3, num_tokens=4)
    np.testing.assert_array_equal(routing.make_routing(three, 2).topk_ids, ids[0, 8:12])


def test_a_trace_sets_what_options_leave_out(tmp_path: Path) -> None:
    (problem,) = Sweep(routing=str(trace_file(tmp_path, num_ranks=3)), tokens="2").problems()
    shape = (problem.num_experts, problem.num_topk, problem.hidden_size, problem.num_ranks, problem.num_tokens)
    assert shape == (8, 3, 128, 3, 2)


@pytest.mark.parametrize(
    ("change", "said"), [({"num_experts": 16}, "recorded with 8, 3"), ({"num_tokens": 6}, "5 tokens")]
)
def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        routing.make_routing(replace(SMALL, routing=str(trace_file(tmp_path)), **change), 1)
