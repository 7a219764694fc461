"""A drop-in for the low-latency part of DeepEP: ``import expertwire.interop.deep_ep as deep_ep``.

``docs/deep_ep.md`` says what is the same, what differs and what is left out.
"""

from __future__ import annotations

import torch

from expertwire.interop.deep_ep.buffer import Buffer
from expertwire.interop.deep_ep.events import EventHandle, EventOverlap
from expertwire.interop.deep_ep.left_out import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

#: The dtype that callers convert their expert ids to; int32 is accepted as well.
topk_idx_t = torch.int64
