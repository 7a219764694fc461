"""Routing traces: which experts each token of a run chose, with which weights. ``docs/run.md`` describes the file."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertwire.errors import InvalidArgumentError

FORMAT_NAME = "expertwire-routing"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class TraceInfo:
    """What a trace was recorded from.

    Attributes:
        num_experts: E.
        hidden_size: H of the model that routed.
        num_ranks: ranks of the recorded run; rank r held tokens ``rank_offsets[r]`` up to ``rank_offsets[r + 1]``.
        max_tokens_per_rank: tokens of one rank in one step.
        seed: seed of embeddings, router and experts.
        source: where the text came from, for people.
    """

    num_experts: int
    hidden_size: int
    num_ranks: int
    max_tokens_per_rank: int
    seed: int
    source: str


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of every token in every layer.

    Attributes:
        topk_ids: int16 or int32 [layers, tokens, K]; global expert ids, -1 for a slot that selects nothing.
        weights: float32 [layers, tokens, K].
        rank_offsets: int64 [R + 1]; the contiguous share of each rank.
        info: what it was recorded from.
    """

    topk_ids: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]
    rank_offsets: npt.NDArray[np.int64]
    info: TraceInfo


def save_trace(path: Path, trace: RoutingTrace) -> None:
    """Writes ``trace`` as a compressed npz under exactly the name ``path``. Raises OSError."""
    narrow = np.int16 if trace.info.num_experts <= np.iinfo(np.int16).max else np.int32
    meta = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(trace.info)}
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            topk_ids=trace.topk_ids.astype(narrow),
            weights=trace.weights.astype(np.float32),
            rank_offsets=trace.rank_offsets.astype(np.int64),
            meta=np.array(json.dumps(meta)),
        )


def load_trace(path: Path) -> RoutingTrace:
    """Reads a trace. Raises OSError if the file cannot be read, InvalidArgumentError if it is not a whole trace."""
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            meta = json.loads(str(stored["meta"]))
            trace = RoutingTrace(stored["topk_ids"], stored["weights"], stored["rank_offsets"], _info(meta))
        _check(trace)
    except Exception as error:  # what a spoiled archive raises depends on where it is spoiled
        why = " ".join(str(error).split())
        raise InvalidArgumentError(f"{path}: not a routing trace written by expertwire run ({why})") from error
    return trace


def _info(meta: dict[str, Any]) -> TraceInfo:
    """Return what the text of a trace says. Raises any exception if it says something else."""
    if meta.pop("format") != FORMAT_NAME:
        raise ValueError("another format")
    version = meta.pop("version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}, this expertwire reads {FORMAT_VERSION}")
    info = TraceInfo(**meta)
    for name in ("num_experts", "hidden_size", "num_ranks", "max_tokens_per_rank"):
        value = meta[name]
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}: must be a whole number of at least 1")
    if type(info.seed) is not int or not isinstance(info.source, str):
        raise ValueError(f"seed, source are {info.seed!r}, {info.source!r}: must be a whole number and a text")
    return info


def _check(trace: RoutingTrace) -> None:
    """Raises ValueError if the arrays of a trace do not fit each other or what it was recorded from."""
    ids, weights, offsets, info = trace.topk_ids, trace.weights, trace.rank_offsets, trace.info
    if ids.ndim != 3 or ids.size == 0 or ids.dtype not in (np.int16, np.int32):
        raise ValueError(f"topk_ids is {ids.dtype}{list(ids.shape)}: must be int16 or int32 [L, T, K], none of them 0")
    if weights.shape != ids.shape or weights.dtype != np.float32:
        found = f"{weights.dtype}{list(weights.shape)}"
        raise ValueError(f"weights is {found}: must be float32{list(ids.shape)} like topk_ids")
    if not np.isfinite(weights).all():
        raise ValueError("weights holds what is no finite number")
    if int(ids.max()) >= info.num_experts:
        raise ValueError(f"topk_ids holds {int(ids.max())}: must be below num_experts = {info.num_experts}")
    in_order = np.sort(ids, axis=-1)
    again = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)  # -1 selects nothing, and may repeat
    if again.any():
        layer, token, slot = np.argwhere(again)[0].tolist()
        raise ValueError(
            f"topk_ids names expert {in_order[layer, token, slot]} twice for token {token} of layer {layer}"
        )
    if offsets.dtype != np.int64 or offsets.shape != (info.num_ranks + 1,):
        raise ValueError(f"rank_offsets is {offsets.dtype}{list(offsets.shape)}: must be int64[{info.num_ranks + 1}]")
    if offsets[0] != 0 or offsets[-1] != ids.shape[1] or (np.diff(offsets) < 0).any():
        raise ValueError(f"rank_offsets must rise from 0 to the number of tokens, {ids.shape[1]}")
