"""The low-latency kernels of DeepEP's Buffer (V1), for ``deepep``."""

from __future__ import annotations

from typing import Any

from expertwire.types import DispatchDataType


class LowLatency:
    """Buffer of V1."""

    def __init__(self, deep_ep: Any, group: Any, adapter: Any) -> None:
        self._problem, self._adapter = adapter.context.problem, adapter
        problem = self._problem
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            problem.num_tokens, problem.hidden_size, problem.num_ranks, problem.num_experts
        )
        self._scales: Any = None
        self.buffer = deep_ep.Buffer(
            group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=problem.num_experts // problem.num_ranks,
            explicitly_destroy=True,
        )

    def dispatch(self) -> None:
        """Dispatch on the current stream."""
        x, topk_ids, _ = self._adapter.inputs
        fp8 = self._problem.dispatch_dtype is DispatchDataType.FP8_E4M3
        tokens, self._counts, self._handle, _, _ = self.buffer.low_latency_dispatch(
            x, topk_ids, self._problem.num_tokens, self._problem.num_experts, use_fp8=fp8
        )
        self._tokens, self._scales = tokens if fp8 else (tokens, None)

    def outputs(self) -> Any:
        """Return the outputs of the experts for what was received."""
        if self._scales is None:
            return self._adapter.expert_major_outputs(self._tokens)
        scales = self._scales.repeat_interleave(128, dim=-1)
        return self._adapter.expert_major_outputs(self._tokens.float() * scales)

    def combine(self, outputs: Any) -> Any:
        """Combine on the current stream and return the sums."""
        _, topk_ids, weights = self._adapter.inputs
        return self.buffer.low_latency_combine(outputs, topk_ids, weights, self._handle)[0]

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows."""
        import torch

        counts = self._counts.tolist()
        rows = [tokens[:count] for tokens, count in zip(self._tokens, counts, strict=True)]
        return self._counts, torch.cat(rows)
