"""``flashinfer``: MoeAlltoAll of FlashInfer."""

from __future__ import annotations

from expertwire.bench.adapters.peer import Peer
from expertwire.bench.adapters.torch_group import process_group
from expertwire.bench.inputs import Observation
from expertwire.types import DispatchLayout


class FlashInfer(Peer):
    """MoeAlltoAll of FlashInfer: a token is present once for each rank, as in RANK_MAJOR."""

    name = "flashinfer"
    module = "flashinfer.comm.trtllm_moe_alltoall"
    install = "pip install flashinfer-python"
    layouts = (DispatchLayout.RANK_MAJOR,)
    notes = (
        "int32 ids; ids and weights travel as payloads; rows weighted by the caller, copied into the workspace inside "
        "combine"
    )

    def set_up(self) -> None:
        """Make the workspace for the shape."""
        from flashinfer.comm import mnnvl  # type: ignore[import-not-found]
        from flashinfer.comm.mapping import Mapping  # type: ignore[import-not-found]
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll  # type: ignore[import-not-found]

        process_group(self._context)
        problem, group = self._context.problem, self._context.group
        mapping = Mapping(
            world_size=group.size,
            rank=group.rank,
            gpus_per_node=group.size,
            tp_size=group.size,
            moe_tp_size=1,
            moe_ep_size=group.size,
        )
        self._a2a = MoeAlltoAll(
            mapping,
            max_num_tokens=problem.num_tokens,
            top_k=problem.num_topk,
            num_experts=problem.num_experts,
            hidden_size=problem.hidden_size,
            mnnvl_config=mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend()),
        )
        self._ids = self._topk_ids.int()
        self._payloads = [self._x, self._ids, self._weights]

    def dispatch(self) -> None:
        """Dispatch tokens, ids and weights; ids of other ranks' experts become E."""
        problem = self._context.problem
        self._received = self._a2a.dispatch(
            self._ids,
            self._payloads,
            problem.num_tokens,
            invalid_token_expert_id=problem.num_experts,
            expert_id_payload_index=1,
        )

    def apply_experts(self) -> None:
        """Work the outputs out on the GPU."""
        tokens, ids, weights = (part.flatten(0, 1) for part in self._received)
        weights = self._torch.nan_to_num(weights).where(self._is_local(ids), 0.0)
        outputs = self.weighted_outputs(tokens, ids, weights)
        self._expert_output = outputs.view_as(self._received[0])

    def _is_local(self, ids: object) -> object:
        problem = self._context.problem
        share = problem.num_experts // problem.num_ranks
        first = self._context.group.rank * share
        return (ids >= first) & (ids < first + share)  # type: ignore[operator]

    def combine(self) -> None:
        """Combine the rows."""
        self._combined = self._a2a.combine(self._expert_output, self._context.problem.num_tokens)

    def observe(self) -> Observation:
        """Return counts, rows and sums. A row counts if one of its ids is of this rank."""
        tokens, ids, _ = self._received
        valid = self._is_local(ids).any(dim=-1)  # type: ignore[attr-defined]
        return self.observe_rows(valid.sum(dim=-1), tokens[valid])

    def close(self) -> None:
        """Let go of the workspace, which the library keeps for the next shape like this."""
        del self._a2a
