"""The definition of correct: dispatch and combine of all ranks at once, in plain NumPy and ml_dtypes.

Every backend is held against this file bit for bit (sign and payload of NaN aside). There is no communication here: the
inputs of all ranks go in and the outputs of all ranks come out, so each rule can be read where it is applied. Symbols
as in :mod:`expertwire.types`. Ids outside [0, E), or with a placement [0, G), and, of an expert that a token names
twice, the later entries select nothing; the CPU backend refuses such ids instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertwire.types import (
    FP8_E4M3_MAX,
    FP8_MIN_AMAX,
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchLayoutInfo,
    DispatchOutput,
    MoECommunicatorConfig,
    QuantConfig,
    ScaleLayout,
)

Numpy = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16_MAX = float.fromhex("0x1.fep127")
_UE8M0_ONE = 127  # exponent byte of scale 1; fills the unused bytes of a row's last int32


@dataclass(frozen=True)
class RankInput:
    """What one rank brings to one dispatch.

    Attributes:
        x: bfloat16 [T, H]; float8_e4m3fn [T, H] if ``block_scales`` is given.
        topk_ids: int32 or int64 [T, K], global expert ids, logical ones with a placement; negative selects nothing.
        weights: float32 [T, K]; ``None`` is 1 everywhere.
        block_scales: rows are quantised already: float32 [T, S], or int32 [T, ceil(S / 4)] for UE8M0.
    """

    x: Numpy
    topk_ids: Numpy
    weights: Numpy | None = None
    block_scales: Numpy | None = None


def experts_of_ranks(config: MoECommunicatorConfig, num_ranks: int) -> list[range]:
    """Return the global ids of the experts of each rank; they are contiguous."""
    counts = config.experts_per_rank or (config.num_experts // num_ranks,) * num_ranks
    if len(counts) != num_ranks or sum(counts) != config.num_experts:
        raise ValueError(f"experts_per_rank = {counts}: must be {num_ranks} counts that sum to {config.num_experts}")
    ends = np.cumsum(counts)
    return [range(int(end) - count, int(end)) for count, end in zip(counts, ends, strict=True)]


def selected_ids(config: MoECommunicatorConfig, topk_ids: Numpy) -> Numpy:
    """Return ``topk_ids`` as int64 [T, K] with -1 in every slot that selects nothing."""
    ids = topk_ids.astype(np.int64)
    num_logical = config.num_experts if config.placement is None else max(config.placement) + 1
    ids[(ids < 0) | (ids >= num_logical)] = -1
    for k in range(1, config.num_topk):
        ids[(ids[:, :k] == ids[:, k : k + 1]).any(axis=1), k] = -1
    return ids


def physical_experts(placement: Sequence[int], experts_per_rank: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the physical expert that a rank sends the tokens of each logical one to, [G].

    A rank that holds copies of an expert uses the first of its own. The other ranks take all copies in turn: the i-th
    of them, ascending, uses copy i modulo their number, ascending.

    Args:
        placement: [E].
        experts_per_rank: [R].
        rank: the one that sends.
    """
    rank_of = [owner for owner, count in enumerate(experts_per_rank) for _ in range(count)]
    copies: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for physical, logical in enumerate(placement):
        if logical >= 0:
            copies[logical].append(physical)
    chosen = []
    for of_expert in copies:
        own = [physical for physical in of_expert if rank_of[physical] == rank]
        holders = {rank_of[physical] for physical in of_expert}
        turn = sum(other not in holders for other in range(rank))
        chosen.append(own[0] if own else of_expert[turn % len(of_expert)])
    return tuple(chosen)


def chosen_experts(config: MoECommunicatorConfig, topk_ids: Numpy, rank: int, num_ranks: int) -> Numpy:
    """Return the physical experts that ``topk_ids`` of a rank choose, int64 [T, K], with -1 for none."""
    ids = selected_ids(config, topk_ids)
    if config.placement is None:
        return ids
    counts = [len(experts) for experts in experts_of_ranks(config, num_ranks)]
    table = np.array(physical_experts(config.placement, counts, rank), np.int64)
    return np.where(ids < 0, -1, table[ids])


