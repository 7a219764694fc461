"""``torch-a2a``: what one writes without a library: sort by expert, all_to_all_single of counts and rows, and back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertwire import reference
from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.inputs import Observation, expert_rows, first_difference, reference_observations, row_digests
from expertwire.bench.schema import Problem, Settings
from expertwire.machine import usable_cores
from expertwire.reference import BF16, RankInput
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout


class TorchAllToAll(Adapter):
    """The straightforward exchange over ``torch.distributed`` with Gloo.

    torch is imported by the process that measures, never by the one that asked for the benchmark.
    """

    name = "torch-a2a"
    notes = (
        "Gloo; sort, all_to_all_single of counts and rows, expert-major rows, and back, float32 weighted sum at the "
        "source; one row per (token, expert); expert-major whatever --layout says"
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
        got, wanted = observed.combined.astype(np.float32), expected.combined.astype(np.float32)
        if got.shape != wanted.shape:
            return f"combined tokens: shape {got.shape}, expected {wanted.shape}"
        largest = np.abs(wanted).max(initial=0.0)
        allowed = 2.0**-7 * np.maximum(np.abs(got), np.abs(wanted)) + 2.0**-20 * largest
        wrong_at = np.argwhere(~(np.abs(got - wanted) <= allowed)).tolist()
        return f"combined tokens{wrong_at[0]} differ by more than one rounding ({len(wrong_at)})" if wrong_at else ""

    def __init__(self, context: RankContext) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._context = torch, dist, context
        problem, group = context.problem, context.group
        torch.set_num_threads(max(1, usable_cores() // group.size))
        self._folder = tempfile.mkdtemp(prefix="expertwire-") if group.rank == 0 else ""
        folder = context.exchange(self._folder.encode())[0].decode()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), group.size),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=context.settings.timeout_s),
        )
        self._experts = list(problem.experts_per_rank)
        self._num_local_experts = self._experts[group.rank]
        self._x = _from_bf16(torch, context.own.x)
        self._topk_ids = torch.from_numpy(context.own.topk_ids.reshape(-1))
        weights = context.own.weights
        self._weights = torch.from_numpy(
            np.ones(context.own.topk_ids.shape, np.float32) if weights is None else weights
        )

    def dispatch(self) -> None:
        """Sort, exchange counts, exchange rows, place them by expert."""
        torch, dist, problem = self._torch, self._dist, self._context.problem
        ids = self._topk_ids
        order = torch.argsort(ids, stable=True)  # negative ids, which select nothing, come first
        counts = torch.bincount(ids.clamp(min=-1) + 1, minlength=problem.num_experts + 1)
        counts, num_unused = counts[1:], int(counts[0])
        self._order = order[num_unused:]
        received_counts = torch.empty(self._num_local_experts * problem.num_ranks, dtype=torch.int64)
        dist.all_to_all_single(received_counts, counts, [self._num_local_experts] * problem.num_ranks, self._experts)
        self._rows_out = [int(part.sum()) for part in counts.split(self._experts)]
        self._rows_in = received_counts.view(problem.num_ranks, self._num_local_experts).sum(dim=1).tolist()

        rows = self._x.index_select(0, self._order // problem.num_topk)
        received = torch.empty((sum(self._rows_in), problem.hidden_size), dtype=torch.bfloat16)
        dist.all_to_all_single(received, rows, self._rows_in, self._rows_out)
        experts = torch.arange(self._num_local_experts).repeat(problem.num_ranks).repeat_interleave(received_counts)
        self._place = torch.argsort(experts, stable=True)
        self._tokens = received.index_select(0, self._place)
        self._counts = torch.bincount(experts, minlength=self._num_local_experts)

    def apply_experts(self) -> None:
        """Fill a tensor in the order of the received tokens."""
        context = self._context
        experts = reference.experts_of_ranks(context.problem.config(), context.problem.num_ranks)[context.group.rank]
        expert_ids = np.repeat(np.asarray(experts), self._counts.numpy())
        outputs = expert_rows(context.problem, _to_bf16(self._torch, self._tokens), expert_ids)
        self._expert_output = _from_bf16(self._torch, outputs)

    def combine(self) -> None:
        """Undo the placement, exchange rows, sum at the source."""
        torch, problem = self._torch, self._context.problem
        back = torch.empty_like(self._expert_output).index_copy_(0, self._place, self._expert_output)
        returned = torch.empty((len(self._order), problem.hidden_size), dtype=torch.bfloat16)
        self._dist.all_to_all_single(returned, back, self._rows_out, self._rows_in)
        num_slots = problem.num_tokens * problem.num_topk
        make = torch.empty if len(self._order) == num_slots else torch.zeros
        slots = make((num_slots, problem.hidden_size), dtype=torch.bfloat16).index_copy_(0, self._order, returned)
        rows = slots.view(problem.num_tokens, problem.num_topk, -1).float()
        self._combined = torch.bmm(self._weights[:, None, :], rows).squeeze(1).bfloat16()

    def observe(self) -> Observation:
        """Return counts and rows by expert, and the sums."""
        tokens, combined = _to_bf16(self._torch, self._tokens), _to_bf16(self._torch, self._combined)
        counts = self._counts.numpy().astype(np.int32)
        return Observation({"num_tokens_per_expert": counts, "tokens": row_digests(tokens)}, combined)

    def close(self) -> None:
        """Leave the process group."""
        self._dist.destroy_process_group()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _from_bf16(torch: Any, rows: NDArray[Any]) -> Any:
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


def _to_bf16(torch: Any, rows: Any) -> NDArray[Any]:
    values: NDArray[Any] = rows.view(torch.int16).numpy()
    return values.view(BF16)
