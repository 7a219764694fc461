"""The case table: every shape, placement, token count, routing, weight and payload that all backends must get right.

A case is data alone. ``config`` and ``inputs`` turn it into what ``reference.dispatch`` or a communicator takes; the
same name always gives the same bits.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from expertwire.bench.workloads import WORKLOADS, make_topk_ids
from expertwire.reference import BF16, RankInput, experts_of_ranks, quantize
from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    MoECommunicatorConfig,
    QuantConfig,
    ScaleFormat,
    ScaleLayout,
)

EXPERT_MAJOR, RANK_MAJOR = DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR
REDUCE, DIRECT = CombineMode.RANK_LOCAL_REDUCE, CombineMode.DIRECT_SEND
WAYS = tuple(itertools.product((EXPERT_MAJOR, RANK_MAJOR), (REDUCE, DIRECT)))


@dataclass(frozen=True)
class Case:
    """One exchange of all ranks.

    Attributes:
        name: unique; part of the seed.
        tokens: T of each rank; its length is R.
        num_experts, hidden_size, num_topk: E, H, K.
        max_tokens: M; the largest T if 0.
        experts_per_rank: None splits evenly.
        placement: None, or the logical expert of each physical one.
        layout, combine_mode, quant: as in the configuration.
        prequantized: the caller quantises.
        ids: a routing of ``make_topk_ids``, or ``none``, ``half``, ``own-rank``, ``to-rank:D``, ``far-negative``.
        ids_dtype: "int32" or "int64".
        weights: ``equal`` (within a token), ``none``, ``router``, ``zeros``, ``negative``, ``denormal``, ``one-nan``,
            or ``mixed`` (None on odd ranks).
        new_weights: give other weights to combine: "", "all" or "even-ranks".
        values: ``normal``, ``specials`` (NaN, Inf, denormals, -0) or ``fp8-specials``.
        max_in_flight: F.
        invalid_id: what marks unused entries of RANK_MAJOR.
    """

    name: str
    tokens: tuple[int, ...]
    num_experts: int = 8
    hidden_size: int = 24
    num_topk: int = 2
    max_tokens: int = 0
    experts_per_rank: tuple[int, ...] | None = None
    layout: DispatchLayout = EXPERT_MAJOR
    combine_mode: CombineMode = REDUCE
    quant: QuantConfig = field(default_factory=QuantConfig)
    prequantized: bool = False
    ids: str = "uniform"
    ids_dtype: str = "int64"
    weights: str = "equal"
    new_weights: str = ""
    values: str = "normal"
    max_in_flight: int = 1
    invalid_id: int = -1
    placement: tuple[int, ...] | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_logical(self) -> int:
        """Return how many experts tokens choose from."""
        return self.num_experts if self.placement is None else max(self.placement) + 1

    @property
    def config(self) -> MoECommunicatorConfig:
        return MoECommunicatorConfig(
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens or max(*self.tokens, 1),
            experts_per_rank=self.experts_per_rank,
            placement=self.placement,
            output_layout=self.layout,
            combine_mode=self.combine_mode,
            quant=self.quant,
            invalid_token_expert_id=self.invalid_id,
            max_in_flight=self.max_in_flight,
            device="cpu",
            timeout_s=30.0,
        )

    def inputs(self, step: int = 0, tokens: tuple[int, ...] | None = None) -> list[RankInput]:
        """Return the inputs of all ranks; other steps give other values, and ``tokens`` other token counts."""
        return [self.input(rank, count, step) for rank, count in enumerate(tokens or self.tokens)]

    def replaced_weights(self, step: int = 0) -> list[np.ndarray | None] | None:
        """Return what each rank gives to combine as ``weights``, or None if no rank gives any."""
        if not self.new_weights:
            return None
        return [
            None if self.new_weights == "even-ranks" and rank % 2 else _router_weights(rng, (count, self.num_topk))
            for rank, count in enumerate(self.tokens)
            for rng in [self._rng("new weights", rank, step)]
        ]

    def input(self, rank: int, num_tokens: int, step: int = 0) -> RankInput:
        """Return one rank's input for a step with this many tokens."""
        rng = self._rng(rank, step)
        x = draw_values(self.values, rng, (num_tokens, self.hidden_size))
        ids = self._draw_ids(rng, rank, num_tokens).astype(self.ids_dtype)
        weights = draw_weights(self.weights, rng, (num_tokens, self.num_topk), rank)
        if self.prequantized:
            q, scales = quantize(x, self.quant)
            return RankInput(q, ids, weights, scales)
        return RankInput(x, ids, weights)

    def _rng(self, *what: object) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(repr((self.name, *what)).encode()))

    def _draw_ids(self, rng: np.random.Generator, rank: int, count: int) -> np.ndarray:
        kind, _, argument = self.ids.partition(":")
        if kind in ("own-rank", "to-rank"):
            experts = experts_of_ranks(self.config, self.num_ranks)[rank if kind == "own-rank" else int(argument)]
            return experts.start + make_topk_ids("uniform", rng, count, len(experts), self.num_topk)
        if kind not in ("none", "half", "far-negative"):
            return make_topk_ids(self.ids, rng, count, self.num_logical, self.num_topk)
        ids = make_topk_ids("uniform", rng, count, self.num_logical, self.num_topk)
        lowest = np.iinfo(self.ids_dtype).min if kind == "far-negative" else -1
        return np.where(rng.random(ids.shape) < (1.0 if kind == "none" else 0.5), lowest, ids)


