"""A dispatch, the experts and a combine as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.communicator import MoECommunicator
from expertwire.errors import InvalidArgumentError, UnsupportedError
from expertwire.types import Array, DispatchOutput

#: What the experts of a rank do: read the dispatch output, write ``combine_input_buffer``.
Experts = Callable[[DispatchOutput], None]

_WARM_UPS = 2  # the first call compiles kernels, of the experts too; the second finds nothing left to do


@dataclass(frozen=True)
class GraphedMoE:
    """A captured dispatch, experts and combine; :func:`capture` makes it.

    Attributes:
        x: bfloat16 [M, H] that a replay reads.
        topk_ids: [M, K] that a replay reads; a row of -1 is no token.
        weights: float32 [M, K] that a replay reads.
        y: bfloat16 [M, H] that a replay writes.
        graph: the ``torch.cuda.CUDAGraph``.
    """

    x: Array
    topk_ids: Array
    weights: Array
    y: Array
    graph: Any

    def __call__(self, x: Array, topk_ids: Array, weights: Array) -> Array:
        """Copies the arguments of T <= M tokens in, replays, and returns the first T rows of ``y``. Collective.

        The rows are valid until the next replay.

        Raises:
            InvalidArgumentError: T > M.
        """
        num_tokens = x.shape[0]
        if num_tokens > self.x.shape[0]:
            raise InvalidArgumentError(f"x = {num_tokens} tokens: must be at most the captured {self.x.shape[0]}")
        self.x[:num_tokens].copy_(x)
        self.topk_ids[:num_tokens].copy_(topk_ids)
        self.topk_ids[num_tokens:].fill_(-1)
        self.weights[:num_tokens].copy_(weights)
        self.graph.replay()
        return self.y[:num_tokens]


def capture(comm: MoECommunicator, experts: Experts) -> GraphedMoE:
    """Captures a dispatch of M = ``max_tokens_per_rank`` tokens, the experts and a combine. Collective.

    All ranks capture and then replay the same graphs in the same order. The graph is outside autograd. The experts run
    on the current stream, must not wait for the device, and are called a few times on no tokens before the capture.

    Args:
        comm: a communicator on CUDA; ``TorchCommunicator.communicator`` of one with gradients.
        experts: called with the dispatch output, whose ``combine_input_buffer`` it fills. It may look at the rows
            and at the counts, on the device.

    Raises:
        InvalidArgumentError: ``comm`` is none.
        UnsupportedError: the communicator is on the CPU.
    """
    if not isinstance(comm, MoECommunicator):
        raise InvalidArgumentError(f"comm = {type(comm).__name__} object: must be a MoECommunicator")
    config = comm.config
    if config.device == "cpu":
        raise UnsupportedError("capture: the communicator is on the CPU, and CUDA graphs need one on a GPU")
    tokens = (config.max_tokens_per_rank, config.hidden_size)
    slots = (config.max_tokens_per_rank, config.num_topk)
    x = torch.zeros(tokens, dtype=torch.bfloat16, device=config.device)
    y = torch.zeros_like(x)
    topk_ids = torch.full(slots, -1, dtype=torch.int64, device=config.device)
    weights = torch.zeros(slots, dtype=torch.float32, device=config.device)

    def step() -> None:
        output, handle = comm.dispatch(x, topk_ids, weights)
        experts(output)
        comm.combine(output.combine_input_buffer, handle, out=y)

    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(config.device)
    side.wait_stream(torch.cuda.current_stream(config.device))
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step()
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream(config.device).wait_stream(side)
    return GraphedMoE(x, topk_ids, weights, y, graph)