def quantize(x: Numpy, quant: QuantConfig) -> tuple[Numpy, Numpy]:
    """Quantise bfloat16 [..., H] in blocks of 128 (MXFP8: 32) and return (float8_e4m3fn [..., H], scales).

    The scales are float32 [..., S], or int32 [..., ceil(S / 4)] with four exponent bytes each for UE8M0.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // quant.scale_block, quant.scale_block)
    magnitude = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks)).max(axis=-1)
    amax = np.clip(magnitude, np.float32(FP8_MIN_AMAX), np.float32(_BF16_MAX))
    scales, factors = amax / np.float32(FP8_E4M3_MAX), np.float32(FP8_E4M3_MAX) / amax
    if quant.round_scale_pow2 or quant.packs_exponents:
        bits = scales.view(np.uint32)
        biased = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # scales are positive and normal, the next power of two is too
        scales, factors = (biased << 23).view(np.float32), ((254 - biased) << 23).view(np.float32)
    scaled = np.clip(blocks * factors[..., None], np.float32(-FP8_E4M3_MAX), np.float32(FP8_E4M3_MAX))  # NaN passes
    q = scaled.astype(FP8).reshape(x.shape)
    if quant.packs_exponents:
        return q, _pack_exponents((scales.view(np.uint32) >> 23).astype(np.uint8))
    return q, scales


def _pack_exponents(exponents: Numpy) -> Numpy:
    """Pack bytes [..., S] into int32 [..., ceil(S / 4)], the lower block in the lower byte."""
    padding = [(0, 0)] * (exponents.ndim - 1) + [(0, -exponents.shape[-1] % 4)]
    return np.pad(exponents, padding, constant_values=_UE8M0_ONE).view("<i4")


def dequantize(q: Numpy, scales: Numpy, quant: QuantConfig) -> Numpy:
    """Return float8_e4m3fn [..., H] times its scales (as :func:`quantize` returns them) as float32 [..., H]."""
    num_blocks = q.shape[-1] // quant.scale_block
    if quant.packs_exponents:
        exponents = np.ascontiguousarray(scales).view(np.uint8)[..., :num_blocks]
        scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    blocks = q.astype(np.float32).reshape(*q.shape[:-1], num_blocks, quant.scale_block)
    with np.errstate(over="ignore"):  # 448 times a scale that was rounded up can exceed float32
        return (blocks * scales[..., None]).reshape(q.shape)


@dataclass(frozen=True)
class _Run:
    """Consecutive rows that one rank receives from one source for the same experts."""

    source: int
    experts: range  # one expert (EXPERT_MAJOR) or all of the receiving rank (RANK_MAJOR)
    tokens: Numpy  # indices of the source's tokens, ascending
    first_row: int  # in the output seen as [rows, H]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.tokens))

    def chosen(self, ids: Numpy) -> Numpy:
        """Return which slots of the run's tokens name one of its experts, bool [len(tokens), K]."""
        return (ids[self.tokens] >= self.experts.start) & (ids[self.tokens] < self.experts.stop)


def _runs(config: MoECommunicatorConfig, ids: Sequence[Numpy], experts: range) -> Iterator[_Run]:
    """Yield the runs of the rank that has ``experts``, in the order of its output; ``ids`` are the sources' [T, K]."""
    max_tokens = config.max_tokens_per_rank
    if config.output_layout is DispatchLayout.RANK_MAJOR:
        for source, own in enumerate(ids):
            tokens = np.flatnonzero(((own >= experts.start) & (own < experts.stop)).any(axis=1))
            yield _Run(source, experts, tokens, source * max_tokens)
        return
    for local, expert in enumerate(experts):
        row = local * len(ids) * max_tokens
        for source, own in enumerate(ids):
            tokens = np.flatnonzero((own == expert).any(axis=1))
            yield _Run(source, range(expert, expert + 1), tokens, row)
            row += len(tokens)


