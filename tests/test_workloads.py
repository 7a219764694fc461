"""How tokens choose experts: distinct within a token, repeatable, and with the load that the name promises."""

from __future__ import annotations

import numpy as np
import pytest

import expertwire as ew
from expertwire.bench.workloads import OBSERVED_LOAD, WORKLOADS, make_topk_ids

KINDS = ("uniform", "zipf:0", "zipf:1.2", "zipf:400", "one-hot", "empty-experts", "observed-skew")


def _ids(routing: str, num_tokens: int, num_experts: int, num_topk: int) -> np.ndarray:
    return make_topk_ids(routing, np.random.default_rng(5), num_tokens, num_experts, num_topk)


@pytest.mark.parametrize("routing", KINDS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_ids_are_valid_distinct_and_repeatable(routing: str, workload: object) -> None:
    shape = (workload.num_tokens, workload.num_experts, workload.num_topk)
    ids = _ids(routing, *shape)
    assert ids.shape == (shape[0], shape[2])
    assert ids.dtype == np.int64
    assert ids.flags.c_contiguous
    assert ids.min() >= 0
    assert ids.max() < shape[1]
    assert all(len(set(token)) == shape[2] for token in ids.tolist())
    assert np.array_equal(ids, _ids(routing, *shape))


def _load(routing: str, num_experts: int) -> np.ndarray:
    return np.bincount(_ids(routing, 40_000, num_experts, 1)[:, 0], minlength=num_experts) / 40_000


def test_load_follows_the_name() -> None:
    assert np.abs(_load("uniform", 8) * 8 - 1).max() < 0.1
    assert _load("one-hot", 8).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert np.abs(_load("empty-experts", 8) - np.repeat([0.25, 0], 4)).max() < 0.02
    harmonic = 1 / np.arange(1, 9)
    assert np.abs(_load("zipf:1", 8) - harmonic / harmonic.sum()).max() < 0.02


@pytest.mark.parametrize("num_experts", [4, 16, 24])
def test_observed_load_is_stretched(num_experts: int) -> None:
    fine = np.repeat(np.array(OBSERVED_LOAD) / sum(OBSERVED_LOAD), num_experts) / num_experts
    wanted = fine.reshape(num_experts, len(OBSERVED_LOAD)).sum(axis=1)
    assert np.abs(_load("observed-skew", num_experts) - wanted).max() < 0.02


def test_one_hot_gives_every_token_the_same_experts() -> None:
    assert {frozenset(token) for token in _ids("one-hot", 50, 16, 3).tolist()} == {frozenset({0, 1, 2})}


@pytest.mark.parametrize("routing", ["", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:inf", "Uniform", "one_hot"])
def test_unknown_routings_are_refused(routing: str) -> None:
    with pytest.raises(ew.InvalidArgumentError, match="routing"):
        _ids(routing, 4, 8, 2)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ew.InvalidArgumentError, match="num_topk = 9"):
        _ids("uniform", 4, 8, 9)
