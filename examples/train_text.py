"""Trains a small Mixture-of-Experts model on text, first with its experts spread over processes, then in one process.

    python examples/train_text.py --ranks 4 --steps 20

The text is the source of Python's ``argparse``; the model predicts each byte from the four before it. Every rank takes
an equal part of the tokens of a step and holds an equal part of the experts. The program prints the losses of both runs
side by side and fails if they differ by more than the tolerance.

Why they can be equal: experts see the same rows in the same order in both runs, and DIRECT_SEND sums their outputs in
the same order. Gradients of what all ranks hold (router, shared expert, embeddings) are sums over ranks here and one
sum there. So the model computes in float64, where the order of a sum does not show; the communicator carries BF16 rows
and float32 weights all the same.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from moe_layer import MoELayer
from torch import nn

import expertwire as ew
from expertwire.interop.torch import TorchCommunicator

NUM_EXPERTS, NUM_TOPK, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 8, 2, 64, 32, 2
CONTEXT_BYTES = 4
TOKENS_PER_STEP = 128
LEARNING_RATE = 0.3
#: The order of float64 sums changes a loss by some 1e-15; a single BF16 rounding that falls the other way, by 1e-6.
TOLERANCE = 1e-9


class TextModel(nn.Module):
    """Bytes to logits of the next byte.

    Args:
        moe: the communicator of all layers.
    """

    def __init__(self, moe: TorchCommunicator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256 * CONTEXT_BYTES, HIDDEN_SIZE)
        self.layers = nn.Sequential(*(MoELayer(moe, INTERMEDIATE_SIZE) for _ in range(NUM_LAYERS)))
        self.head = nn.Linear(HIDDEN_SIZE, 256, bias=False)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Int64 [T, CONTEXT_BYTES] to [T, 256]."""
        of_position = torch.arange(CONTEXT_BYTES) * 256
        return self.head(self.layers(self.embedding(context + of_position).sum(1)))

    def shared_parameters(self) -> list[nn.Parameter]:
        """What every rank holds: all but the experts."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." not in name]


def train(group: ew.Group, steps: int, store: str) -> list[float]:
    """Be one rank; ``store`` is a file for torch.distributed. Returns the loss of each step, over all ranks' tokens."""
    torch.set_num_threads(1)
    if group.size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, group.size), rank=group.rank, world_size=group.size)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    mine = TOKENS_PER_STEP // group.size
    losses = []
    with TorchCommunicator(
        group,
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN_SIZE,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=mine,
        combine_mode="direct_send",  # sums in an order that does not depend on where experts live
    ) as moe:
        torch.manual_seed(0)
        model = TextModel(moe).double()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        for step in range(steps):
            first = step * TOKENS_PER_STEP + group.rank * mine
            windows = text[first : first + mine + CONTEXT_BYTES].unfold(0, CONTEXT_BYTES + 1, 1)
            losses.append(train_step(model, optimizer, windows))
    if group.size > 1:
        dist.destroy_process_group()
    return losses


def train_step(model: TextModel, optimizer: torch.optim.Optimizer, windows: torch.Tensor) -> float:
    """One step on this rank's windows of CONTEXT_BYTES bytes and the byte that follows. Returns the loss of all."""
    optimizer.zero_grad()
    logits = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(logits, windows[:, -1], reduction="sum") / TOKENS_PER_STEP
    loss.backward()  # brings each expert the gradients of all ranks' tokens
    total = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
        for parameter in model.shared_parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return float(total)


def train_spread(num_ranks: int, steps: int) -> list[float]:
    """Train with this many processes."""
    with tempfile.TemporaryDirectory() as folder:
        return ew.spawn(train, num_ranks, steps, str(Path(folder, "store")))[0]


def train_alone(steps: int) -> list[float]:
    """Train in this process."""
    return train(ew.local_group(1)[0], steps, "")


def main() -> int:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description="Train a small MoE model on text, spread over processes and in one.")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8), help="processes (default: 4)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    given = parser.parse_args()
    spread, alone = train_spread(given.ranks, given.steps), train_alone(given.steps)
    print(f"step  {given.ranks} ranks   1 rank   difference")
    for step, (one, other) in enumerate(zip(spread, alone, strict=True)):
        print(f"{step:4}  {one:7.5f}  {other:7.5f}  {abs(one - other):.1e}")
    worst = max(abs(one - other) for one, other in zip(spread, alone, strict=True))
    print(f"largest difference {worst:.1e}, tolerance {TOLERANCE}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
