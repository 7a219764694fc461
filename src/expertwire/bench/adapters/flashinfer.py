"""``flashinfer``: the one-sided exchange over NVLink of FlashInfer, by the class of the version that is there."""

from __future__ import annotations

import inspect
from typing import Any

from expertwire.bench.adapters.base import RankContext
from expertwire.bench.adapters.peer import Peer
from expertwire.bench.adapters.torch_group import process_group
from expertwire.errors import UnsupportedError
from expertwire.types import DispatchLayout


class FlashInfer(Peer):
    """MoeAlltoAll (0.6) or NVLinkOneSidedAlltoAll (0.7): a token is present once for each rank, as in RANK_MAJOR."""

    name = "flashinfer"
    module = "flashinfer.comm"
    install = "pip install flashinfer-python (0.6.18 or newer)"
    layouts = (DispatchLayout.RANK_MAJOR,)
    notes = (
        "int32 ids; ids and weights travel as payloads, ids of rows without a token are marked; rows weighted by the "
        "caller lie in the library's buffer, the result goes to output="
    )

    def set_up(self) -> None:
        """Make the workspace for the shape."""
        from flashinfer import comm  # type: ignore[import-not-found]

        process_group(self._context)
        inputs = (self._x, self._topk_ids.int(), self._weights)
        make = OfMoeAlltoAll if hasattr(comm, "MoeAlltoAll") else OfMoeEp
        self._way: OfMoeAlltoAll | OfMoeEp = make(self._context, inputs)
        self._torch.cuda.synchronize()
        self._context.exchange(b"made")  # nobody writes into a workspace that its owner has yet to clear

    def dispatch(self) -> None:
        """Dispatch tokens, ids and weights."""
        self._received = self._way.dispatch()

    def apply_experts(self) -> None:
        """Work the outputs out on the GPU, into the library's buffer."""
        tokens, ids, weights = self._received
        outputs = self.weighted_outputs(tokens, ids, self._torch.where(self._is_local(ids), weights, 0.0))
        self._expert_output = self._way.buffer()
        self._expert_output.view_as(outputs).copy_(outputs)

    def _is_local(self, ids: Any) -> Any:
        problem = self._context.problem
        share = problem.num_experts // problem.num_ranks
        first = self._context.group.rank * share
        return (ids >= first) & (ids < first + share)

    def combine(self) -> None:
        """Combine the rows into a tensor that is used again."""
        self._way.combine(self._expert_output, self._combined)

    def received(self) -> tuple[Any, Any]:
        """Return counts and valid rows. A row counts if one of its ids is of this rank."""
        tokens, ids, _ = self._received
        valid = self._is_local(ids).any(dim=-1)
        return valid.view(self._context.problem.num_ranks, -1).sum(dim=-1), tokens[valid]

    def close(self) -> None:
        """Let go of the workspace."""
        self._way.close()
        del self._way, self._received, self._expert_output


class OfMoeAlltoAll:
    """flashinfer.comm.MoeAlltoAll, which keeps its workspaces for the next shape like this."""

    def __init__(self, context: RankContext, inputs: tuple[Any, Any, Any]) -> None:
        from flashinfer.comm import MoeAlltoAll  # type: ignore[import-not-found]
        from flashinfer.comm.mapping import Mapping  # type: ignore[import-not-found]
        from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend  # type: ignore[import-not-found]

        if "output" not in inspect.signature(MoeAlltoAll.combine).parameters:
            raise UnsupportedError("this version of MoeAlltoAll.combine has no output=: 0.6.18 or newer is needed")
        group, self._problem = context.group, context.problem
        mapping = Mapping(
            world_size=group.size,
            rank=group.rank,
            gpus_per_node=group.size,
            tp_size=group.size,
            moe_tp_size=1,
            moe_ep_size=group.size,
        )
        self._library: Any = MoeAlltoAll(
            mapping,
            max_num_tokens=self._problem.num_tokens,
            top_k=self._problem.num_topk,
            num_experts=self._problem.num_experts,
            hidden_size=self._problem.hidden_size,
            mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
        )
        self._payloads, self._ids = list(inputs), inputs[1]

    def dispatch(self) -> list[Any]:
        """Dispatch; return tokens, ids and weights [R * T, ...]. The ids of rows without a token become E."""
        problem = self._problem
        received = self._library.dispatch(
            self._ids,
            self._payloads,
            problem.num_tokens,
            invalid_token_expert_id=problem.num_experts,
            expert_id_payload_index=1,
        )
        return [part.flatten(0, 1) for part in received]

    def buffer(self) -> Any:
        """Return where the outputs go. Between dispatch and combine only."""
        import torch

        problem = self._problem
        return self._library.get_combine_payload_tensor_in_workspace(
            problem.num_tokens, problem.hidden_size, torch.bfloat16
        )

    def combine(self, outputs: Any, combined: Any) -> None:
        """Combine what lies in the buffer."""
        self._library.combine(outputs, self._problem.num_tokens, payload_in_workspace=True, output=combined)

    def close(self) -> None:
        """Do nothing."""


class OfMoeEp:
    """NVLinkOneSidedAlltoAll of flashinfer.moe_ep, which marks the ids of rows without a token in every dispatch."""

    def __init__(self, context: RankContext, inputs: tuple[Any, Any, Any]) -> None:
        import torch
        from flashinfer import moe_ep

        group, problem = context.group, context.problem
        params = moe_ep.MoEEpCommParams(
            num_experts=problem.num_experts,
            top_k=problem.num_topk,
            max_tokens_per_rank=problem.num_tokens,
            hidden_size=problem.hidden_size,
            dtype=torch.bfloat16,
        )
        bootstrap = moe_ep.BootstrapConfig(world_size=group.size, rank=group.rank, device=torch.cuda.current_device())
        self._library: Any = moe_ep.create_communication(bootstrap, params, moe_ep.NVLinkOneSidedConfig())
        self._inputs = inputs

    def dispatch(self) -> list[Any]:
        """Dispatch; return tokens, ids and weights [R * T, ...]. The ids of rows without a token become -1."""
        received = self._library.dispatch(*self._inputs)
        return [received.hidden_states, received.topk_ids, received.topk_weights]

    def buffer(self) -> Any:
        """Return where the outputs go. Between dispatch and combine only."""
        import torch

        return self._library.get_combine_input_buffer(torch.bfloat16)

    def combine(self, outputs: Any, combined: Any) -> None:
        """Combine what lies in the buffer."""
        self._library.combine(outputs, output=combined)

    def close(self) -> None:
        """Free the workspace. Every rank has been heard of since its last combine."""
        self._library.destroy()
