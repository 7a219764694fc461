"""``mscclpp``: the EP runtime of MSCCL++ in its latency mode."""

from __future__ import annotations

from typing import Any

from expertwire.bench.adapters.peer import Peer
from expertwire.bench.adapters.torch_group import process_group
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout


class Mscclpp(Peer):
    """MoECommunicator of MSCCL++."""

    name = "mscclpp"
    module = "mscclpp.ep"
    install = "see github.com/microsoft/mscclpp (its expert-parallel runtime)"
    dtypes = (DispatchDataType.BF16, DispatchDataType.FP8_E4M3)
    notes = (
        "EXPERT_MAJOR: weights applied inside combine; RANK_MAJOR: rows weighted by the caller lie in the library's "
        "buffer; epochs are baked into captured graphs"
    )

    def set_up(self) -> None:
        """Make a communicator for the shape."""
        import mscclpp  # type: ignore[import-not-found]
        from mscclpp import ep

        torch, problem, rank = self._torch, self._context.problem, self._context.group.rank
        world = process_group(self._context).group.WORLD
        modes = {
            CombineMode.RANK_LOCAL_REDUCE: ep.CombineMode.RANK_LOCAL_REDUCE,
            CombineMode.DIRECT_SEND: ep.CombineMode.DIRECT_SEND,
        }
        self._rank_major = problem.layout is DispatchLayout.RANK_MAJOR
        fp8 = problem.dispatch_dtype is DispatchDataType.FP8_E4M3
        self._comm: Any = ep.MoECommunicator(
            comm=mscclpp.CommGroup(torch_group=world),
            num_experts=problem.num_experts,
            num_local_experts=problem.experts_per_rank[rank],
            hidden_size=problem.hidden_size,
            topk=problem.num_topk,
            max_tokens_per_rank=problem.num_tokens,
            mode=getattr(ep.MoEMode, "LATENCY", None) or ep.MoEMode.LOW_LATENCY,
            combine_mode=modes[problem.combine_mode],
            output_layout=ep.DispatchLayout.RANK_MAJOR if self._rank_major else ep.DispatchLayout.EXPERT_MAJOR,
            invalid_token_expert_id=problem.num_experts,
            quant=ep.QuantConfig(format=ep.DispatchDataType.FP8_E4M3) if fp8 else None,
        )
        rows = (problem.experts_per_rank[rank], problem.num_ranks * problem.num_tokens, problem.hidden_size)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self._buffer = None if self._rank_major else torch.empty(rows, dtype=dtype, device=self._context.device)

    def dispatch(self) -> None:
        """Dispatch into a tensor that is used again, or the library's own."""
        self._received, self._handle = self._comm.dispatch(
            self._x, self._topk_ids, self._weights, output_buffer=self._buffer
        )

    def apply_experts(self) -> None:
        """Work the outputs out on the GPU."""
        tokens = self._received.tokens
        if self._received.quant is not None:
            tokens = tokens.float() * self._received.quant.block_scales.repeat_interleave(128, dim=-1)
        if not self._rank_major:
            self.put_outputs(self.expert_major_outputs(tokens))
            return
        problem = self._context.problem
        rows = tokens.reshape(-1, problem.hidden_size)
        ids, weights = (part.reshape(len(rows), -1) for part in (self._received.topk_ids, self._received.weights))
        weights = weights.where(ids < problem.num_experts, 0.0)
        self._expert_output = self._comm.get_combine_input_buffer()
        if self._expert_output.numel() == rows.numel():
            outputs = self.weighted_outputs(rows, ids, weights)
        else:  # a row for each slot
            outputs = (rows.float()[:, None, :] * (weights * self.factors(ids))[:, :, None]).bfloat16()
        self._expert_output.copy_(outputs.view_as(self._expert_output))

    def combine(self) -> None:
        """Combine into a tensor that is used again."""
        self._comm.combine(self._expert_output, self._handle, out=self._combined)

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows."""
        layout = self._received.layout
        counts = self._torch.as_tensor(layout.num_tokens_per_rank if self._rank_major else layout.num_tokens_per_expert)
        groups = self._received.tokens.view(len(counts), -1, self._context.problem.hidden_size)
        rows = [tokens[:count] for tokens, count in zip(groups, counts.tolist(), strict=True)]
        return counts, self._torch.cat(rows)

    def close(self) -> None:
        """Let go of the communicator; the last reference releases it."""
        del self._comm, self._received, self._handle, self._expert_output
