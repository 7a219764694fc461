"""Routing traces: which experts each token of a run chose, with which weights. ``docs/run.md`` describes the file."""

from __future__ import annotations

import json
import zipfile
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
    try:
        # NumPy leaves a file open that it opened and cannot make sense of.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            meta = json.loads(str(stored["meta"]))
            topk_ids, weights, rank_offsets = stored["topk_ids"], stored["weights"], stored["rank_offsets"]
        if meta.pop("format") != FORMAT_NAME:
            raise ValueError("another format")
        version = meta.pop("version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this expertwire reads {FORMAT_VERSION}")
        info = TraceInfo(**meta)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"{path}: not a routing trace written by expertwire run ({error})") from error
    _check(path, RoutingTrace(topk_ids, weights, rank_offsets, info))
    return RoutingTrace(topk_ids, weights, rank_offsets, info)


def _check(path: Path, trace: RoutingTrace) -> None:
    ids, experts = trace.topk_ids, trace.info.num_experts
    if ids.ndim != 3 or ids.dtype not in (np.int16, np.int32):
        raise InvalidArgumentError(
            f"{path}: topk_ids is {ids.dtype}{list(ids.shape)}: must be int16 or int32 [L, T, K]"
        )
    if trace.weights.shape != ids.shape or trace.weights.dtype != np.float32:
        found = f"{trace.weights.dtype}{list(trace.weights.shape)}"
        raise InvalidArgumentError(f"{path}: weights is {found}: must be float32{list(ids.shape)} like topk_ids")
    if ids.size and int(ids.max()) >= experts:
        raise InvalidArgumentError(f"{path}: topk_ids holds {int(ids.max())}: must be below num_experts = {experts}")
    offsets = trace.rank_offsets
    if offsets.shape != (trace.info.num_ranks + 1,) or offsets[0] != 0 or offsets[-1] != ids.shape[1]:
        raise InvalidArgumentError(f"{path}: rank_offsets must rise from 0 to the number of tokens, {ids.shape[1]}")
