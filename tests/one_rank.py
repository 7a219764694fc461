"""A small communicator of one rank, and arrays that fit it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import expertwire as ew
from expertwire.types import DispatchDataType, QuantConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE: dict[str, Any] = {"num_experts": 4, "hidden_size": 128, "num_topk": 2, "max_tokens_per_rank": 3}
FP8_QUANT = QuantConfig(DispatchDataType.FP8_E4M3)


def single(**fields: Any) -> ew.MoECommunicator:
    return ew.MoECommunicator(*ew.local_group(1), **{**SHAPE, **fields})


def rows(num_tokens: int = 3, dtype: Any = BF16) -> np.ndarray:
    return np.ones((num_tokens, 128), dtype)


def ids(num_tokens: int = 3) -> np.ndarray:
    return np.array([[0, 3], [2, -1], [1, 0]])[:num_tokens]
