"""A process group of torch over the ranks of a benchmark: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from expertwire.bench.adapters.base import RankContext


def process_group(context: RankContext) -> Any:
    """Collective. Return ``torch.distributed`` with its default group made, once in a process."""
    return context.belongings.once(
        "torch.distributed", lambda: _make(context), lambda dist: dist.destroy_process_group()
    )


def _make(context: RankContext) -> Any:
    import torch
    import torch.distributed as dist

    group = context.group
    folder = tempfile.mkdtemp(prefix="expertwire-") if group.rank == 0 else ""
    try:
        place = context.exchange(folder.encode())[0].decode()
        on_gpu = context.settings.device == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.FileStore(str(Path(place) / "store"), group.size),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=context.settings.timeout_s),
            device_id=torch.device(context.device) if on_gpu else None,
        )
        dist.barrier()
        context.exchange(b"met")
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return dist