@dataclass(frozen=True)
class _Sent:
    """One rank's input as it crosses the wire: payload [T, H], scales [T, S'] or None, ids and weights [T, K]."""

    payload: Numpy
    scales: Numpy | None
    ids: Numpy
    weights: Numpy


def _send(config: MoECommunicatorConfig, given: RankInput, rank: int, num_ranks: int) -> _Sent:
    payload, scales = given.x, given.block_scales
    if config.quant.format is not DispatchDataType.BF16 and scales is None:
        payload, scales = quantize(payload, config.quant)
    weights = np.ones(given.topk_ids.shape, np.float32) if given.weights is None else given.weights
    return _Sent(payload, scales, chosen_experts(config, given.topk_ids, rank, num_ranks), weights)


def dispatch(config: MoECommunicatorConfig, inputs: Sequence[RankInput]) -> list[DispatchOutput]:
    """Return what each rank receives when rank s brings ``inputs[s]``. Rows beyond the counts are zero."""
    sent = [_send(config, given, rank, len(inputs)) for rank, given in enumerate(inputs)]
    return [_receive(config, sent, experts) for experts in experts_of_ranks(config, len(inputs))]


def _receive(config: MoECommunicatorConfig, sent: Sequence[_Sent], experts: range) -> DispatchOutput:
    num_rows = len(sent) * config.max_tokens_per_rank
    expert_major = config.output_layout is DispatchLayout.EXPERT_MAJOR
    shape = (len(experts), num_rows) if expert_major else (num_rows,)
    total = len(experts) * num_rows if expert_major else num_rows
    tokens = np.zeros((total, config.hidden_size), sent[0].payload.dtype)
    scales = None if sent[0].scales is None else np.zeros((total, sent[0].scales.shape[1]), sent[0].scales.dtype)
    source_token = np.zeros(total, np.int32)
    topk_ids = np.full((total, config.num_topk), config.invalid_token_expert_id, np.int32)
    weights = np.zeros((total, config.num_topk), np.float32)
    runs = list(_runs(config, [sender.ids for sender in sent], experts))
    for run in runs:
        sender = sent[run.source]
        tokens[run.rows] = sender.payload[run.tokens]
        if scales is not None and sender.scales is not None:
            scales[run.rows] = sender.scales[run.tokens]
        source_token[run.rows] = run.source * config.max_tokens_per_rank + run.tokens
        chosen = run.chosen(sender.ids)
        topk_ids[run.rows][chosen] = sender.ids[run.tokens][chosen]
        weights[run.rows][chosen] = sender.weights[run.tokens][chosen]
    tokens = tokens.reshape(*shape, config.hidden_size)
    quant = None if scales is None else _with_scales(config.quant, scales.reshape(*shape, scales.shape[-1]))
    counts = np.array([len(run.tokens) for run in runs], np.int32)
    if not expert_major:
        info = DispatchLayoutInfo(config.output_layout, num_tokens_per_rank=counts)
        return DispatchOutput(tokens, quant, info, topk_ids=topk_ids, weights=weights)
    counts = counts.reshape(len(experts), len(sent))
    ends = counts.cumsum(axis=1, dtype=np.int32)
    ranges = np.stack([ends - counts, counts], axis=-1)
    info = DispatchLayoutInfo(config.output_layout, num_tokens_per_expert=ends[:, -1].copy(), rank_ranges=ranges)
    return DispatchOutput(tokens, quant, info, source_token=source_token.reshape(shape))


def _with_scales(quant: QuantConfig, scales: Numpy) -> QuantConfig:
    """Return ``quant`` with scales [..., rows, S'] in its memory order; COLUMN has stride 1 along the rows."""
    if quant.scale_layout is ScaleLayout.COLUMN:
        scales = np.ascontiguousarray(scales.swapaxes(-1, -2)).swapaxes(-1, -2)
    return replace(quant, block_scales=scales)


