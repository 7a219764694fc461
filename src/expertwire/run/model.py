"""The layers of the main job: embeddings with a little context, a softmax router, and SwiGLU experts in NumPy.

Everything is float32 arithmetic on bfloat16 states. A BLAS may round a row differently when the batch around it
changes, or the alignment of its operands, or the number of threads. So whoever wants equal bits must hand over equal
matrices: the operands here always start on a cache line, and ``job`` gives its processes one BLAS thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Tokens before a token that colour its embedding, and how much of one is left a token later.
CONTEXT_TOKENS, CONTEXT_DECAY = 8, 0.7
_EPSILON = np.float32(1e-6)
_CACHE_LINE = 64
# First word of the seed sequence of each kind of parameter, so that none shares its stream with another.
_EMBEDDING, _ROUTER, _EXPERT = 0, 1, 2


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        num_experts: E of every layer.
        num_topk: K.
        hidden_size: H.
        intermediate_size: inner width of an expert.
        num_layers: mixture-of-experts layers.
        vocabulary_size: rows of the embedding table.
        seed: of all parameters.
    """

    num_experts: int
    num_topk: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocabulary_size: int
    seed: int


@dataclass(frozen=True)
class Routing:
    """Choice of the router: ``topk_ids`` int32 [T, K], best first; ``weights`` float32 [T, K], of sum 1 per token."""

    topk_ids: npt.NDArray[np.int32]
    weights: Float32


@dataclass(frozen=True)
class _Expert:
    gate_up: Float32  # [H, 2 * intermediate]
    down: Float32  # [intermediate, H]


class Model:
    """All embeddings and routers, and the experts of one contiguous range.

    Args:
        config: sizes and seed.
        experts: global ids of the experts to hold.
        max_rows: most rows one expert is given at once.
    """

    def __init__(self, config: ModelConfig, experts: range, max_rows: int) -> None:
        self.config = config
        self.experts = experts
        hidden, inner = config.hidden_size, config.intermediate_size
        self._embedding = _normal((config.vocabulary_size, hidden), 1.0, (_EMBEDDING, config.seed))
        self._routers = [
            _normal((hidden, config.num_experts), hidden**-0.5, (_ROUTER, config.seed, layer))
            for layer in range(config.num_layers)
        ]
        self._experts = [
            [
                _Expert(
                    _normal((hidden, 2 * inner), hidden**-0.5, (_EXPERT, config.seed, layer, expert, 0)),
                    _normal((inner, hidden), inner**-0.5, (_EXPERT, config.seed, layer, expert, 1)),
                )
                for expert in experts
            ]
            for layer in range(config.num_layers)
        ]
        self._rows = _aligned((max_rows, hidden))
        self._gate_up = _aligned((max_rows, 2 * inner))
        self._inner = _aligned((max_rows, inner))
        self._output = _aligned((max_rows, hidden))

    def embed(self, token_ids: npt.NDArray[np.int32], tokens: slice) -> npt.NDArray[Any]:
        """Returns bfloat16 [T, H]: each token of ``tokens`` plus a decaying sum of those before it in the text.

        ``token_ids`` is the whole text, int32 [all tokens], so that the shares of ranks do not change the embedding.
        """
        positions = np.arange(tokens.start, tokens.stop)
        states = self._embedding[token_ids[positions]]
        for distance in range(1, CONTEXT_TOKENS + 1):
            reaching = positions >= distance
            weight = np.float32((1 - CONTEXT_DECAY) * CONTEXT_DECAY ** (distance - 1))
            states[reaching] += weight * self._embedding[token_ids[positions[reaching] - distance]]
        return states.astype(BF16)

    def normalize(self, states: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns bfloat16 [T, H], the rows of ``states`` (bfloat16 [T, H]) over their root mean square."""
        values = states.astype(np.float32)
        mean_square = np.mean(values * values, axis=-1, keepdims=True)
        normed: npt.NDArray[Any] = (values / np.sqrt(mean_square + _EPSILON)).astype(BF16)
        return normed

    def route(self, layer: int, states: npt.NDArray[Any]) -> Routing:
        """Chooses K experts for each row of ``states``, bfloat16 [T, H]; of equal probabilities the lower id wins."""
        rows = self._rows[: len(states)]
        rows[:] = states
        logits = rows @ self._routers[layer]
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
        topk_ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.config.num_topk]
        chosen = np.take_along_axis(probabilities, topk_ids, axis=-1)
        return Routing(topk_ids.astype(np.int32), chosen / chosen.sum(axis=-1, keepdims=True))

    def run_expert(self, layer: int, expert: int, rows: npt.NDArray[Any]) -> Float32:
        """Returns down(silu(gate) * up) of one expert (a global id), float32 [rows, H], valid until the next call.

        ``rows`` is bfloat16 or float32 [rows, H]. Rows are computed as one matrix, in the order given.
        """
        parameters = self._experts[layer][expert - self.experts.start]
        inner, count = self.config.intermediate_size, len(rows)
        source, gate_up, activated = self._rows[:count], self._gate_up[:count], self._inner[:count]
        source[:] = rows
        np.matmul(source, parameters.gate_up, out=gate_up)
        gate, up = gate_up[:, :inner], gate_up[:, inner:]
        np.exp(-gate, out=activated)
        activated += np.float32(1)
        np.divide(gate, activated, out=activated)
        activated *= up
        return np.matmul(activated, parameters.down, out=self._output[:count])


def _normal(shape: tuple[int, int], scale: float, seed: tuple[int, ...]) -> Float32:
    values = _aligned(shape)
    np.random.default_rng(seed).standard_normal(dtype=np.float32, out=values)
    values *= np.float32(scale)
    return values


def _aligned(shape: tuple[int, int]) -> Float32:
    """Returns an uninitialised float32 array that starts on a cache line, which NumPy alone does not promise."""
    size = math.prod(shape) * 4
    raw = np.empty(size + _CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return raw[start : start + size].view(np.float32).reshape(shape)
