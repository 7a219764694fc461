"""``torch-a2a``: what one writes without a library: sort by expert, all_to_all_single of counts and rows, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from expertwire import reference
from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.adapters.peer import far_apart
from expertwire.bench.adapters.torch_group import process_group
from expertwire.bench.inputs import Observation, expert_rows, first_difference, reference_observations, row_digests
from expertwire.bench.schema import Problem, Settings
from expertwire.bench.torch_arrays import to_numpy, to_tensor
from expertwire.machine import usable_cores
from expertwire.reference import RankInput
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout


class TorchAllToAll(Adapter):
    """The straightforward exchange over ``torch.distributed``, with NCCL on GPUs and Gloo on CPUs.

    torch is imported by the process that measures, never by the one that asked for the benchmark.
    """

    name = "torch-a2a"
    blocking = "counts are read on the host"
    notes = (
        "NCCL on GPUs, Gloo on CPUs; sort, all_to_all_single of counts and rows, expert-major rows, and back, float32 "
        "weighted sum at the source; one row per (token, expert); expert-major whatever --layout says"
    )

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings) -> str:
        """Return what is missing: torch, a process per rank, or BF16 payload."""
        if find_spec("torch") is None:
            return "not installed: pip install torch"
        if settings.threads:
            return "torch.distributed has one rank per process: use --processes"
        if problem.dispatch_dtype is not DispatchDataType.BF16:
            return "exchanges BF16 rows only: use --dispatch-dtype bf16"
        return ""

    @classmethod
    def expected(cls, problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
        """Return what EXPERT_MAJOR with DIRECT_SEND gives: the counts, the rows in that order, and the sums."""
        done = replace(problem, layout=DispatchLayout.EXPERT_MAJOR, combine_mode=CombineMode.DIRECT_SEND)
        kept = ("num_tokens_per_expert", "tokens")
        observations = reference_observations(done, inputs)
        return [Observation({name: seen.dispatch[name] for name in kept}, seen.combined) for seen in observations]

    @classmethod
    def difference(cls, observed: Observation, expected: Observation) -> str:
        """Return what is wrong. Rows count bit for bit; the sums have another order and may differ by one rounding."""
        if wrong := first_difference(Observation(observed.dispatch, expected.combined), expected):
            return wrong
        return far_apart(observed.combined, expected.combined, relative=2.0**-7, of_largest=2.0**-20)

    def __init__(self, context: RankContext) -> None:
        import torch

        self._torch, self._dist, self._context = torch, process_group(context), context
        problem, group, own, device = context.problem, context.group, context.own, context.device
        if device == "cpu":
            torch.set_num_threads(max(1, usable_cores() // group.size))
        self._experts = list(problem.experts_per_rank)
        self._num_local_experts = self._experts[group.rank]
        self._x = to_tensor(own.x, device)
        self._topk_ids = to_tensor(own.topk_ids.reshape(-1), device)
        weights = np.ones(own.topk_ids.shape, np.float32) if own.weights is None else own.weights
        self._weights = to_tensor(weights, device)

    def dispatch(self) -> None:
        """Sort, exchange counts, exchange rows, place them by expert."""
        torch, dist, problem, device = self._torch, self._dist, self._context.problem, self._context.device
        ids = self._topk_ids
        order = torch.argsort(ids, stable=True)  # negative ids, which select nothing, come first
        counts = torch.bincount(ids.clamp(min=-1) + 1, minlength=problem.num_experts + 1)
        received_counts = torch.empty(self._num_local_experts * problem.num_ranks, dtype=torch.int64, device=device)
        out_split, in_split = self._experts, [self._num_local_experts] * problem.num_ranks
        dist.all_to_all_single(received_counts, counts[1:], in_split, out_split)
        num_unused, *counts_out = counts.tolist()
        self._order = order[num_unused:]
        ends = np.cumsum([0, *out_split])
        self._rows_out = [sum(counts_out[first:last]) for first, last in itertools.pairwise(ends)]
        self._rows_in = received_counts.view(problem.num_ranks, self._num_local_experts).sum(dim=1).tolist()

        rows = self._x.index_select(0, self._order // problem.num_topk)
        received = torch.empty((sum(self._rows_in), problem.hidden_size), dtype=torch.bfloat16, device=device)
        dist.all_to_all_single(received, rows, self._rows_in, self._rows_out)
        experts = torch.arange(self._num_local_experts, device=device).repeat(problem.num_ranks)
        experts = experts.repeat_interleave(received_counts)
        self._place = torch.argsort(experts, stable=True)
        self._tokens = received.index_select(0, self._place)
        self._counts = torch.bincount(experts, minlength=self._num_local_experts)

    def apply_experts(self) -> None:
        """Fill a tensor in the order of the received tokens."""
        context = self._context
        experts = reference.experts_of_ranks(context.problem.config(), context.problem.num_ranks)[context.group.rank]
        expert_ids = np.repeat(np.asarray(experts), self._counts.cpu().numpy())
        outputs = expert_rows(context.problem, to_numpy(self._tokens), expert_ids)
        self._expert_output = to_tensor(outputs, context.device)

    def combine(self) -> None:
        """Undo the placement, exchange rows, sum at the source."""
        torch, problem = self._torch, self._context.problem
        back = torch.empty_like(self._expert_output).index_copy_(0, self._place, self._expert_output)
        returned = back.new_empty((len(self._order), problem.hidden_size))
        self._dist.all_to_all_single(returned, back, self._rows_out, self._rows_in)
        num_slots = problem.num_tokens * problem.num_topk
        make = back.new_empty if len(self._order) == num_slots else back.new_zeros
        slots = make((num_slots, problem.hidden_size)).index_copy_(0, self._order, returned)
        rows = slots.view(problem.num_tokens, problem.num_topk, -1).float()
        self._combined = torch.bmm(self._weights[:, None, :], rows).squeeze(1).bfloat16()

    def observe(self) -> Observation:
        """Return counts and rows by expert, and the sums."""
        tokens, counts = to_numpy(self._tokens), self._counts.cpu().numpy().astype(np.int32)
        return Observation({"num_tokens_per_expert": counts, "tokens": row_digests(tokens)}, to_numpy(self._combined))

    def forget(self) -> None:
        """Drop the outputs: every pair makes new ones."""
        del self._combined, self._tokens

    def close(self) -> None:
        """Leave the process group to the next problem."""
