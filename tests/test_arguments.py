"""Wrong arguments of dispatch and combine: refused by name, with nothing sent; the corrected call works."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from expertwire.types import DispatchDataType, QuantConfig, ScaleFormat
from one_rank import BF16, FP8_QUANT, ids, rows, single

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
MX_QUANT = QuantConfig(DispatchDataType.MXFP8)
UE8M0_QUANT = QuantConfig(DispatchDataType.FP8_E4M3, scale_format=ScaleFormat.UE8M0)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def scales(*shape: int, dtype: Any = np.float32) -> QuantConfig:
    return QuantConfig(block_scales=np.ones(shape, dtype))


BAD_DISPATCHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"x": None}, "x = NoneType object: must be a NumPy array"),
    ({}, {"x": [[1.0] * 128] * 3}, "x = list object"),
    ({}, {"x": rows(4), "topk_ids": np.zeros((4, 2), int)}, r"x = .*\[4, 128\].* T <= max_tokens_per_rank = 3"),
    ({}, {"x": rows()[0]}, r"x = .*\[128\]: must be \[T, 128\]"),
    ({}, {"x": rows()[None]}, r"x = .*\[1, 3, 128\]"),
    ({}, {"x": rows()[:, :64]}, r"x = bfloat16 \[3, 64\].*shape must be \[3, 128\]"),
    ({}, {"x": rows(dtype=np.float32)}, "x = float32 .*dtype must be bfloat16"),
    ({}, {"x": rows(dtype=np.float16)}, "x = float16 .*dtype must be bfloat16"),
    ({}, {"x": rows(dtype=FP8)}, "x = float8_e4m3fn .*dtype must be bfloat16"),
    ({}, {"x": np.ones((128, 3), BF16).T}, "x = non-contiguous bfloat16"),
    ({}, {"x": np.ones((3, 256), BF16)[:, ::2]}, "x = non-contiguous"),
    ({}, {"x": np.ones(3 * 256 + 1, np.uint8)[1:].view(BF16).reshape(3, 128)}, "x = .*must be aligned to 2 bytes"),
    ({}, {"topk_ids": None}, "topk_ids = NoneType object"),
    ({}, {"topk_ids": ids(2)}, r"topk_ids = int64 \[2, 2\].*shape must be \[3, 2\]"),
    ({}, {"topk_ids": ids()[:, :1]}, r"topk_ids = int64 \[3, 1\].*shape must be \[3, 2\]"),
    ({}, {"topk_ids": ids().astype(np.int16)}, "topk_ids = int16 array: the dtype must be int32 or int64"),
    ({}, {"topk_ids": ids().astype(np.uint32)}, "topk_ids = uint32 array"),
    ({}, {"topk_ids": ids().astype(np.float32)}, "topk_ids = float32 array"),
    ({}, {"topk_ids": ids().astype(">i4")}, "topk_ids = int32 of foreign byte order array"),
    ({}, {"topk_ids": np.asfortranarray(ids())}, "topk_ids = non-contiguous int64"),
    ({}, {"topk_ids": np.array([[0, 4], [1, 2], [1, 2]])}, "topk_ids.* 4"),
    ({}, {"topk_ids": np.array([[0, 2**31], [1, 2], [1, 2]])}, "topk_ids.* 2147483648"),
    ({}, {"topk_ids": np.array([[0, 1], [1, 2], [2, 2]])}, "topk_ids.* 2"),
    ({}, {"weights": np.ones((3, 2))}, "weights = float64 .*dtype must be float32"),
    ({}, {"weights": np.ones((3, 1), np.float32)}, r"weights = float32 \[3, 1\].*shape must be \[3, 2\]"),
    ({}, {"weights": np.ones((2, 3), np.float32).T}, "weights = non-contiguous"),
    ({}, {"weights": 1.0}, "weights = float object"),
    ({}, {"stream": 0}, "stream = 0: the CPU has no streams"),
    ({}, {"quant": "fp8"}, "quant = str object: must be None or a QuantConfig"),
    ({}, {"quant": scales(3, 1)}, "quant = block_scales: must be None: this communicator dispatches BF16"),
    ({"quant": FP8_QUANT}, {"quant": scales(3, 1)}, "quant = block_scales: must be None: x is bfloat16"),
    ({"quant": FP8_QUANT}, {"x": rows(dtype=FP8)}, "quant = no block_scales: float8_e4m3fn rows need"),
    ({"quant": FP8_QUANT}, {"x": rows(dtype=np.uint8)}, "x = uint8 .*dtype must be bfloat16"),
    (
        {"quant": FP8_QUANT},
        {"x": rows(dtype=FP8), "quant": scales(3, 2)},
        r"quant.block_scales = float32 \[3, 2\].*shape must be \[3, 1\]",
    ),
    (
        {"quant": FP8_QUANT},
        {"x": rows(dtype=FP8), "quant": scales(3, 1, dtype=np.int32)},
        "quant.block_scales = int32 .*dtype must be float32",
    ),
    (
        {"quant": UE8M0_QUANT},
        {"x": rows(dtype=FP8), "quant": scales(3, 1)},
        "quant.block_scales = float32 .*dtype must be int32",
    ),
    (
        {"quant": MX_QUANT},
        {"x": rows(dtype=FP8), "quant": scales(3, 4, dtype=np.int32)},
        r"quant.block_scales = int32 \[3, 4\].*shape must be \[3, 1\]",
    ),
    (
        {"quant": MX_QUANT},
        {"x": rows(dtype=FP8), "quant": scales(3, 4, dtype=np.uint8)},
        "quant.block_scales = uint8 .*dtype must be int32",
    ),
    ({"quant": FP8_QUANT}, {"x": rows(dtype=np.float32), "quant": scales(3, 1)}, "x = float32 .*must be float8_e4m3fn"),
    ({}, {"output_buffer": np.ones((4, 3, 64), BF16)}, r"output_buffer = .*shape must be \[4, 3, 128\]"),
    ({}, {"output_buffer": np.ones((4, 3, 128), np.float32)}, "output_buffer = float32 .*dtype must be bfloat16"),
    ({}, {"output_buffer": read_only(np.ones((4, 3, 128), BF16))}, "output_buffer = read-only"),
    ({"quant": FP8_QUANT}, {"output_buffer": np.ones((4, 3, 128), BF16)}, "output_buffer .*must be float8_e4m3fn"),
]


@pytest.mark.parametrize(("fields", "changes", "words"), BAD_DISPATCHES)
def test_bad_dispatch_is_refused_and_a_good_one_works(
    fields: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with single(**fields) as comm:
        with pytest.raises(ew.InvalidArgumentError, match=words):
            comm.dispatch(**{"x": rows(), "topk_ids": ids(), **changes})
        out, handle = comm.dispatch(rows(), ids())
        assert out.layout.num_tokens_per_expert.tolist() == [2, 1, 1, 1]
        assert comm.combine(out.tokens.astype(BF16), handle).shape == (3, 128)
        assert (comm.stats().dispatch_calls, comm.stats().combine_calls) == (1, 1)


def test_dispatch_must_not_read_what_it_writes() -> None:
    with single() as comm:
        out, _ = comm.dispatch(rows(), ids())
        with pytest.raises(ew.InvalidArgumentError, match="x overlaps the tokens of this lane, which this call writes"):
            comm.dispatch(out.tokens[0], ids())
        own = np.ones((4, 3, 128), BF16)
        with pytest.raises(ew.InvalidArgumentError, match="x overlaps output_buffer"):
            comm.dispatch(own[3], ids(), output_buffer=own)
        comm.dispatch(out.tokens[0], ids(), output_buffer=own)
        comm.dispatch(own[3][:0], ids(0), output_buffer=own)


BAD_COMBINES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"expert_output": None}, "expert_output = NoneType object"),
    ({}, {"expert_output": np.ones((3, 128), BF16)}, r"expert_output = .*shape must be \[4, 3, 128\]"),
    ({}, {"expert_output": np.ones((4, 3, 128), np.float32)}, "expert_output = float32 .*dtype must be bfloat16"),
    ({}, {"expert_output": np.ones((4, 128, 3), BF16).swapaxes(1, 2)}, "expert_output = non-contiguous"),
    ({"output_layout": "rank_major"}, {"expert_output": np.ones((4, 3, 128), BF16)}, r"shape must be \[3, 128\]"),
    (
        {"output_layout": "rank_major", "combine_mode": "direct_send"},
        {"expert_output": np.ones((3, 128), BF16)},
        r"expert_output = .*shape must be \[3, 2, 128\]",
    ),
    ({}, {"weights": np.ones((3, 2))}, "weights = float64 .*dtype must be float32"),
    ({}, {"weights": np.ones((2, 2), np.float32)}, r"weights = .*shape must be \[3, 2\]"),
    ({"output_layout": "rank_major"}, {"weights": np.ones((3, 2), np.float32)}, "weights = .*must be None: RANK_MAJOR"),
    ({}, {"out": np.ones((2, 128), BF16)}, r"out = bfloat16 \[2, 128\].*shape must be \[3, 128\]"),
    ({}, {"out": np.ones((3, 128), np.float32)}, "out = float32 .*dtype must be bfloat16"),
    ({}, {"out": read_only(np.ones((3, 128), BF16))}, "out = read-only"),
    ({}, {"out": [0.0]}, "out = list object"),
    ({}, {"stream": object()}, "stream = .*: the CPU has no streams"),
]


@pytest.mark.parametrize(("fields", "changes", "words"), BAD_COMBINES)
def test_bad_combine_is_refused_and_a_good_one_works(
    fields: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with single(**fields) as comm:
        out, handle = comm.dispatch(rows(), ids())
        buffer = out.combine_input_buffer
        buffer[...] = 0
        with pytest.raises(ew.InvalidArgumentError, match=words):
            comm.combine(**{"expert_output": buffer, "handle": handle, **changes})
        assert_same_bits(comm.combine(buffer, handle), np.zeros((3, 128), BF16), "combined")
        assert (comm.stats().dispatch_calls, comm.stats().combine_calls) == (1, 1)


def test_combine_must_not_write_what_it_reads() -> None:
    with single() as comm:
        out, handle = comm.dispatch(rows(), ids())
        with pytest.raises(ew.InvalidArgumentError, match="expert_output overlaps out, which this call writes"):
            comm.combine(out.tokens, handle, out=out.tokens[2])
        memory = np.ones((3, 128), BF16)
        weights = memory.reshape(-1)[:12].view(np.float32).reshape(3, 2)
        with pytest.raises(ew.InvalidArgumentError, match="weights overlaps out"):
            comm.combine(out.tokens, handle, weights=weights, out=memory)
        comm.combine(out.combine_input_buffer, handle, out=out.tokens[2])
