"""What the processes of a job share: memory-mapped arrays in one folder that the parent removes."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertwire.run.model import BF16
from expertwire.run.plan import JobConfig

Numpy = npt.NDArray[Any]

#: First index of ``Board.seconds``.
DISPATCH, EXPERTS, COMBINE = range(3)
#: First index of ``Board.done``.
RANKS, CHECKS = range(2)


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did with some tokens.

    Attributes:
        topk_ids: int32 [T, K].
        weights: float32 [T, K].
        states: bfloat16 [T, H], after the layer.
    """

    topk_ids: Numpy
    weights: Numpy
    states: Numpy


@dataclass(frozen=True)
class Difference:
    """The first place where a rank and the reference disagree.

    Attributes:
        step: number of the step.
        layer: number of the layer.
        token: position in the whole text.
        what: ``"topk_ids"``, ``"weights"`` or ``"states"``.
        element: index within the token's row.
        found: the rank's value.
        expected: the reference's.
    """

    step: int
    layer: int
    token: int
    what: str
    element: int
    found: float
    expected: float


@dataclass(frozen=True)
class Board:
    """Inputs and results of a job, seen by all of its processes.

    Attributes:
        token_ids: int32 [tokens].
        topk_ids: int32 [layers, tokens, K].
        weights: float32 [layers, tokens, K].
        states: bfloat16 bits as uint16 [layers, tokens, H], after each layer.
        seconds: float64 [3, R, steps, layers]; one call's dispatch, expert and combine time on one rank.
        done: int64 [2, processes]; tokens finished by each rank and by each process that checks.
    """

    token_ids: npt.NDArray[np.int32]
    topk_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    states: npt.NDArray[np.uint16]
    seconds: npt.NDArray[np.float64]
    done: npt.NDArray[np.int64]

    def write(self, layer: int, tokens: slice, record: LayerRecord) -> None:
        """Stores what a rank computed for a range of the text."""
        self.topk_ids[layer, tokens] = record.topk_ids
        self.weights[layer, tokens] = record.weights
        self.states[layer, tokens] = record.states.view(np.uint16)

    def difference(self, step: int, layer: int, tokens: slice, expected: LayerRecord) -> Difference | None:
        """Returns the first element of a range whose bits are not those expected; routing comes before states."""
        for field in fields(expected):
            found, wanted = getattr(self, field.name)[layer, tokens], getattr(expected, field.name)
            unequal = found.view(_bits(found)) != wanted.view(_bits(wanted))
            if unequal.any():
                row, element = (int(index) for index in np.argwhere(unequal)[0])
                values = found.view(wanted.dtype)[row, element], wanted[row, element]
                return Difference(step, layer, tokens.start + row, field.name, element, *map(float, values))
        return None


def create_board(folder: Path, config: JobConfig, token_ids: npt.NDArray[np.int32], num_checks: int) -> Board:
    """Creates the files, all zero but ``token_ids``. Raises OSError when the disk has no room for them."""
    tokens, model = len(token_ids), config.model
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "token_ids": (np.int32, (tokens,)),
        "topk_ids": (np.int32, (model.num_layers, tokens, model.num_topk)),
        "weights": (np.float32, (model.num_layers, tokens, model.num_topk)),
        "states": (np.uint16, (model.num_layers, tokens, model.hidden_size)),
        "seconds": (np.float64, (3, config.num_ranks, config.schedule(tokens).num_steps, model.num_layers)),
        "done": (np.int64, (2, max(config.num_ranks, num_checks))),
    }
    board = Board(**{name: _create(folder / f"{name}.npy", dtype, shape) for name, (dtype, shape) in shapes.items()})
    board.token_ids[:] = token_ids
    return board


def open_board(folder: Path) -> Board:
    """Maps the files that :func:`create_board` made, for reading and writing."""
    return Board(**{field.name: np.load(folder / f"{field.name}.npy", mmap_mode="r+") for field in fields(Board)})


def _create(path: Path, dtype: Any, shape: tuple[int, ...]) -> Numpy:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    # The file is sparse. Reserving its blocks turns a full disk into an error here instead of a SIGBUS later.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _bits(values: Numpy) -> Any:
    return np.uint16 if values.dtype == BF16 else np.dtype(f"u{values.dtype.itemsize}")