def weighted_sum(terms: Iterable[tuple[float, Numpy]], hidden_size: int) -> Numpy:
    """Return the bfloat16 [H] sum of (weight, row) terms: float32, in order, product and sum each rounded, from +0."""
    total = np.zeros(hidden_size, np.float32)
    with np.errstate(all="ignore"):  # overflow to Inf, NaN of Inf - Inf and denormals are results like any other
        for weight, row in terms:
            total = total + np.float32(weight) * row.astype(np.float32)
        return total.astype(BF16)


@dataclass(frozen=True)
class _Term:
    """What one slot of a token contributes: the rank its expert is on, the weight, and that expert's row [H]."""

    rank: int
    weight: float
    row: Numpy


def combine(
    config: MoECommunicatorConfig,
    inputs: Sequence[RankInput],
    expert_outputs: Sequence[Numpy],
    weights: Sequence[Numpy | None] | None = None,
) -> list[Numpy]:
    """Return the combined tokens of each rank, bfloat16 [T, H].

    Args:
        config: the communicator's configuration.
        inputs: what :func:`dispatch` was given.
        expert_outputs: per rank, bfloat16 rows in the order of its dispatch output: EXPERT_MAJOR [L, R*M, H];
            RANK_MAJOR [R*M, H], or [R*M, K, H] with DIRECT_SEND.
        weights: per rank, float32 [T, K] in place of the weights of dispatch, or None to keep those (EXPERT_MAJOR).
    """
    if weights is not None:
        inputs = [own if new is None else replace(own, weights=new) for own, new in zip(inputs, weights, strict=True)]
    ids = [chosen_experts(config, given.topk_ids, rank, len(inputs)) for rank, given in enumerate(inputs)]
    terms: list[list[dict[int, _Term]]] = [[{} for _ in own] for own in ids]  # [source][token][slot]
    for rank, experts in enumerate(experts_of_ranks(config, len(inputs))):
        for run in _runs(config, ids, experts):
            for i, k in np.argwhere(run.chosen(ids[run.source])):
                row = _output_row(config, expert_outputs[rank], run.first_row + i, k)
                weight = _weight(config, inputs[run.source], run.tokens[i], k)
                terms[run.source][run.tokens[i]][k] = _Term(rank, weight, row)
    combined = [np.zeros((len(own), config.hidden_size), BF16) for own in ids]
    for out, of_source in zip(combined, terms, strict=True):
        for token, by_slot in enumerate(of_source):
            out[token] = _combine_token(config, [by_slot[k] for k in sorted(by_slot)])
    return combined


def _output_row(config: MoECommunicatorConfig, expert_output: Numpy, row: int, k: int) -> Numpy:
    where: tuple[int, ...] = (row,)
    if config.output_layout is DispatchLayout.EXPERT_MAJOR:
        where = divmod(row, expert_output.shape[1])
    elif config.combine_mode is CombineMode.DIRECT_SEND:
        where = (row, k)
    found: Numpy = expert_output[where]
    return found


def _weight(config: MoECommunicatorConfig, given: RankInput, token: int, k: int) -> float:
    """Return what combine multiplies a row with; rows of RANK_MAJOR are weighted already."""
    if config.output_layout is DispatchLayout.RANK_MAJOR or given.weights is None:
        return 1.0
    return float(given.weights[token, k])


def _combine_token(config: MoECommunicatorConfig, terms: Sequence[_Term]) -> Numpy:
    """Return bfloat16 [H] from the terms of one token in ascending slot order."""
    if config.combine_mode is CombineMode.DIRECT_SEND:
        return weighted_sum(((term.weight, term.row) for term in terms), config.hidden_size)
    partials = []
    for rank in sorted({term.rank for term in terms}):
        local = [(term.weight, term.row) for term in terms if term.rank == rank]
        if config.output_layout is DispatchLayout.EXPERT_MAJOR:
            partials.append(weighted_sum(local, config.hidden_size))
        else:
            partials.append(local[0][1])  # one row, reduced by the caller already, however many slots name it
    return weighted_sum(((1.0, partial) for partial in partials), config.hidden_size)
