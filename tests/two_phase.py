"""Exchanges in two phases: what was sent is spoilt at once, since nothing may look at it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_memory_order
from cases import ALL_CASES, EXPERT_MAJOR, REDUCE, Case
from driving import Received, copy_output, expected_of_case, expert_output, local_experts, poison
from expertwire.reference import BF16, RankInput

SMALL = Case("two-phase", (5, 3, 6), num_experts=9, hidden_size=48, num_topk=3, max_tokens=6, max_in_flight=2)

# Two micro-batches: what is sent (D, C) and received (d, c) of each in turn.
ORDERS = [
    "D0 D1 d0 d1 C0 C1 c0 c1",
    "D0 D1 d1 d0 C1 C0 c0 c1",
    "D0 d0 C0 D1 c0 d1 C1 c1",
    "D0 d0 C0 D1 d1 c0 C1 c1",
    "D0 d0 C0 D1 d1 C1 c1 c0",
]


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
