"""From what the caller wrote to what the core takes. Sizes and combinations are checked by the core, on all ranks.

Only what cannot be handed over as it is gets refused here: values of the wrong type, and names that do not exist.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

from expertwire import _core
from expertwire.errors import InvalidArgumentError
from expertwire.interop.cuda import current_device
from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    MoECommunicatorConfig,
    MoEMode,
    PeerLossPolicy,
    QuantConfig,
    ScaleFormat,
    ScaleLayout,
)

_INT32 = 2**31
_INT_FIELDS = (
    "num_experts",
    "hidden_size",
    "num_topk",
    "max_tokens_per_rank",
    "invalid_token_expert_id",
    "max_in_flight",
)
_E = TypeVar("_E", bound=Enum)


def parse_enum(kind: type[_E], value: object, name: str) -> _E:
    """The member that ``value`` is or names, whatever its case. Raises InvalidArgumentError."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    allowed = ", ".join(f'"{member.name.lower()}"' for member in kind)
    raise InvalidArgumentError(f"{name} = {value!r}: must be a {kind.__name__} or one of {allowed}")


def parse_int(value: object, name: str) -> int:
    """An int that fits 32 bits, NumPy's kinds included. Raises InvalidArgumentError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} = {value!r}: must be an integer") from None
    if isinstance(value, bool) or not -_INT32 <= number < _INT32:
        raise InvalidArgumentError(f"{name} = {value!r}: must be an integer of 32 bits")
    return number


def parse_float(value: object, name: str) -> float:
    """A float. Raises InvalidArgumentError."""
    if isinstance(value, (str, bytes, bytearray, bool)):
        raise InvalidArgumentError(f"{name} = {value!r}: must be a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} = {value!r}: must be a number") from None


def parse_bool(value: object, name: str) -> bool:
    """A bool and nothing that merely has a truth value. Raises InvalidArgumentError."""
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"{name} = {value!r}: must be True or False")


def parse_device(value: object) -> _core.Device:
    """``"cpu"``, ``"cuda:3"``, or ``"cuda"`` for the framework's current device. Raises InvalidArgumentError."""
    device = _core.Device()
    kind, colon, index = str(value).lower().partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdigit())):
        raise InvalidArgumentError(f'device = {value!r}: must be None, "cpu", "cuda" or "cuda:<index>"')
    device.type = _core.DeviceType.CUDA if kind == "cuda" else _core.DeviceType.CPU
    if colon:
        device.index = parse_int(int(index), "device index")
    elif kind == "cuda":
        device.index = current_device()
    return device


def _validate(value: object, device: _core.Device) -> bool:
    if value is None:
        return device.type == _core.DeviceType.CPU or _core.env_validate()
    return parse_bool(value, "validate")


def _parse_num_blocks(value: object) -> tuple[int, int]:
    if value is None:
        return 0, 0  # the core chooses
    pair = value if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(pair) == 2:
        dispatch, combine = (parse_int(number, "num_blocks") for number in pair)
        if dispatch >= 1 and combine >= 1:
            return dispatch, combine
    raise InvalidArgumentError(f"num_blocks = {value!r}: must be None, an integer >= 1 or a pair of them")


def parse_ints(value: Any, name: str, what: str) -> list[int]:
    """A list of ints, at least one; ``what`` says what they are. Raises InvalidArgumentError."""
    try:
        numbers = list(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} = {value!r}: must be {what}") from None
    if not numbers:
        raise InvalidArgumentError(f"{name} = []: must be {what}")
    return [parse_int(number, name) for number in numbers]


def parse_placement(value: Any) -> list[int]:
    """A placement as the core takes it. Raises InvalidArgumentError."""
    return parse_ints(value, "placement", "one logical expert, or -1, for each physical expert")


def _parse_experts(value: Any) -> list[int]:
    return [] if value is None else parse_ints(value, "experts_per_rank", "None or one count for each rank")


def _core_quant(quant: object) -> _core.QuantConfig:
    if not isinstance(quant, QuantConfig):
        raise InvalidArgumentError(f"quant = {quant!r}: must be a QuantConfig")
    if quant.block_scales is not None:
        raise InvalidArgumentError("quant.block_scales: belongs to a dispatch call, not to the constructor")
    made = _core.QuantConfig()
    made.format = core_enum(parse_enum(DispatchDataType, quant.format, "quant.format"))
    made.round_scale_pow2 = parse_bool(quant.round_scale_pow2, "quant.round_scale_pow2")
    made.scale_format = core_enum(parse_enum(ScaleFormat, quant.scale_format, "quant.scale_format"))
    made.scale_layout = core_enum(parse_enum(ScaleLayout, quant.scale_layout, "quant.scale_layout"))
    return made


def core_enum(member: Enum) -> Any:
    """The member of the same name of the core's enum of the same name."""
    return getattr(getattr(_core, type(member).__name__), member.name)


def to_core(config: MoECommunicatorConfig, group_device: str) -> _core.RuntimeConfig:
    """The core's form of a configuration. Raises InvalidArgumentError naming the field."""
    made = _core.RuntimeConfig()
    for name in _INT_FIELDS:
        setattr(made, name, parse_int(getattr(config, name), name))
    made.experts_per_rank = _parse_experts(config.experts_per_rank)
    made.placement = [] if config.placement is None else parse_placement(config.placement)
    made.mode = core_enum(parse_enum(MoEMode, config.mode, "mode"))
    made.output_layout = core_enum(parse_enum(DispatchLayout, config.output_layout, "output_layout"))
    made.combine_mode = core_enum(parse_enum(CombineMode, config.combine_mode, "combine_mode"))
    made.quant = _core_quant(config.quant)
    made.dispatch_num_blocks, made.combine_num_blocks = _parse_num_blocks(config.num_blocks)
    device = parse_device(group_device if config.device is None else config.device)
    made.device, made.validate = device, _validate(config.validate, device)
    made.two_phase = parse_bool(config.two_phase, "two_phase")
    made.block_overlap = parse_bool(config.block_overlap, "block_overlap")
    made.timeout_s = parse_float(config.timeout_s, "timeout_s")
    made.on_peer_loss = core_enum(parse_enum(PeerLossPolicy, config.on_peer_loss, "on_peer_loss"))
    return made


def resolved(config: MoECommunicatorConfig, core: _core.RuntimeConfig) -> MoECommunicatorConfig:
    """``config`` with the core's defaults filled in and every name turned into its enum member."""
    return replace(
        config,
        num_experts=core.num_experts,
        hidden_size=core.hidden_size,
        num_topk=core.num_topk,
        max_tokens_per_rank=core.max_tokens_per_rank,
        experts_per_rank=tuple(core.experts_per_rank),
        placement=tuple(core.placement) or None,
        mode=MoEMode[core.mode.name],
        output_layout=DispatchLayout[core.output_layout.name],
        combine_mode=CombineMode[core.combine_mode.name],
        quant=QuantConfig(
            format=DispatchDataType[core.quant.format.name],
            round_scale_pow2=core.quant.round_scale_pow2,
            scale_format=ScaleFormat[core.quant.scale_format.name],
            scale_layout=ScaleLayout[core.quant.scale_layout.name],
        ),
        invalid_token_expert_id=core.invalid_token_expert_id,
        max_in_flight=core.max_in_flight,
        validate=core.validate,
        two_phase=core.two_phase,
        block_overlap=core.block_overlap,
        device="cpu" if core.device.type == _core.DeviceType.CPU else f"cuda:{core.device.index}",
        timeout_s=core.timeout_s,
        on_peer_loss=PeerLossPolicy[core.on_peer_loss.name],
    )
