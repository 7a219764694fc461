"""NumPy arrays to torch tensors and back, the dtypes that neither knows of the other's included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertwire.reference import BF16, FP8
from expertwire.types import DispatchLayout, DispatchLayoutInfo, DispatchOutput

Numpy = NDArray[Any]


def to_tensor(array: Numpy, device: str) -> Any:
    """Return a tensor on ``device`` with the elements of an array, bfloat16 and FP8 of ml_dtypes included."""
    import torch

    plain = np.ascontiguousarray(array)
    if plain.dtype == BF16:
        return torch.from_numpy(plain.view(np.int16)).to(device).view(torch.bfloat16)
    if plain.dtype == FP8:
        return torch.from_numpy(plain.view(np.uint8)).to(device).view(torch.float8_e4m3fn)
    return torch.from_numpy(plain).to(device)


def to_numpy(tensor: Any) -> Numpy:
    """Return an array on the host with the elements of a contiguous tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).cpu().numpy().view(BF16))
    if tensor.dtype == torch.float8_e4m3fn:
        return np.asarray(tensor.view(torch.uint8).cpu().numpy().view(FP8))
    return np.asarray(tensor.cpu().numpy())


def valid_rows(received: DispatchOutput) -> tuple[Numpy, ...]:
    """Return indices (local expert, row) of the valid rows of an EXPERT_MAJOR output whose counts are on the host."""
    counts = np.asarray(received.layout.num_tokens_per_expert)
    local = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return local, rows


def output_to_host(received: DispatchOutput) -> DispatchOutput:
    """Return a dispatch output in NumPy arrays. Of EXPERT_MAJOR rows only the valid ones are copied."""
    quant = received.quant
    if quant is not None:
        quant = replace(quant, block_scales=to_numpy(quant.block_scales))
    kind, layout = received.layout.kind, received.layout
    facts = {name: getattr(layout, name) for name in ("num_tokens_per_expert", "num_tokens_per_rank", "rank_ranges")}
    layout = DispatchLayoutInfo(kind, **{name: to_numpy(fact) for name, fact in facts.items() if fact is not None})
    others = {name: getattr(received, name) for name in ("topk_ids", "weights", "source_token")}
    host = replace(
        received,
        quant=quant,
        layout=layout,
        combine_input_buffer=None,
        **{name: to_numpy(values) for name, values in others.items() if values is not None},
    )
    if kind is not DispatchLayout.EXPERT_MAJOR:
        return replace(host, tokens=to_numpy(received.tokens))
    return replace(host, tokens=_valid_tokens(received.tokens, valid_rows(host)))


def _valid_tokens(tokens: Any, valid: tuple[Numpy, ...]) -> Numpy:
    """Return a host array of the tensor's shape in which only the valid rows are set."""
    import torch

    as_bytes = tokens.view(torch.uint8)  # rows of any dtype can be picked as bytes
    picked = as_bytes[tuple(torch.from_numpy(part).to(tokens.device) for part in valid)].cpu().numpy()
    dtype = BF16 if tokens.dtype == torch.bfloat16 else FP8
    rows = np.empty(tuple(tokens.shape), dtype)  # pages that are not written cost nothing
    rows[valid] = picked.view(dtype)
    return rows