def draw_values(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw token rows, bfloat16 [T, H]."""
    x = (rng.standard_normal(shape) * rng.choice([0.01, 1.0, 30.0], size=(shape[0], 1))).astype(BF16)
    if kind == "normal" or x.size == 0:
        return x
    tiny, huge = ml_dtypes.finfo(BF16).smallest_subnormal, ml_dtypes.finfo(BF16).max
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, tiny, -tiny, huge, -huge], np.float32).astype(BF16)
    if kind == "specials":
        at = rng.integers(0, x.size, size=max(x.size // 50, 1))
        x.reshape(-1)[at] = rng.choice(specials, size=len(at))
        return x
    assert kind == "fp8-specials"
    for token in range(shape[0]):
        for start in range(0, shape[1], 128):
            block = x[token, start : start + 128]
            block[:] = _fp8_special_block(int(rng.integers(0, 9)), rng, block.astype(np.float32))
    return x


def _fp8_special_block(kind: int, rng: np.random.Generator, block: np.ndarray) -> np.ndarray:
    """Return 128 values: zeros, a block with one NaN or Inf, or one whose largest element is at an edge."""
    at = int(rng.integers(0, 128))
    edge = np.array(448.0 * 2.0 ** int(rng.integers(-24, 119)), BF16)
    if kind == 0:
        return np.zeros(128, BF16)
    if kind in (1, 2, 3):
        block[at] = (np.nan, np.inf, -np.inf)[kind - 1]
        return block.astype(BF16)
    if kind in (4, 5, 6):
        step = {4: 0, 5: 1, 6: -1}[kind]  # the edge, or its neighbour in BF16
        largest = np.array(int(edge.view(np.uint16)) + step, np.uint16).view(BF16)
        values = (rng.uniform(-0.99, 0.99, 128) * float(largest)).astype(BF16)
        values[at] = largest
        return values
    return (block * (1e-7 if kind == 7 else 1e36)).astype(BF16)


def _router_weights(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    weights = rng.exponential(size=shape).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True, dtype=np.float32)


def draw_weights(kind: str, rng: np.random.Generator, shape: tuple[int, int], rank: int = 0) -> np.ndarray | None:
    """Draw routing weights, float32 [T, K], or None for 1 everywhere."""
    weights = _router_weights(rng, shape)
    if kind == "none" or (kind == "mixed" and rank % 2):
        return None
    if kind == "equal":
        return np.repeat(weights[:, :1], shape[1], axis=1)
    if kind == "zeros":
        return np.zeros(shape, np.float32)
    if kind == "negative":
        return weights - np.float32(0.5)
    if kind == "denormal":
        return (weights * np.float32(1e-39)).astype(np.float32)
    if kind == "one-nan" and rank == 0 and shape[0]:
        weights[shape[0] // 2, -1] = np.nan
    return weights


def uneven(num_experts: int, num_ranks: int) -> tuple[int, ...] | None:
    """Return a placement of E experts over R ranks that differs between ranks where it must; None where it is even."""
    share, extra = divmod(num_experts, num_ranks)
    return tuple(share + (rank < extra) for rank in range(num_ranks)) if extra else None


FP8 = QuantConfig(DispatchDataType.FP8_E4M3)
QUANTS = {
    "float32": FP8,
    "pow2": QuantConfig(DispatchDataType.FP8_E4M3, round_scale_pow2=True),
    "ue8m0": QuantConfig(DispatchDataType.FP8_E4M3, scale_format=ScaleFormat.UE8M0),
    "float32-column": QuantConfig(DispatchDataType.FP8_E4M3, scale_layout=ScaleLayout.COLUMN),
    "ue8m0-column": QuantConfig(
        DispatchDataType.FP8_E4M3, scale_format=ScaleFormat.UE8M0, scale_layout=ScaleLayout.COLUMN
    ),
    "mxfp8": QuantConfig(DispatchDataType.MXFP8, scale_format=ScaleFormat.UE8M0),
    "mxfp8-column": QuantConfig(
        DispatchDataType.MXFP8, scale_format=ScaleFormat.UE8M0, scale_layout=ScaleLayout.COLUMN
    ),
}
#: (H, E, K) of models in use.
MODEL_SHAPES = (
    (7168, 256, 8), (7168, 384, 8), (3584, 896, 16), (1024, 512, 22), (2880, 128, 4),
    (5120, 160, 6), (4096, 128, 8), (2048, 128, 8), (4096, 8, 2),
)  # fmt: skip


def _ways(prefix: str, tokens: tuple[int, ...], **fields: Any) -> list[Case]:
    """Return one case for each layout and combine mode."""
    return [
        Case(f"{prefix}-{way_name(layout, mode)}", tokens, layout=layout, combine_mode=mode, **fields)
        for layout, mode in WAYS
    ]


def way_name(layout: DispatchLayout, mode: CombineMode) -> str:
    return f"{layout.value.split('_')[0]}-{'reduce' if mode is REDUCE else 'direct'}"


def _models() -> Iterator[Case]:
    quoted = ((w.hidden_size, w.num_experts, w.num_topk) for w in WORKLOADS.values())
    for index, (hidden, experts, topk) in enumerate(dict.fromkeys([*MODEL_SHAPES, *quoted])):
        for offset in (0, 1):
            layout, mode = WAYS[(index + 2 * offset) % 4]
            quant = FP8 if offset and hidden % 128 == 0 else QuantConfig()
            name = f"model-{hidden}x{experts}x{topk}-{way_name(layout, mode)}-{quant.format.value}"
            yield Case(name, (3, 2), experts, hidden, topk, layout=layout, combine_mode=mode, quant=quant)


RANK_COUNTS = (1, 2, 3, 4, 5, 7, 8, 16)


def _sizes() -> Iterator[Case]:
    """Yield every rank count with every layout and combine mode; each way meets every H and K of some odd ones."""
    for index, (ranks, (layout, mode)) in enumerate(itertools.product(RANK_COUNTS, WAYS)):
        hidden, topk = (1000, 136, 24, 8)[(index + index // 4) % 4], (1, 2, 3, 5, 7)[index % 5]
        tokens = tuple((3 * rank + index) % 6 for rank in range(ranks))
        name = f"ranks-{ranks}-{way_name(layout, mode)}-h{hidden}-k{topk}"
        yield Case(name, tokens, 8, hidden, topk, 6, uneven(8, ranks), layout, mode)


def _placements() -> Iterator[Case]:
    for counts in ((3, 0, 5), (0, 8), (8, 0), (1, 1, 1, 0, 5), (1, 0, 1, 0), (0, 0, 1), (0, 1, 0, 2, 0)):
        name, experts = "-".join(map(str, counts)), sum(counts)
        tokens = tuple(2 + rank for rank in range(len(counts)))
        yield from _ways(
            f"placed-{name}", tokens, num_experts=experts, num_topk=min(3, experts), experts_per_rank=counts
        )


#: Copies on several ranks and on one, experts in another order, places that hold none.
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "permuted": ((2, 2), (3, 2, 1, 0)),
    "copies": ((3, 2, 3, 2), (0, 1, 2, 3, 0, -1, 4, 5, 0, 3)),
    "copies-on-one-rank": ((3, 0, 3), (0, 0, 1, 1, 0, 2)),
    "everywhere": ((3, 3, 3, 3, 3), (0, 1, 2) * 5),
}


def _logical_experts() -> Iterator[Case]:
    for name, (counts, placement) in PLACEMENTS.items():
        fields: dict[str, Any] = {"experts_per_rank": counts, "placement": placement, "num_experts": len(placement)}
        tokens = tuple(7 - rank for rank in range(len(counts)))
        yield from _ways(f"logical-{name}", tokens, num_topk=3, ids="half", weights="router", **fields)
    yield Case(
        "logical-skewed-fp8", (33, 0, 20, 9), 10, 256, 4, 0, *PLACEMENTS["copies"][:1], RANK_MAJOR, REDUCE, FP8,
        ids="zipf:1.5", ids_dtype="int32", placement=PLACEMENTS["copies"][1],
    )  # fmt: skip


def _token_counts() -> Iterator[Case]:
    for counts in ((0, 4, 4), (0, 0, 5), (0, 0, 0), (1, 1, 1), (1, 3, 127, 129), (129, 129)):
        yield from _ways(f"tokens-{'-'.join(map(str, counts))}", counts, num_experts=12, num_topk=3)


def _routings() -> Iterator[Case]:
    for kind in ("zipf:1.5", "empty-experts", "observed-skew", "none", "half", "own-rank", "to-rank:1", "far-negative"):
        yield from _ways(f"ids-{kind}", (17, 0, 23, 9), num_experts=16, num_topk=4, ids=kind)
    yield from _ways("ids-one-hot", (9, 9, 9), num_experts=6, num_topk=1, ids="one-hot")
    yield from _ways("ids-int32", (5, 8), ids="half", ids_dtype="int32")
    yield Case("ids-far-negative-int32", (5, 8), ids="far-negative", ids_dtype="int32", layout=RANK_MAJOR)
    yield Case("topk-32", (6, 5, 4), 48, 64, 32)


def _weights() -> Iterator[Case]:
    for kind in ("none", "router", "zeros", "negative", "denormal", "one-nan", "mixed"):
        yield from _ways(f"weights-{kind}", (6, 7, 5), num_experts=12, hidden_size=40, num_topk=4, weights=kind)
    for mode, new, old in itertools.product((REDUCE, DIRECT), ("all", "even-ranks"), ("router", "none")):
        name = f"new-weights-{new}-over-{old}-{way_name(EXPERT_MAJOR, mode)}"
        yield Case(name, (6, 7, 5), 12, 40, 4, combine_mode=mode, weights=old, new_weights=new, ids="half")


def _payloads() -> Iterator[Case]:
    yield from _ways("values-specials", (9, 6), hidden_size=200, num_topk=3, values="specials")
    for (name, quant), given in itertools.product(QUANTS.items(), (False, True)):
        base = Case("", (7, 5, 0), 9, 640, 3, quant=quant, prequantized=given, ids="half")
        title = f"fp8-{name}{'-given' if given else ''}"
        yield replace(base, name=f"{title}-expert")
        yield replace(base, name=f"{title}-rank", hidden_size=512, layout=RANK_MAJOR, combine_mode=DIRECT)
    for name, quant in QUANTS.items():
        yield Case(f"fp8-{name}-specials", (24, 16), 4, 1152, 2, quant=quant, values="fp8-specials")
    yield Case("fp8-one-block", (5, 4), 4, 128, 2, quant=QUANTS["ue8m0"], layout=RANK_MAJOR)


def _life() -> Iterator[Case]:
    for lanes in (2, 3):
        yield from _ways(f"lanes-{lanes}", (5, 3), max_in_flight=lanes)
    yield Case("capacity-unused", (3, 2), max_tokens=300)
    yield Case("capacity-one", (1, 1), max_tokens=1)
    for invalid_id in (-1000, 8, 2**31 - 1):
        yield Case(f"invalid-id-{invalid_id}", (5, 6), layout=RANK_MAJOR, invalid_id=invalid_id, ids="half")


ALL_CASES = (
    *_models(), *_sizes(), *_placements(), *_logical_experts(), *_token_counts(), *_routings(), *_weights(),
    *_payloads(), *_life(),
)  # fmt: skip
CASES: dict[str, Case] = {case.name: case for case in ALL_CASES}
