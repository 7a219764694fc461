"""The formula of docs/layout.md, written out once more, against what a communicator says it holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import expertwire as ew
from driving import run_threads
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout, MoEMemoryBytes, QuantConfig, ScaleFormat

FORMATS = {
    "bf16": QuantConfig(),
    "fp8": QuantConfig(format=DispatchDataType.FP8_E4M3),
    "ue8m0": QuantConfig(format=DispatchDataType.FP8_E4M3, scale_format=ScaleFormat.UE8M0),
    "mxfp8": QuantConfig(format=DispatchDataType.MXFP8),
}


@dataclass(frozen=True)
class Problem:
    layout: DispatchLayout
    combine_mode: CombineMode
    row_format: str
    hidden_size: int
    num_topk: int
    experts_per_rank: tuple[int, ...]
    max_tokens_per_rank: int
    max_in_flight: int = 1

    def create(self, group: ew.Group) -> MoEMemoryBytes:
        with ew.MoECommunicator(
            group,
            num_experts=sum(self.experts_per_rank),
            hidden_size=self.hidden_size,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens_per_rank,
            experts_per_rank=self.experts_per_rank,
            output_layout=self.layout,
            combine_mode=self.combine_mode,
            quant=FORMATS[self.row_format],
            max_in_flight=self.max_in_flight,
        ) as comm:
            return comm.memory_bytes()


def align(count: int, alignment: int = 128) -> int:
    return (count + alignment - 1) // alignment * alignment


def shared_bytes(problem: Problem) -> int:
    ranks, tokens, topk = len(problem.experts_per_rank), problem.max_tokens_per_rank, problem.num_topk
    payload, scales = row_parts(problem)
    row_bytes = align(align(payload, 16) + scales, 64)
    direct = problem.combine_mode is CombineMode.DIRECT_SEND
    slots = min(topk, max(problem.experts_per_rank)) if direct else 1
    dispatch = align(4 * ranks) + align(4 * ranks * tokens) + 2 * align(4 * tokens * topk) + align(tokens * row_bytes)
    combine = 128 + align(4 * tokens * topk) + align(ranks * tokens * slots * align(2 * problem.hidden_size, 64))
    return 4096 + problem.max_in_flight * (3 * 128 + 2 * dispatch + 2 * combine)


def row_parts(problem: Problem) -> tuple[int, int]:
    hidden = problem.hidden_size
    scales = {"bf16": 0, "fp8": 4 * hidden // 128, "ue8m0": 4 * align(hidden, 512) // 512, "mxfp8": hidden // 32}
    return hidden * (2 if problem.row_format == "bf16" else 1), scales[problem.row_format]


def output_bytes(problem: Problem, num_local: int) -> int:
    ranks, tokens, topk = len(problem.experts_per_rank), problem.max_tokens_per_rank, problem.num_topk
    payload, scales = row_parts(problem)
    rows = combine_rows = ranks * tokens
    if problem.layout is DispatchLayout.EXPERT_MAJOR:
        rows = combine_rows = num_local * rows
        counts = align(4 * num_local) + align(8 * num_local * ranks) + align(4 * rows)
    else:
        combine_rows *= topk if problem.combine_mode is CombineMode.DIRECT_SEND else 1
        counts = align(4 * ranks) + 2 * align(4 * rows * topk)
    groups = num_local if problem.layout is DispatchLayout.EXPERT_MAJOR else 1
    scale_rows = groups * align(ranks * tokens, 4)
    lane = align(rows * payload) + align(scale_rows * scales) + counts + align(2 * problem.hidden_size * combine_rows)
    return problem.max_in_flight * lane


def private_bytes(problem: Problem) -> int:
    ranks, tokens, topk = len(problem.experts_per_rank), problem.max_tokens_per_rank, problem.num_topk
    sent, received = tokens * min(topk, ranks), ranks * tokens
    selected = received * min(topk, max(problem.experts_per_rank))
    lane = (
        align(4 * tokens) + 2 * align(4 * sent) + align(4 * ranks) + 2 * align(4 * received) + 3 * align(4 * selected)
    )
    return problem.max_in_flight * lane


@pytest.mark.parametrize("combine_mode", CombineMode)
@pytest.mark.parametrize("layout", [DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR])
@pytest.mark.parametrize("row_format", FORMATS)
def test_the_formula_is_what_a_communicator_holds(
    row_format: str, layout: DispatchLayout, combine_mode: CombineMode
) -> None:
    problem = Problem(layout, combine_mode, row_format, 640, 3, (4, 0, 5), 7, max_in_flight=2)
    for rank, held in enumerate(run_threads(problem.create, 3)):
        assert held.shared == shared_bytes(problem)
        assert held.outputs == output_bytes(problem, problem.experts_per_rank[rank])
        assert held.private == private_bytes(problem)


def test_eight_ranks_of_a_large_model_share_at_most_64_megabytes() -> None:
    problem = Problem(DispatchLayout.EXPERT_MAJOR, CombineMode.RANK_LOCAL_REDUCE, "bf16", 7168, 8, (32,) * 8, 128)
    assert shared_bytes(problem) == 33_067_904
    assert shared_bytes(problem) <= 64_000_000
