"""Comparison bit for bit. NaN equals NaN, whatever its sign and payload; rows beyond the counts are never looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from expertwire.types import DispatchLayout, DispatchOutput, ScaleLayout


def assert_same_bits(got: Any, want: Any, what: str) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{what}: dtype or shape"
    word = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(word) != np.ascontiguousarray(want).view(word)
    if got.dtype.kind in "fV":  # ml_dtypes' formats are of kind V or f
        differ &= ~(np.isnan(got) & np.isnan(want))
    if differ.any():
        first = tuple(int(index) for index in np.argwhere(differ)[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.size} elements differ, first at {first}: "
            f"got {got[first]!r}, want {want[first]!r}"
        )


def valid_rows(output: DispatchOutput) -> Iterator[tuple[int | slice, ...]]:
    """Yield what indexes the valid rows: (expert, rows) for EXPERT_MAJOR, (rows,) for RANK_MAJOR."""
    if output.layout.kind is DispatchLayout.EXPERT_MAJOR:
        for expert, count in enumerate(np.asarray(output.layout.num_tokens_per_expert).tolist()):
            yield (expert, slice(0, count))
        return
    counts = np.asarray(output.layout.num_tokens_per_rank).tolist()
    max_tokens = len(output.tokens) // len(counts)
    for source, count in enumerate(counts):
        yield (slice(source * max_tokens, source * max_tokens + count),)


def assert_dispatch_equal(got: DispatchOutput, want: DispatchOutput, what: str = "dispatch") -> None:
    """Hold what one rank received against the reference: counts first, since they say which rows exist."""
    assert got.layout.kind is want.layout.kind
    for name in ("num_tokens_per_expert", "num_tokens_per_rank", "rank_ranges"):
        _assert_same_or_none(getattr(got.layout, name), getattr(want.layout, name), f"{what}: {name}")
    for name in ("topk_ids", "weights"):  # the padding of these is promised too
        _assert_same_or_none(getattr(got, name), getattr(want, name), f"{what}: {name}")
    assert got.tokens.shape == want.tokens.shape, f"{what}: tokens"
    for where in valid_rows(want):
        assert_same_bits(got.tokens[where], want.tokens[where], f"{what}: tokens of rows {where}")
        if want.source_token is not None:
            assert got.source_token is not None
            assert_same_bits(got.source_token[where], want.source_token[where], f"{what}: source_token of rows {where}")
    _assert_scales_equal(got, want, what)


def _assert_same_or_none(got: Any, want: Any, what: str) -> None:
    assert (got is None) == (want is None), what
    if want is not None:
        assert_same_bits(got, want, what)


def _assert_scales_equal(got: DispatchOutput, want: DispatchOutput, what: str) -> None:
    assert (got.quant is None) == (want.quant is None), f"{what}: quant"
    if got.quant is None or want.quant is None:
        return
    for name in ("format", "scale_format", "scale_layout"):
        assert getattr(got.quant, name) is getattr(want.quant, name), f"{what}: quant.{name}"
    scales, wanted = got.quant.block_scales, want.quant.block_scales
    assert scales is not None
    assert wanted is not None
    assert scales.shape == wanted.shape, f"{what}: shape of block_scales"
    for where in valid_rows(want):
        assert_same_bits(scales[where], wanted[where], f"{what}: block_scales of rows {where}")


def assert_memory_order(output: DispatchOutput) -> None:
    """Hold the strides of the scales against the layout that ``output.quant`` names."""
    if output.quant is None or not output.quant.block_scales.size:
        return
    scales = output.quant.block_scales
    *experts, along_tokens, along_blocks = scales.strides
    if output.quant.scale_layout is ScaleLayout.ROW:
        assert scales.flags.c_contiguous, "strides of block_scales"
        return
    # As masked grouped GEMMs take it: TMA reads along tokens, and steps by multiples of 16 bytes that start at such.
    assert (along_tokens, along_blocks) == (scales.itemsize, -(-scales.shape[-2] // 4) * 16), "strides of block_scales"
    assert experts in ([], [along_blocks * scales.shape[-1]]), "stride of block_scales between experts"
    assert scales.ctypes.data % 16 == 0, "address of block_scales"
