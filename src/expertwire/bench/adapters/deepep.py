"""``deepep``: DeepEP, its ElasticBuffer (V2) where it has one, else the low-latency kernels of Buffer (V1)."""

from __future__ import annotations

from typing import Any

from expertwire.bench.adapters.base import RankContext
from expertwire.bench.adapters.deepep_v1 import LowLatency
from expertwire.bench.adapters.peer import Peer
from expertwire.bench.adapters.torch_group import process_group
from expertwire.types import DispatchDataType, DispatchLayout


class DeepEp(Peer):
    """Either generation of DeepEP."""

    name = "deepep"
    module = "deep_ep"
    install = "see github.com/deepseek-ai/DeepEP (set EP_DISABLE_GIN=1 for GPUs of one host)"
    dtypes = (DispatchDataType.BF16, DispatchDataType.FP8_E4M3)
    notes = (
        "V2: combine sums rows that the caller has weighted, the layout is found in every dispatch, counts stay on the "
        "GPU; V1: low-latency kernels, FP8 cast inside dispatch, weights applied inside combine"
    )

    def set_up(self) -> None:
        """Make a buffer for the shape."""
        import deep_ep  # type: ignore[import-not-found]

        problem, group = self._context.problem, process_group(self._context).group.WORLD
        of_v2 = hasattr(deep_ep, "ElasticBuffer")
        if of_v2 and problem.dispatch_dtype is not DispatchDataType.BF16:
            raise NotImplementedError("ElasticBuffer takes FP8 rows that the caller has quantised")
        if not of_v2 and problem.layout is not DispatchLayout.EXPERT_MAJOR:
            raise NotImplementedError("the low-latency kernels return EXPERT_MAJOR rows only")
        self._way: Elastic | LowLatency = (Elastic if of_v2 else LowLatency)(deep_ep, group, self)

    def dispatch(self) -> None:
        """Dispatch on the current stream."""
        self._way.dispatch()

    def apply_experts(self) -> None:
        """Work the outputs out on the GPU."""
        self.put_outputs(self._way.outputs())

    def combine(self) -> None:
        """Combine on the current stream."""
        self._combined = self._way.combine(self._expert_output)

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows."""
        return self._way.received()

    def close(self) -> None:
        """Destroy the buffer."""
        self._way.buffer.destroy()

    @property
    def context(self) -> RankContext:
        """What the benchmark asks for."""
        return self._context

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Tokens, ids and weights."""
        return self._x, self._topk_ids, self._weights


class Elastic:
    """ElasticBuffer of V2."""

    def __init__(self, deep_ep: Any, group: Any, adapter: DeepEp) -> None:
        self._problem, self._adapter = adapter.context.problem, adapter
        problem = self._problem
        self._expand = problem.layout is DispatchLayout.EXPERT_MAJOR
        self.buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=problem.num_tokens,
            hidden=problem.hidden_size,
            num_topk=problem.num_topk,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )

    def dispatch(self) -> None:
        """Dispatch on the current stream."""
        x, topk_ids, weights = self._adapter.inputs
        self._tokens, self._ids, self._weights, self._handle, _ = self.buffer.dispatch(
            x,
            topk_idx=topk_ids,
            topk_weights=weights,
            num_experts=self._problem.num_experts,
            num_sms=self._problem.num_blocks[0] if self._problem.num_blocks else 0,
            do_cpu_sync=False,
            do_expand=self._expand,
        )

    def outputs(self) -> Any:
        """Return the outputs of the experts for what was received."""
        import torch

        problem, rank = self._problem, self._adapter.context.group.rank
        first = rank * (problem.num_experts // problem.num_ranks)
        if self._expand:  # one weight a row; the expert follows from where the row lies
            ends = self._handle.psum_num_recv_tokens_per_expert
            at = torch.arange(len(self._tokens), device=ends.device, dtype=ends.dtype)
            ids = first + torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1)
            return self._adapter.weighted_outputs(self._tokens, ids[:, None], self._weights.reshape(-1)[:, None])
        weights = self._weights.where(self._ids >= 0, 0.0)
        return self._adapter.weighted_outputs(self._tokens, first + self._ids.clamp(min=0), weights)

    def combine(self, outputs: Any) -> Any:
        """Combine on the current stream and return the sums."""
        return self.buffer.combine(outputs, self._handle)[0]

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows."""
        handle = self._handle
        ends = handle.psum_num_recv_tokens_per_expert if self._expand else handle.psum_num_recv_tokens_per_scaleup_rank
        return ends.diff(prepend=ends.new_zeros(1)), self._tokens[: int(ends[-1])]
