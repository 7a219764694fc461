"""The parts of the main job: text, schedule, model, the check against the reference, trace, progress."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import expertwire as ew
from expertwire.run.board import Board, LayerRecord, create_board, open_board
from expertwire.run.model import Model, ModelConfig
from expertwire.run.plan import JobConfig, Schedule
from expertwire.run.report import LineProgress, percentiles
from expertwire.run.text import read_text, split, standard_library_files
from expertwire.run.worker import ReferenceModel
from expertwire.trace import RoutingTrace, TraceInfo, load_trace, save_trace
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

MODEL = ModelConfig(
    num_experts=8, num_topk=3, hidden_size=128, intermediate_size=16, num_layers=2, vocabulary_size=64, seed=1
)
CONFIG = JobConfig(
    MODEL,
    num_ranks=2,
    max_tokens_per_rank=16,
    layout=DispatchLayout.EXPERT_MAJOR,
    combine_mode=CombineMode.RANK_LOCAL_REDUCE,
    dispatch_dtype=DispatchDataType.BF16,
    timeout_s=30.0,
)


def some_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, MODEL.vocabulary_size, count).astype(np.int32)


# Text


def test_split_keeps_words_and_marks_in_order() -> None:
    assert list(split("def f(x_1):\n\treturn 'naïve'!")) == [
        *["def", "f", "(", "x_1", ")", ":", "return", "'", "naïve", "'", "!"]
    ]


def test_ids_are_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be, or not to be", encoding="utf-8")
    ids = read_text([path], 100, 1000).ids
    assert ids.dtype == np.int32
    assert ids.tolist() == [756, 925, 878, 439, 293, 756, 925]  # CRC-32 of each token modulo 1000


def test_text_stops_at_the_limit_and_counts_only_files_that_gave_something(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("empty", "one", "two", "three")]
    for path, text in zip(paths, ("", "a b c", "d e f", "g"), strict=True):
        path.write_text(text, encoding="utf-8")
    text = read_text(paths, 5, 1000)
    assert (len(text.ids), text.num_files) == (5, 2)
    assert len(read_text(paths, 100, 1000).ids) == 7


def test_bytes_that_are_not_text_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 4)
    assert len(read_text([path], 10_000, 1000).ids) > 0


@pytest.mark.parametrize(("content", "words"), [(None, "cannot read"), ("", "no word"), (" \n\t", "no word")])
def test_unusable_text_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "novel.txt"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ew.InvalidArgumentError, match=words) as caught:
        read_text([path], 10, 10)
    assert "novel.txt" in str(caught.value)


def test_a_folder_is_not_a_text(tmp_path: Path) -> None:
    with pytest.raises(ew.InvalidArgumentError, match="cannot read"):
        read_text([tmp_path], 10, 10)


def test_standard_library_is_prose_and_code_of_its_own() -> None:
    paths = list(standard_library_files())
    assert {"argparse.py", "typing.py"} <= {path.name for path in paths}
    assert not {"test", "tests", "site-packages", "dist-packages"} & {part for path in paths for part in path.parts}
    assert paths == list(standard_library_files())


# Schedule


@pytest.mark.parametrize(
    ("tokens", "ranks", "most"), [(1, 4, 8), (3, 4, 1), (32, 4, 8), (33, 4, 8), (100, 7, 3), (5, 1, 128)]
)
def test_schedule_gives_every_token_to_one_rank_and_step(tokens: int, ranks: int, most: int) -> None:
    schedule = Schedule(tokens, ranks, most)
    seen = []
    for rank in range(ranks):
        parts = [schedule.tokens(rank, step) for step in range(schedule.num_steps)]
        assert all(0 <= part.stop - part.start <= most for part in parts)
        assert schedule.tokens(rank, schedule.num_steps) == slice(parts[-1].stop, parts[-1].stop)
        seen += [token for part in parts for token in range(part.start, part.stop)]
    assert seen == list(range(tokens))
    last = [schedule.tokens(rank, schedule.num_steps - 1) for rank in range(ranks)]
    assert any(part.stop > part.start for part in last), "the last step works on nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 3}, "--experts = 8: must be a multiple of --ranks = 3"),
        ({"num_ranks": 0}, "--ranks = 0: must be at least 1"),
        ({"max_tokens_per_rank": -1}, "--max-tokens-per-rank = -1"),
        ({"timeout_s": 0.0}, "--timeout = 0.0"),
        ({"timeout_s": float("nan")}, "--timeout = nan"),
        ({"model": replace(MODEL, num_topk=9)}, r"--topk = 9: must be between 1 and min\(--experts, 32\) = 8"),
        ({"model": replace(MODEL, num_experts=64, num_topk=33)}, r"--topk = 33: .* = 32"),
        ({"model": replace(MODEL, hidden_size=12)}, "--hidden = 12: must be a multiple of 8"),
        ({"model": replace(MODEL, num_layers=0)}, "--layers = 0"),
        ({"model": replace(MODEL, seed=-1)}, "--seed = -1"),
        (
            {"model": replace(MODEL, hidden_size=136), "dispatch_dtype": DispatchDataType.FP8_E4M3},
            "--hidden = 136: must be a multiple of 128",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, object], words: str) -> None:
    CONFIG.check()
    with pytest.raises(ew.InvalidArgumentError, match=words):
        replace(CONFIG, **change).check()


# Model


def test_embedding_of_a_token_does_not_depend_on_the_share() -> None:
    model = Model(MODEL, range(0), 64)
    tokens = some_tokens(50)
    whole = model.embed(tokens, slice(0, 50))
    parts = [model.embed(tokens, slice(start, stop)) for start, stop in ((0, 1), (1, 20), (20, 20), (20, 50))]
    assert np.array_equal(np.concatenate(parts).view(np.uint16), whole.view(np.uint16))
    repeated = np.flatnonzero(tokens == tokens[-1])[:2]
    assert not np.array_equal(whole[repeated[0]], whole[repeated[1]]), "equal tokens must differ by their context"


def test_router_chooses_the_most_probable_experts() -> None:
    model = Model(MODEL, range(0), 64)
    states = model.normalize(model.embed(some_tokens(64), slice(0, 64)))
    routing = model.route(1, states)
    assert routing.topk_ids.shape == routing.weights.shape == (64, MODEL.num_topk)
    assert all(len(set(row)) == MODEL.num_topk for row in routing.topk_ids.tolist())
    assert np.all(np.diff(routing.weights, axis=1) <= 0)
    assert np.allclose(routing.weights.sum(axis=1), 1, atol=1e-6)
    assert np.array_equal(np.unique(routing.topk_ids), np.arange(MODEL.num_experts))


def test_expert_is_a_swiglu() -> None:
    model = Model(MODEL, range(2, 4), 8)
    rows = np.random.default_rng(0).standard_normal((5, MODEL.hidden_size)).astype(np.float32)
    parameters = model._experts[1][1]
    gate, up = np.split(rows.astype(np.float64) @ parameters.gate_up, 2, axis=1)
    expected = (gate / (1 + np.exp(-gate)) * up) @ parameters.down
    assert np.allclose(model.run_expert(1, 3, rows), expected, rtol=1e-4, atol=1e-5)


def test_an_expert_is_the_same_whoever_holds_it() -> None:
    rows = np.random.default_rng(0).standard_normal((5, MODEL.hidden_size)).astype(np.float32)
    alone, among = Model(MODEL, range(3, 4), 8), Model(MODEL, range(8), 32)
    assert np.array_equal(alone.run_expert(0, 3, rows), among.run_expert(0, 3, rows))


# Reference over a step


def step_records(config: JobConfig, tokens: np.ndarray, step: int = 0) -> list[list[LayerRecord]]:
    schedule = config.schedule(len(tokens))
    return list(
        ReferenceModel(config).run_step(tokens, [schedule.tokens(rank, step) for rank in range(config.num_ranks)])
    )


@pytest.mark.parametrize("dispatch_dtype", list(DispatchDataType))
def test_both_layouts_give_the_same_bits(dispatch_dtype: DispatchDataType) -> None:
    tokens = some_tokens(2 * 16)
    expert_major = replace(CONFIG, dispatch_dtype=dispatch_dtype)
    rank_major = replace(expert_major, layout=DispatchLayout.RANK_MAJOR)
    for ours, theirs in zip(step_records(expert_major, tokens), step_records(rank_major, tokens), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one.states.view(np.uint16), other.states.view(np.uint16))


def test_direct_send_differs_by_rounding_alone() -> None:
    tokens = some_tokens(2 * 16)
    local = step_records(CONFIG, tokens)[0]
    for layout in (DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR):
        sent = step_records(replace(CONFIG, layout=layout, combine_mode=CombineMode.DIRECT_SEND), tokens)[0]
        for one, other in zip(local, sent, strict=True):
            a, b = one.states.astype(np.float32), other.states.astype(np.float32)
            assert np.allclose(a, b, atol=0.1)
            assert not np.array_equal(a, b)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """Two steps of two ranks as the reference computes them, the second rank one token short."""
    tokens = some_tokens(61)
    made = create_board(tmp_path, CONFIG, tokens, num_checks=1)
    schedule = CONFIG.schedule(len(tokens))
    assert schedule.num_steps == 2
    for step in range(2):
        for layer, records in enumerate(step_records(CONFIG, tokens, step)):
            for rank, record in enumerate(records):
                made.write(layer, schedule.tokens(rank, step), record)
    return open_board(tmp_path)


def test_check_accepts_equal_bits(board: Board) -> None:
    schedule = CONFIG.schedule(61)
    assert [ReferenceModel(CONFIG).check_step(board, step, schedule) for step in range(2)] == [None, None]


def test_check_finds_one_flipped_bit(board: Board) -> None:
    schedule = CONFIG.schedule(61)
    token = schedule.tokens(1, 1).start + 2
    board.states[1, token, 77] ^= 1
    board.states[1, token, 78] ^= 1
    checker = ReferenceModel(CONFIG)
    assert checker.check_step(board, 0, schedule) is None
    found = checker.check_step(board, 1, schedule)
    assert found is not None
    assert (found.step, found.layer, found.token, found.what, found.element) == (1, 1, token, "states", 77)
    assert found.found != found.expected


def test_check_finds_wrong_routing_before_wrong_states(board: Board) -> None:
    board.states[0, 4, 0] ^= 1
    board.weights[0, 3, 2] = np.nextafter(board.weights[0, 3, 2], np.float32(1))
    found = ReferenceModel(CONFIG).check_step(board, 0, CONFIG.schedule(61))
    assert found is not None
    assert (found.token, found.what, found.element) == (3, "weights", 2)
    board.topk_ids[0, 5, 1] += 1
    found = ReferenceModel(CONFIG).check_step(board, 0, CONFIG.schedule(61))
    assert found is not None
    assert (found.token, found.what, found.found - found.expected) == (5, "topk_ids", 1)


# Trace


def make_trace(num_experts: int = 8) -> RoutingTrace:
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((2, 7, num_experts)), axis=-1)[..., :3].astype(np.int32)
    info = TraceInfo(num_experts, 128, num_ranks=2, max_tokens_per_rank=4, seed=1, source="a text")
    return RoutingTrace(ids, rng.random((2, 7, 3), np.float32), np.array([0, 3, 7]), info)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.int16), (40_000, np.int32)])
def test_trace_round_trip(tmp_path: Path, num_experts: int, dtype: type) -> None:
    trace, path = make_trace(num_experts), tmp_path / "trace.bin"
    save_trace(path, trace)
    loaded = load_trace(path)
    assert loaded.topk_ids.dtype == dtype
    assert np.array_equal(loaded.topk_ids, trace.topk_ids)
    assert np.array_equal(loaded.weights, trace.weights)
    assert loaded.rank_offsets.tolist() == [0, 3, 7]
    assert loaded.info == trace.info


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not a zip"])
def test_other_files_are_not_traces(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ew.InvalidArgumentError, match="not a routing trace"):
        load_trace(path)


def test_other_arrays_are_not_traces(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", topk_ids=np.zeros(3))
    with pytest.raises(ew.InvalidArgumentError, match="not a routing trace"):
        load_trace(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_ids": np.full((2, 7, 3), 8, np.int32)}, "topk_ids holds 8: must be below num_experts = 8"),
        ({"weights": np.zeros((2, 7, 2), np.float32)}, "like topk_ids"),
        ({"rank_offsets": np.array([0, 7])}, "rank_offsets"),
        ({"rank_offsets": np.array([0, 3, 8])}, "rank_offsets"),
    ],
)
def test_inconsistent_traces_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    save_trace(tmp_path / "x.npz", replace(make_trace(), **change))
    with pytest.raises(ew.InvalidArgumentError, match=words):
        load_trace(tmp_path / "x.npz")


# Report


def test_percentiles_are_in_microseconds() -> None:
    values = percentiles(np.arange(101) * 1e-6)
    assert {name: round(value) for name, value in values.items()} == {"min": 0, "median": 50, "p99": 99, "max": 100}


def test_line_progress_tells_each_quarter_once() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    progress = LineProgress(console)
    progress.begin("ranks", 100)
    for done in (0, 10, 26, 27, 80, 100, 100):
        progress.update(done)
    progress.end()
    assert [line.split()[1] for line in console.export_text().splitlines()] == ["26", "80", "100"]
