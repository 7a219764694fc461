"""``nccl-ep``: NCCL EP in its low-latency mode, through the Python API of NCCL."""

from __future__ import annotations

import pickle
from typing import Any

from expertwire.bench.adapters.peer import Peer
from expertwire.types import DispatchLayout


class NcclEp(Peer):
    """NCCL EP."""

    name = "nccl-ep"
    module = "nccl.ep"
    install = "pip install 'nccl-extensions[cu13]'"
    notes = (
        "low-latency mode, staged copies; routing is bound to a handle beforehand and not timed; EXPERT_MAJOR: weights "
        "applied inside combine, RANK_MAJOR: rows weighted by the caller"
    )

    def set_up(self) -> None:
        """Make the communicator, once, and a group, a handle and tensors for the shape."""
        from nccl import ep  # type: ignore[import-not-found]

        self._ep = ep
        torch, context, problem = self._torch, self._context, self._context.problem
        comm = context.belongings.once("nccl", self._make_comm, lambda made: made.destroy())
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY,
            num_experts=problem.num_experts,
            max_dispatch_tokens_per_rank=problem.num_tokens,
            max_recv_tokens_per_rank=problem.num_tokens * problem.num_ranks,
            max_token_bytes=problem.hidden_size * 2,
        )
        self._rank_major = problem.layout is DispatchLayout.RANK_MAJOR
        layout = ep.Layout.RANK_MAJOR if self._rank_major else ep.Layout.EXPERT_MAJOR
        self._group = ep.Group.create(comm, config)
        self._handle = self._group.create_handle(layout, ep.Tensor(self._topk_ids), stream=self._stream())
        first = problem.num_ranks if self._rank_major else problem.experts_per_rank[context.group.rank]
        per_group = problem.num_tokens * (1 if self._rank_major else problem.num_ranks)
        self._tokens = torch.empty((first, per_group, problem.hidden_size), dtype=torch.bfloat16, device=context.device)
        self._counts = torch.zeros(first, dtype=torch.int32, device=context.device)
        slots = (first, per_group, problem.num_topk)
        self._ids = torch.empty(slots, dtype=torch.int32, device=context.device)
        self._row_weights = torch.empty(slots, dtype=torch.float32, device=context.device)
        self._describe()

    def _make_comm(self) -> Any:
        from nccl import core

        group = self._context.group
        mine = pickle.dumps(core.get_unique_id() if group.rank == 0 else None)
        unique_id = pickle.loads(self._context.exchange(mine)[0])  # noqa: S301 (from rank 0 of this run)
        return core.Communicator.init(nranks=group.size, rank=group.rank, unique_id=unique_id)

    def _describe(self) -> None:
        """Name the tensors of every call."""
        ep = self._ep
        x, tokens, counts = ep.Tensor(self._x), ep.Tensor(self._tokens), ep.Tensor(self._counts)
        weights, combined = ep.Tensor(self._weights), ep.Tensor(self._combined)
        if self._rank_major:
            self._inputs = ep.DispatchInputs(tokens=x, topk_weights=weights)
            self._outputs = ep.DispatchOutputs(
                tokens=tokens, topk_weights=ep.Tensor(self._row_weights), topk_idx=ep.Tensor(self._ids)
            )
            self._layout = ep.LayoutInfo(src_rank_counters=counts, recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
            self._combine_outputs = ep.CombineOutputs(tokens=combined)
        else:
            self._inputs, self._outputs = ep.DispatchInputs(tokens=x), ep.DispatchOutputs(tokens=tokens)
            self._layout = ep.LayoutInfo(expert_counters=counts)
            self._combine_outputs = ep.CombineOutputs(tokens=combined, topk_weights=weights)

    def _stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def dispatch(self) -> None:
        """Dispatch on the current stream."""
        self._handle.dispatch(self._inputs, self._outputs, layout_info=self._layout, stream=self._stream())

    def apply_experts(self) -> None:
        """Work the outputs out on the GPU."""
        if self._rank_major:
            problem, rank = self._context.problem, self._context.group.rank
            ids = self._ids.flatten(0, 1)
            weights = self._row_weights.flatten(0, 1).where(ids >= 0, 0.0)
            first = rank * (problem.num_experts // problem.num_ranks)  # ids count from this rank's first expert
            outputs = self.weighted_outputs(self._tokens.flatten(0, 1), first + ids.clamp(min=0), weights)
            outputs = outputs.view_as(self._tokens)
        else:
            outputs = self.expert_major_outputs(self._tokens)
        if self.put_outputs(outputs):
            self._combine_inputs = self._ep.CombineInputs(tokens=self._ep.Tensor(self._expert_output))

    def combine(self) -> None:
        """Combine on the current stream."""
        self._handle.combine(self._combine_inputs, self._combine_outputs, stream=self._stream())

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows."""
        counts = self._counts.tolist()
        rows = [tokens[:count] for tokens, count in zip(self._tokens, counts, strict=True)]
        return self._counts, self._torch.cat(rows)

    def close(self) -> None:
        """Destroy the handle and the group."""
        self._handle.destroy()
        self._group.destroy()
