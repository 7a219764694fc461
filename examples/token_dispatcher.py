"""A token dispatcher as torchtitan and Megatron want one: rows sorted by local expert in, rows out, with gradients.

``python examples/token_dispatcher.py`` compares two ranks with a computation that knows all experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import expertwire as ew
from expertwire.interop.torch import Dispatched, TorchCommunicator

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 2, 4, 2, 64, 9


class TokenDispatcher:
    """Sends tokens to the ranks of their experts and back. Collective.

    Args:
        group: who takes part.
        num_experts: E, divisible by the number of ranks.
        top_k: K.
        hidden_size: H.
        max_tokens_per_rank: most tokens that one rank brings to one call.
    """

    def __init__(
        self, group: ew.Group, *, num_experts: int, top_k: int, hidden_size: int, max_tokens_per_rank: int
    ) -> None:
        self._moe = TorchCommunicator(
            group,
            num_experts=num_experts,
            num_topk=top_k,
            hidden_size=hidden_size,
            max_tokens_per_rank=max_tokens_per_rank,
        )

    def dispatch(
        self, x: torch.Tensor, topk_scores: torch.Tensor, topk_expert_ids: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[Dispatched, torch.Tensor]]:
        """Bfloat16 [T, H], float32 [T, K] and ids [T, K] to rows [N, H] sorted by local expert.

        Returns:
            The rows, how many of them belong to each local expert, int32 [L], and what :meth:`combine` takes.
        """
        dispatched = self._moe.dispatch(x, topk_expert_ids, topk_scores)
        places = torch.arange(dispatched.tokens.shape[1], device=x.device)
        is_row = places < dispatched.num_tokens[:, None]
        return dispatched.tokens[is_row], dispatched.num_tokens, (dispatched, is_row)  # here the host waits for a GPU

    def combine(
        self, rows: torch.Tensor, metadata: tuple[Dispatched, torch.Tensor], *_: Any, **__: Any
    ) -> torch.Tensor:
        """The experts' rows, in the order of the dispatched ones, to tokens [T, H], summed with their scores."""
        dispatched, is_row = metadata
        padded = torch.zeros_like(dispatched.tokens).masked_scatter(is_row[..., None], rows.bfloat16())
        return self._moe.combine(padded, dispatched)

    def close(self) -> None:
        """Ends this rank's part."""
        self._moe.close()


def from_routing_map(probs: torch.Tensor, routing_map: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Megatron's float [T, E] and bool [T, E] to scores float32 [T, K] and ids [T, K]; -1 where a token has fewer."""
    chosen = routing_map.to(torch.int8).topk(top_k, dim=1)
    ids = torch.where(chosen.values > 0, chosen.indices, -1)
    return probs.float().gather(1, chosen.indices), ids


def experts(rows: torch.Tensor, counts: torch.Tensor, first_expert: int) -> torch.Tensor:
    """One matrix for each expert: the loop stands for a grouped GEMM over ``counts``."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix_of(first_expert + local) for local, part in enumerate(parts)])


def matrix_of(expert: int) -> torch.Tensor:
    """The weights of an expert, from its global id alone."""
    generator = torch.Generator().manual_seed(expert)
    return torch.randn(HIDDEN, HIDDEN, generator=generator).bfloat16() * HIDDEN**-0.5


def rank_main(group: ew.Group) -> float:
    """Run a layer forwards and backwards on one rank. Return the largest difference to the dense computation."""
    generator = torch.Generator().manual_seed(100 + group.rank)
    x = torch.randn(MOST - group.rank, HIDDEN, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(x.shape[0], EXPERTS, generator=generator).softmax(1).requires_grad_()
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(TOPK).indices, True)

    dispatcher = TokenDispatcher(group, num_experts=EXPERTS, top_k=TOPK, hidden_size=HIDDEN, max_tokens_per_rank=MOST)
    scores, ids = from_routing_map(probs, routing_map, TOPK)
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids)
    y = dispatcher.combine(experts(rows, counts, group.rank * EXPERTS // RANKS), metadata)
    upstream = torch.randn(y.shape, generator=generator).bfloat16()
    y.backward(upstream)
    found = (y.detach(), x.grad, probs.grad)
    dispatcher.close()

    dense_x = x.detach().float().requires_grad_()
    dense_probs = probs.detach().clone().requires_grad_()
    every = torch.stack([dense_x @ matrix_of(expert).float() for expert in range(EXPERTS)], 1)
    dense_y = (every * (dense_probs * routing_map)[..., None]).sum(1)
    dense_y.backward(upstream.float())
    wanted = (dense_y.detach(), dense_x.grad, dense_probs.grad)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    differences = ew.spawn(rank_main, RANKS)
    print(f"largest difference of outputs and gradients to the dense computation: {max(differences):.4f}")
    sys.exit(max(differences) > 0.02)
