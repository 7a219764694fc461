"""The calls that vLLM and SGLang make of ``deep_ep`` in a decode step, on the drop-in, with two ranks.

``python examples/serving_layer.py`` compares their results with a computation that knows all experts. Uses one GPU for
each rank where there are enough, and the CPU otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import expertwire as ew
from expertwire.interop import deep_ep

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 2, 8, 3, 512, 6
FACTORS = 2.0 ** torch.arange(EXPERTS)  # expert e multiplies with 2^e


class ServingLayer:
    """One layer's end of the exchange, for a Buffer that all layers share.

    Args:
        buffer: the Buffer.
        use_fp8: dispatch in FP8.
    """

    def __init__(self, buffer: deep_ep.Buffer, use_fp8: bool) -> None:
        self.buffer = buffer
        self.use_fp8 = use_fp8
        self.handle: Any = None

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, with_hook: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """VLLM always asks for a hook; SGLang for a hook, or for an event."""
        received, counts, self.handle, event, hook = self.buffer.low_latency_dispatch(
            x,
            topk_ids.to(torch.int64),
            MOST,
            EXPERTS,
            use_fp8=self.use_fp8,
            round_scale=False,
            use_ue8m0=False,
            async_finish=not with_hook,
            return_recv_hook=with_hook,
        )
        # the shared expert works here, or the other micro-batch
        hook() if with_hook else event.current_stream_wait()
        if not self.use_fp8:
            return received, counts
        rows, scales = received
        blocks = rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)
        return blocks.flatten(-2).bfloat16(), counts

    def combine(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, with_hook: bool
    ) -> torch.Tensor:
        """The result lies in ``out``."""
        _, event, hook = self.buffer.low_latency_combine(
            rows,
            topk_ids.to(torch.int64),
            weights,
            self.handle,
            async_finish=not with_hook,
            zero_copy=False,
            return_recv_hook=with_hook,
            out=out,
        )
        hook() if with_hook else event.current_stream_wait()
        return out


def masked_experts(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """What stands for a masked grouped GEMM: rows beyond the counts are not looked at."""
    is_row = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
    factors = FACTORS[first : first + len(rows)].to(rows.device)
    return torch.where(is_row[..., None], rows * factors[:, None, None], 0).bfloat16()


def decode_steps(buffer: deep_ep.Buffer, device: str) -> float:
    """Run a few steps, with other numbers of tokens in each. Return the largest relative difference."""
    worst = 0.0
    for step, use_fp8 in enumerate((False, True, False, True)):
        generator = torch.Generator().manual_seed(10 * step + buffer.rank)
        num_tokens = (step + 3 * buffer.rank) % (MOST + 1)
        x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        topk_ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK, 1).indices.int()
        weights = torch.rand(num_tokens, TOPK, generator=generator)
        dense = x.float() * (weights * FACTORS[topk_ids]).sum(1, keepdim=True)

        layer, with_hook = ServingLayer(buffer, use_fp8), step < 2
        on_device = [one.to(device) for one in (x, topk_ids, weights)]
        rows, counts = layer.dispatch(on_device[0], on_device[1], with_hook)
        outputs = masked_experts(rows, counts, buffer.rank * EXPERTS // RANKS)
        y = layer.combine(outputs, on_device[1], on_device[2], torch.empty_like(on_device[0]), with_hook)
        if num_tokens:
            worst = max(worst, float((y.cpu().float() - dense).abs().max() / dense.abs().max()))
    return worst


def make_buffer(group: Any) -> deep_ep.Buffer:
    """A Buffer, with the keywords of vLLM."""
    bytes_hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=RANKS, num_experts=EXPERTS
    )
    return deep_ep.Buffer(
        group=group,
        num_nvl_bytes=0,
        num_rdma_bytes=bytes_hint,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // RANKS,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )


def rank_main(group: ew.Group, store: str) -> float:
    """One rank: a process group of torch, a Buffer over it, and some decode steps."""
    on_gpu = torch.cuda.device_count() >= group.size
    if on_gpu:
        torch.cuda.set_device(group.rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, group.size), rank=group.rank, world_size=group.size)
    buffer = make_buffer(dist.group.WORLD)
    difference = decode_steps(buffer, f"cuda:{group.rank}" if on_gpu else "cpu")
    buffer.destroy()
    dist.destroy_process_group()
    return difference


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        differences = ew.spawn(rank_main, RANKS, str(Path(folder) / "store"))
    print(f"largest difference to the dense computation: {max(differences):.4f}")
    sys.exit(max(differences) > 0.04)
