"""Properties of any exchange, whatever its shape: drawn by hypothesis, carried out by threads on the CPU backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import expertwire as ew
from bits import assert_same_bits, valid_rows
from cases import EXPERT_MAJOR, QUANTS, RANK_MAJOR, WAYS, Case
from driving import (
    Received,
    assert_received,
    dispatch,
    exchange,
    expected,
    float_rows,
    local_experts,
    run_threads,
)
from expertwire import reference
from expertwire.reference import BF16, RankInput
from expertwire.types import CombineMode, DispatchOutput

EXAMPLES = settings(max_examples=100)


@st.composite
def shapes(draw: st.DrawFn, quantised: bool = True) -> Case:
    """Draw a case of up to five ranks with any placement, token counts, routing and payload."""
    num_ranks = draw(st.integers(1, 5))
    experts = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks).filter(any))
    layout, mode = draw(st.sampled_from(WAYS))
    fp8 = quantised and draw(st.booleans())
    return Case(
        name=f"drawn-{draw(st.integers(0, 2**20))}",
        tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))),
        num_experts=sum(experts),
        hidden_size=128 * draw(st.integers(1, 5)) if fp8 else 8 * draw(st.integers(1, 20)),
        num_topk=draw(st.integers(1, min(sum(experts), 6))),
        max_tokens=draw(st.integers(9, 12)),
        experts_per_rank=tuple(experts),
        layout=layout,
        combine_mode=mode,
        quant=draw(st.sampled_from([*QUANTS.values()])) if fp8 else ew.QuantConfig(),
        ids=draw(st.sampled_from(["uniform", "half", "none", "zipf:2", "empty-experts"])),
        ids_dtype=draw(st.sampled_from(["int32", "int64"])),
        weights=draw(st.sampled_from(["equal", "none", "router", "zeros", "negative", "denormal", "mixed"])),
        new_weights=draw(st.sampled_from(["", "all", "even-ranks"])) if layout is EXPERT_MAJOR else "",
    )


@EXAMPLES
@given(case=shapes())
def test_any_exchange_equals_the_reference(case: Case) -> None:
    got = run_threads(_exchange_once, case.num_ranks, case, case.inputs())
    assert_received(got, expected(case.config, case.inputs(), case.replaced_weights()), case.name)


def _exchange_once(group: ew.Group, case: Case, inputs: list[RankInput]) -> Received:
    new_weights = case.replaced_weights()
    with ew.MoECommunicator(group, case.config) as comm:
        return exchange(comm, inputs[group.rank], new_weights[group.rank] if new_weights else None)


@EXAMPLES
@given(case=shapes(quantised=False))
def test_every_selected_row_arrives_once_and_in_order(case: Case) -> None:
    """No reference here: rows carry their origin, and what arrives is counted against what was asked for."""
    inputs = [replace(own, x=_rows_with_origin(rank, *own.x.shape)) for rank, own in enumerate(case.inputs())]
    wanted = Counter(
        (expert, rank, token)
        for rank, own in enumerate(inputs)
        for token, ids in enumerate(own.topk_ids.tolist())
        for expert in ids
        if expert >= 0
    )
    arrived: Counter[tuple[int, int, int]] = Counter()
    for results in run_threads(_arrivals, case.num_ranks, case, inputs):
        arrived.update(results)
    assert arrived == wanted


def _rows_with_origin(rank: int, num_tokens: int, hidden_size: int) -> np.ndarray:
    """Return bfloat16 rows of alternating 1 + rank and 1 + token."""
    x = np.empty((num_tokens, hidden_size), np.float32)
    x[:, 0::2], x[:, 1::2] = 1 + rank, 1 + np.arange(num_tokens)[:, None]
    return x.astype(BF16)


def _arrivals(group: ew.Group, case: Case, inputs: list[RankInput]) -> list[tuple[int, int, int]]:
    """Return (expert, source rank, token) of every row of this rank; each must be whole and in its place."""
    arrivals = []
    with ew.MoECommunicator(group, case.config) as comm:
        out, _ = dispatch(comm, inputs[group.rank])
        for where in valid_rows(out):
            rows = np.asarray(out.tokens[where]).astype(np.float32).astype(int)
            origins = [(int(row[0]) - 1, int(row[1]) - 1) for row in rows]
            for row, (source, token) in zip(rows, origins, strict=True):
                assert (row[0::2] == 1 + source).all()
                assert (row[1::2] == 1 + token).all()
            assert origins == sorted(set(origins))
            if case.layout is RANK_MAJOR:
                local = [[int(e) for e in ids if e >= 0] for ids in np.asarray(out.topk_ids)[where]]
                arrivals += [(e, *origin) for origin, ids in zip(origins, local, strict=True) for e in ids]
                assert all(e in local_experts(comm) for ids in local for e in ids)
                assert all(local)
            else:
                expert = comm.first_local_expert + where[0]
                assert np.asarray(out.source_token)[where].tolist() == [s * case.max_tokens + t for s, t in origins]
                arrivals += [(expert, *origin) for origin in origins]
    return arrivals


@EXAMPLES
@given(case=shapes(quantised=False))
def test_identity_experts_return_x_times_the_sum_of_weights(case: Case) -> None:
    inputs = case.inputs()
    combined = run_threads(_identity, case.num_ranks, case, inputs)
    outputs = reference.dispatch(case.config, inputs)
    wanted = reference.combine(case.config, inputs, [_unchanged(case, out) for out in outputs])
    for rank, (own, y) in enumerate(zip(inputs, combined, strict=True)):
        assert_same_bits(y, wanted[rank], f"combine on rank {rank}")
        weights = np.ones(own.topk_ids.shape) if own.weights is None else own.weights.astype(np.float64)
        weights = np.where(own.topk_ids >= 0, weights, 0.0)
        x = own.x.astype(np.float64)
        bound = np.abs(weights).sum(axis=1)[:, None] * np.abs(x) * 2.0**-6 + 1e-38
        assert (np.abs(y.astype(np.float64) - weights.sum(axis=1)[:, None] * x) <= bound).all()


def _identity(group: ew.Group, case: Case, inputs: list[RankInput]) -> np.ndarray:
    with ew.MoECommunicator(group, case.config) as comm:
        out, handle = dispatch(comm, inputs[group.rank])
        return np.asarray(comm.combine(_unchanged(case, out), handle))


def _unchanged(case: Case, out: DispatchOutput) -> np.ndarray:
    """Return what experts that change nothing answer; RANK_MAJOR asks the caller to weight (and to reduce)."""
    if case.layout is EXPERT_MAJOR:
        return np.asarray(out.tokens)
    direct = case.combine_mode is CombineMode.DIRECT_SEND
    answer = np.zeros((len(out.tokens), case.num_topk, case.hidden_size) if direct else out.tokens.shape, BF16)
    for where in valid_rows(out):
        rows, weights = float_rows(out, where), np.asarray(out.weights)[where]
        weighted = rows[:, None, :] * weights[:, :, None]
        answer[where] = (weighted if direct else weighted.sum(axis=1)).astype(BF16)
    return answer
