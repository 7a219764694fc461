"""Traces that are no traces: all are refused when they are read, in one line with the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from expertwire.trace import load_trace

Stored = dict[str, Any]
META = {"format": "expertwire-routing", "version": 1, "num_experts": 8, "hidden_size": 128, "num_ranks": 2}
META |= {"max_tokens_per_rank": 4, "seed": 1, "source": "a text"}


def stored() -> Stored:
    """The arrays of a small trace."""
    ids = np.array([[[0, 1, 2], [3, -1, -1], [7, 6, 5]], [[1, 0, 2], [-1, -1, -1], [5, 4, 3]]], np.int16)
    return {"topk_ids": ids, "weights": np.full(ids.shape, 0.25, np.float32), "rank_offsets": np.array([0, 1, 3])}


def save(path: Path, arrays: Stored, meta: object) -> None:
    np.savez_compressed(path, **arrays, meta=np.array(json.dumps(meta)))


def refusal(path: Path) -> str:
    with pytest.raises(ew.InvalidArgumentError) as raised:
        load_trace(path)
    assert str(raised.value).startswith(f"{path}: not a routing trace written by expertwire run (")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_negative_ids_select_nothing_and_may_repeat(tmp_path: Path) -> None:
    save(tmp_path / "x.npz", stored(), META)
    assert np.array_equal(load_trace(tmp_path / "x.npz").topk_ids, stored()["topk_ids"])


@pytest.mark.parametrize("wrong", ["8", 8.0, True, None, 0, -8, [8]])
@pytest.mark.parametrize("name", ["num_experts", "hidden_size", "num_ranks", "max_tokens_per_rank"])
def test_sizes_are_whole_numbers_of_at_least_1(tmp_path: Path, name: str, wrong: object) -> None:
    save(tmp_path / "x.npz", stored(), {**META, name: wrong})
    assert f"{name} is {wrong!r}: must be a whole number of at least 1" in refusal(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "meta", [[], "text", None, {}, {**META, "more": 1}, {**META, "version": 2}, {**META, "seed": "1"}]
)
def test_what_a_trace_is_of_is_said_in_full(tmp_path: Path, meta: object) -> None:
    save(tmp_path / "x.npz", stored(), meta)
    refusal(tmp_path / "x.npz")


def with_value(name: str, place: tuple[int, ...], value: float) -> Callable[[Stored], Stored]:
    def change(arrays: Stored) -> Stored:
        arrays[name][place] = value
        return arrays

    return change


def with_array(**arrays: Any) -> Callable[[Stored], Stored]:
    return lambda others: others | arrays


REFUSED = {
    "an expert twice": (with_value("topk_ids", (1, 2, 0), 3), "names expert 3 twice for token 2 of layer 1"),
    "no layers": (
        with_array(topk_ids=np.zeros((0, 3, 3), np.int16), weights=np.zeros((0, 3, 3), np.float32)),
        "topk_ids is int16[0, 3, 3]: must be int16 or int32 [L, T, K], none of them 0",
    ),
    "offsets fall": (with_array(rank_offsets=np.array([0, 5, 3])), "rank_offsets must rise from 0"),
    "offsets below 0": (with_array(rank_offsets=np.array([0, -1, 3])), "rank_offsets must rise from 0"),
    "offsets are floats": (with_array(rank_offsets=np.array([0, 1.5, 3])), "rank_offsets is float64[3]: must be int64"),
    "weights NaN": (with_value("weights", (0, 1, 2), np.nan), "weights holds what is no finite number"),
    "weights infinite": (with_value("weights", (1, 0, 0), np.inf), "weights holds what is no finite number"),
    "objects": (with_array(topk_ids=np.array([[[None]]])), "allow_pickle"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_arrays_that_cannot_be_replayed_are_refused(
    tmp_path: Path, change: Callable[[Stored], Stored], said: str
) -> None:
    save(tmp_path / "x.npz", change(stored()), META)
    assert said in refusal(tmp_path / "x.npz")


def test_a_spoiled_byte_anywhere_is_refused_or_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    save(path, stored(), META)
    content, whole = path.read_bytes(), load_trace(path)
    refusals = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            trace = load_trace(path)
        except ew.InvalidArgumentError as error:
            refusals.append(str(error))
        else:
            assert np.array_equal(trace.topk_ids, whole.topk_ids)
            assert np.array_equal(trace.weights, whole.weights)
            assert trace.info == whole.info
    assert len(refusals) > len(content) / 2
    assert not [said for said in refusals if "\n" in said]


def test_a_file_that_is_not_there_is_another_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "x.npz")
