"""A Mixture-of-Experts layer in torch whose experts are spread over the ranks of a group.

``train_text.py`` trains one. To be read and copied: the layer is an example, the communicator below it is the library.
"""

from __future__ import annotations

import torch
from torch import nn

from expertwire.interop.torch import TorchCommunicator


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: the shared expert, which every rank holds and every token passes.

    Args:
        hidden_size: H.
        intermediate_size: inner width.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H], in the dtype of the parameters."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class GroupedSwiGLU(nn.Module):
    """The experts of one rank. Each starts from its global id alone, whichever rank holds it.

    Args:
        experts: global ids.
        hidden_size: H.
        intermediate_size: inner width.
    """

    def __init__(self, experts: range, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(len(experts), hidden_size, 2 * intermediate_size))
        self.down = nn.Parameter(torch.empty(len(experts), intermediate_size, hidden_size))
        with torch.no_grad():
            for local, expert in enumerate(experts):
                generator = torch.Generator().manual_seed(expert)
                self.gate_up[local].normal_(0, hidden_size**-0.5, generator=generator)
                self.down[local].normal_(0, intermediate_size**-0.5, generator=generator)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Bfloat16 [L, N, H] to the same. Rows of padding are zero, and so are their results and gradients."""
        results = []
        for expert in range(len(self.down)):
            gate, up = (rows[expert].to(self.down.dtype) @ self.gate_up[expert]).chunk(2, -1)
            results.append((nn.functional.silu(gate) * up) @ self.down[expert])
        return torch.stack(results).bfloat16() if results else torch.zeros_like(rows)


class MoELayer(nn.Module):
    """``x + shared(x) + sum of the K chosen experts``, the experts weighted by a softmax router.

    Args:
        moe: communicator of the layout ``EXPERT_MAJOR``. Layers may share one if their calls do not overlap.
        intermediate_size: inner width of an expert.
    """

    def __init__(self, moe: TorchCommunicator, intermediate_size: int) -> None:
        super().__init__()
        config, first = moe.communicator.config, moe.communicator.first_local_expert
        experts = range(first, first + moe.communicator.num_local_experts)
        self.num_topk = config.num_topk
        self.moe = moe
        self.norm = nn.RMSNorm(config.hidden_size)
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.shared = SwiGLU(config.hidden_size, intermediate_size)
        self.experts = GroupedSwiGLU(experts, config.hidden_size, intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H], in the dtype of the parameters. Collective."""
        normed = self.norm(x)
        weights, topk_ids = self.router(normed).softmax(-1).topk(self.num_topk)
        weights = weights / weights.sum(-1, keepdim=True)
        dispatched = self.moe.dispatch(normed.bfloat16(), topk_ids, weights.float())
        routed = self.moe.combine(self.experts(dispatched.tokens), dispatched)
        return x + self.shared(normed) + routed.to(x.dtype)
