"""A process group of torch over the ranks of a benchmark: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

from expertwire.bench.adapters.base import RankContext

_HERE = "127.0.0.1"


def process_group(context: RankContext) -> Any:
    """Collective. Return ``torch.distributed`` with its default group made, once in a process."""
    return context.belongings.once(
        "torch.distributed", lambda: _make(context), lambda dist: dist.destroy_process_group()
    )


def _make(context: RankContext) -> Any:
    import torch
    import torch.distributed as dist

    group, on_gpu = context.group, context.settings.device == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_store(context, dist),
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=context.settings.timeout_s),
        device_id=torch.device(context.device) if on_gpu else None,
    )
    dist.barrier()
    return dist


def _store(context: RankContext, dist: Any) -> Any:
    """Collective. Rank 0 serves, at a port that was free; by this host's own address where it is everybody's host."""
    timeout = timedelta(seconds=context.settings.timeout_s)
    host, leads = socket.gethostname(), context.group.rank == 0
    served = dist.TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=timeout) if leads else None
    port = served.port if served is not None else 0
    told = [json.loads(word) for word in context.exchange(json.dumps([host, port]).encode())]
    if served is not None:
        return served
    first = _HERE if all(name == host for name, _ in told) else told[0][0]
    return dist.TCPStore(first, told[0][1], is_master=False, wait_for_workers=False, timeout=timeout)
