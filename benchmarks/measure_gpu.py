"""Measure the CUDA backend on the GPUs of this machine, one process a GPU, and write it as JSON.

``python benchmarks/measure_gpu.py --ranks 2 --output benchmarks/results/gpu.json``: every named shape, layout, combine
mode and format, as a captured graph of dispatch+combine pairs that is replayed; the median of the slowest rank,
microseconds a pair. Each result is held against :mod:`expertwire.reference` before it is timed, with expert outputs
that are the dispatched rows (BF16) or given rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

import expertwire as ew
from expertwire.reference import RankInput, combine, dispatch
from expertwire.types import MoECommunicatorConfig, QuantConfig

PAIRS, REPLAYS, WARMUP = 50, 100, 10
SHAPES = {"W1": (32, 8, 8), "W2": (128, 128, 8), "W3": (128, 256, 8), "W4": (1, 256, 8)}
HIDDEN = 7168


@dataclass(frozen=True)
class Variant:
    """One way to run a shape."""

    layout: str
    combine_mode: str
    fp8: bool = False

    @property
    def name(self) -> str:
        """Short, for tables."""
        return f"{self.layout} {self.combine_mode} {'fp8' if self.fp8 else 'bf16'}"


VARIANTS = (
    Variant("rank_major", "rank_local_reduce"),
    Variant("expert_major", "rank_local_reduce"),
    Variant("expert_major", "direct_send"),
    Variant("expert_major", "rank_local_reduce", fp8=True),
)


def make_config(shape: str, variant: Variant, num_blocks: int | None) -> MoECommunicatorConfig:
    """Return the communicator's configuration for a named shape."""
    tokens, experts, topk = SHAPES[shape]
    return MoECommunicatorConfig(
        num_experts=experts,
        hidden_size=HIDDEN,
        num_topk=topk,
        max_tokens_per_rank=tokens,
        output_layout=ew.DispatchLayout(variant.layout),
        combine_mode=ew.CombineMode(variant.combine_mode),
        quant=QuantConfig(format=ew.DispatchDataType.FP8_E4M3 if variant.fp8 else ew.DispatchDataType.BF16),
        num_blocks=num_blocks,
        timeout_s=20.0,
    )


def rank_input(rank: int, shape: str) -> RankInput:
    """Return the tokens and routing that one rank brings: uniform experts without repetition."""
    tokens, experts, topk = SHAPES[shape]
    rng = np.random.default_rng((7, rank, tokens, experts))
    x = rng.standard_normal((tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)])
    return RankInput(x, ids, rng.random((tokens, topk), np.float32))


def to_torch(array: Any) -> Any:
    """Return a CUDA copy of a NumPy array, bfloat16 included."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def measure_rank(group: ew.Group, shape: str, variant: Variant, num_blocks: int | None) -> dict[str, Any]:
    """Time one configuration on this rank's GPU and return its samples in microseconds a pair."""
    import torch

    torch.cuda.set_device(group.rank)
    config = make_config(shape, variant, num_blocks)
    given = rank_input(group.rank, shape)
    x, ids, weights = to_torch(given.x), to_torch(given.topk_ids), to_torch(given.weights)
    with ew.MoECommunicator(group, config, device=f"cuda:{group.rank}") as comm:
        y = torch.empty_like(x)
        rows = comm.get_combine_input_buffer("torch")
        rows.fill_(0.5)
        torch.cuda.synchronize()
        group.barrier()

        def pair() -> None:
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(rows if variant.fp8 else out.tokens, handle, out=y)

        for _ in range(3):
            pair()
        torch.cuda.synchronize()
        correct = check_result(config, group.size, group.rank, shape, variant, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(PAIRS):
                pair()
        samples = []
        for replay in range(WARMUP + REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= WARMUP:
                samples.append(begin.elapsed_time(end) * 1000 / PAIRS)
        comm.check()
    return {"samples_us": samples, "correct": correct}


def check_result(config: MoECommunicatorConfig, size: int, rank: int, shape: str, variant: Variant, y: Any) -> bool:
    """Whether the combined tokens equal the reference's, bit for bit."""
    import torch

    inputs = [rank_input(peer, shape) for peer in range(size)]
    if variant.fp8:
        ones = [np.full((len(i.x), HIDDEN), 0.5, ml_dtypes.bfloat16) for i in inputs]
        inputs = [RankInput(one, i.topk_ids, i.weights) for one, i in zip(ones, inputs, strict=True)]
    plain = replace(config, quant=QuantConfig())
    expected = combine(plain, inputs, [out.tokens for out in dispatch(plain, inputs)])[rank]
    return bool((y.view(torch.int16).cpu().numpy() == expected.view(np.int16)).all())


def gpu_description() -> dict[str, str]:
    """Return GPU names and the driver version as nvidia-smi prints them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    names, drivers = zip(*(line.split(", ") for line in lines), strict=True)
    return {"gpus": ", ".join(names), "driver": drivers[0]}


def main() -> int:
    """Measure and write; 1 if a result was wrong."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-blocks", type=int, nargs="*", default=[0], help="grid sizes; 0: all SMs")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for num_blocks in options.num_blocks:
        for shape in options.shapes:
            for variant in VARIANTS:
                ranks = ew.spawn(measure_rank, options.ranks, shape, variant, num_blocks or None, timeout_s=120)
                slowest = [max(times) for times in zip(*(rank["samples_us"] for rank in ranks), strict=True)]
                correct = all(rank["correct"] for rank in ranks)
                rows.append({
                    "shape": shape, "variant": variant.name, "num_blocks": num_blocks, "correct": correct,
                    "median_us": median(slowest), "min_us": min(slowest), "max_us": max(slowest), "samples_us": slowest,
                })  # fmt: skip
                print(
                    f"{shape} {variant.name:40} blocks {num_blocks:3}: {median(slowest):7.2f} us {correct}", flush=True
                )
    report = {
        "command": "python benchmarks/measure_gpu.py " + " ".join(sys.argv[1:]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": gpu_description(),
        "versions": {"expertwire": ew.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "method": f"captured graph of {PAIRS} pairs, {REPLAYS} replays, slowest rank",
        "rows": rows,
    }
    options.output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
