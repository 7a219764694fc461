"""What eight GPUs are predicted to need, from measurements of two and from the bytes that cross.

A pair needs a fixed time, which does not depend on bytes, and the wire's: bytes that a GPU sends over what it can send
a second. The fixed time is what two GPUs needed, less their wire's.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb

from tables import markdown

from expertwire.bench.rows import Row, workload_name
from expertwire.bench.schema import Problem
from expertwire.bench.workloads import WORKLOADS
from expertwire.types import CombineMode, DispatchDataType

NUM_RANKS = 8
#: What the kernels of one GPU write to another over NVLink of an H200, each way.
GB_PER_S = 370.0
#: What has been published for eight GPUs of another library, us a pair, by shape and layout.
PUBLISHED = {("mscclpp-latency", "expert_major"): 51.08, ("mscclpp-latency", "rank_major"): 40.95}
#: What this library is to stay below.
BARS = {("mscclpp-latency", "expert_major"): 27.0, ("mscclpp-latency", "rank_major"): 24.0}
ONE_TOKEN = "single-token"


def rows_sent(problem: Problem) -> float:
    """Return how many rows a GPU is expected to send one way: a token goes to each other rank that it chose.

    K different experts, each set equally likely, E / R experts a rank.
    """
    own = problem.num_experts // problem.num_ranks
    missed = comb(problem.num_experts - own, problem.num_topk) / comb(problem.num_experts, problem.num_topk)
    return problem.num_tokens * (problem.num_ranks - 1) * (1 - missed)


def megabytes(problem: Problem) -> float:
    """Return what a GPU sends one way, 10^6 bytes: as many rows are dispatched as come back, all BF16."""
    return rows_sent(problem) * problem.hidden_size * 2 / 1e6


def wire_us(problem: Problem) -> float:
    """Return how long a pair's bytes take on the wire: one way, then the other."""
    return 2 * megabytes(problem) / GB_PER_S * 1e3


def fixed_us(row: Row) -> float:
    """Return what is left of a measured pair without its wire."""
    return row.figures.median_us - wire_us(row.problem)


def prediction_table(pairs: list[Row]) -> str:
    """Return a row for each shape and layout that two GPUs were measured with and that eight can hold."""
    ours = [row for row in pairs if row.lib == "expertwire" and row.phase == "pair" and _is_plain(row.problem)]
    one_token = {row.problem.layout: fixed_us(row) for row in ours if workload_name(row.problem) == ONE_TOKEN}
    lines = []
    for row in sorted(ours, key=lambda row: list(WORKLOADS).index(workload_name(row.problem))):
        name, layout = workload_name(row.problem), row.problem.layout
        eight = replace(row.problem, num_ranks=NUM_RANKS)
        ends = sorted(wire_us(eight) + fixed for fixed in (fixed_us(row), one_token.get(layout, fixed_us(row))))
        lines.append([
            *(name, layout.value.replace("_", "-"), f"{row.figures.median_us:.1f}", f"{wire_us(row.problem):.1f}"),
            *(f"{megabytes(eight):.2f}", f"{wire_us(eight):.1f}", f"**{ends[0]:.1f} to {ends[1]:.1f}**"),
            *(f"{table[name, layout.value]:g}" if (name, layout.value) in table else "" for table in (BARS, PUBLISHED)),
        ])  # fmt: skip
    headings = ["shape", "layout", "2 GPUs, measured", "wire of 2", "8 GPUs, MB each way", "wire of 8"]
    return markdown([*headings, "8 GPUs, **predicted**", "our bar", "another library, published"], lines)


def _is_plain(problem: Problem) -> bool:
    """Whether a problem is a named shape on two GPUs, BF16, summed where the experts are, that eight can hold."""
    plain = (2, CombineMode.RANK_LOCAL_REDUCE, DispatchDataType.BF16, (), "uniform")
    its = (problem.num_ranks, problem.combine_mode, problem.dispatch_dtype, problem.num_blocks, problem.routing)
    return its == plain and bool(workload_name(problem)) and problem.num_experts % NUM_RANKS == 0
