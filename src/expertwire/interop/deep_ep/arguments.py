"""What callers hand in, checked in their own words before anything is sent."""

from __future__ import annotations

from functools import cache

import torch

from expertwire.errors import InvalidArgumentError
from expertwire.interop.arrays import refuse
from expertwire.interop.deep_ep.communicators import Problem
from expertwire.interop.torch_arrays import TorchAdapter
from expertwire.types import SCALE_BLOCK

_adapter = cache(TorchAdapter)
_INDEX_NAMES = {torch.int64: "int64", torch.int32: "int32"}


def positive(value: object, name: str) -> int:
    """An integer above 0, or InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        refuse(name, repr(value), "must be an integer > 0")
    return value


def tensor(value: object, name: str, dtype: str, shape: tuple[int, ...], device: str) -> None:
    """Raises InvalidArgumentError unless ``value`` is a contiguous tensor that is exactly so."""
    if not isinstance(value, torch.Tensor):
        refuse(name, f"{type(value).__name__} object", "must be a torch tensor")
    _adapter(device).address(value, name, dtype, shape)


def experts(topk_idx: object, num_tokens: int, device: str) -> int:
    """Checks ``topk_idx``. Returns K."""
    if not isinstance(topk_idx, torch.Tensor):
        refuse("topk_idx", f"{type(topk_idx).__name__} object", "must be a torch tensor")
    dtype = _INDEX_NAMES.get(topk_idx.dtype)
    if dtype is None:
        refuse("topk_idx", f"{topk_idx.dtype} tensor", "the dtype must be deep_ep.topk_idx_t (int64) or int32")
    if topk_idx.dim() != 2:
        refuse("topk_idx", f"tensor of shape {list(topk_idx.shape)}", f"must be [{num_tokens}, num_topk]")
    num_topk = int(topk_idx.shape[1])
    tensor(topk_idx, "topk_idx", dtype, (num_tokens, num_topk), device)
    return num_topk


def finishing(async_finish: bool, return_recv_hook: bool) -> None:
    """Raises InvalidArgumentError if both are asked for."""
    if async_finish and return_recv_hook:
        raise InvalidArgumentError(
            "async_finish = True, return_recv_hook = True: at most one of them; a hook receives on the stream on which "
            "it is called, an event says when another stream is done"
        )


def payload_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> str:
    """The format of the rows, one of ``communicators.FORMATS``."""
    if not use_fp8:
        return "bf16"
    if use_ue8m0 and not round_scale:
        refuse("use_ue8m0", "True", "needs round_scale=True: an exponent alone holds powers of two only")
    return "fp8_ue8m0" if use_ue8m0 else "fp8_rounded" if round_scale else "fp8"


def problem_of(x: object, topk_idx: object, most: object, num_experts: object, num_ranks: int, payload: str) -> Problem:
    """Checks the tensors of a dispatch and says which problem they belong to."""
    num_tokens_allowed = positive(most, "num_max_dispatch_tokens_per_rank")
    all_experts = positive(num_experts, "num_experts")
    if all_experts % num_ranks:
        refuse("num_experts", str(all_experts), f"must be a multiple of the {num_ranks} ranks")
    if not isinstance(x, torch.Tensor):
        refuse("x", f"{type(x).__name__} object", "must be a bfloat16 torch tensor; use_fp8=True makes FP8 of it")
    if x.dim() != 2 or x.shape[0] > num_tokens_allowed or x.shape[1] % SCALE_BLOCK or x.shape[1] == 0:
        allowed = f"must be [T, hidden] with T <= num_max_dispatch_tokens_per_rank = {num_tokens_allowed}"
        refuse("x", f"tensor of shape {list(x.shape)}", f"{allowed} and hidden a multiple of {SCALE_BLOCK}")
    device = str(x.device)
    if x.device.type not in ("cpu", "cuda"):
        refuse("x", f"tensor on {device}", "must be on the CPU or on CUDA")
    tensor(x, "x", "bfloat16", tuple(x.shape), device)
    num_topk = experts(topk_idx, x.shape[0], device)
    return Problem(num_tokens_allowed, x.shape[1], all_experts, num_topk, device, payload)
