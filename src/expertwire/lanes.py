"""The lanes of a communicator as arrays: shapes from the configuration, memory from the core, views made once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertwire import _core
from expertwire.interop.arrays import ArrayAdapter, num_bytes
from expertwire.interop.cuda import DeviceMemory
from expertwire.types import (
    Array,
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchLayoutInfo,
    DispatchOutput,
    MoECommunicatorConfig,
    ScaleLayout,
)


@dataclass(frozen=True)
class LaneShapes:
    """Shapes and dtypes of one communicator's arrays; symbols as in :mod:`expertwire.types`.

    Attributes:
        tokens: shape of a dispatch output.
        tokens_dtype: ``"bfloat16"`` or ``"float8_e4m3fn"``.
        expert_output: shape of what combine takes.
        num_scales: elements of one row of block scales; 0 for BF16.
        scales_dtype: ``"float32"``, or ``"int32"`` holding four UE8M0 bytes.
    """

    tokens: tuple[int, ...]
    tokens_dtype: str
    expert_output: tuple[int, ...]
    num_scales: int
    scales_dtype: str


def lane_shapes(config: MoECommunicatorConfig, num_ranks: int, num_local_experts: int) -> LaneShapes:
    """The shapes that follow from a resolved configuration."""
    rows = num_ranks * config.max_tokens_per_rank
    expert_major = config.output_layout is DispatchLayout.EXPERT_MAJOR
    leading = (num_local_experts, rows) if expert_major else (rows,)
    slots = (config.num_topk,) if not expert_major and config.combine_mode is CombineMode.DIRECT_SEND else ()
    fp8 = config.quant.format is not DispatchDataType.BF16
    packed = config.quant.packs_exponents
    blocks = config.hidden_size // config.quant.scale_block if fp8 else 0
    return LaneShapes(
        tokens=(*leading, config.hidden_size),
        tokens_dtype="float8_e4m3fn" if fp8 else "bfloat16",
        expert_output=(*leading, *slots, config.hidden_size),
        num_scales=(blocks + 3) // 4 if packed else blocks,
        scales_dtype="int32" if packed else "float32",
    )


def lane_outputs(
    runtime: _core.MoERuntime, config: MoECommunicatorConfig, shapes: LaneShapes, adapter: ArrayAdapter
) -> list[DispatchOutput]:
    """The dispatch output of each lane in arrays of one framework. They hold the runtime alive."""
    lanes = range(config.max_in_flight)
    return [_LaneViews(runtime, lane, adapter).output(config, shapes) for lane in lanes]


def lane_wait_counters(
    runtime: _core.MoERuntime, config: MoECommunicatorConfig, adapter: ArrayAdapter
) -> tuple[Array, ...]:
    """Of each lane, int64 [R] in the memory of its GPU: see :meth:`MoECommunicator.get_source_wait_counters`."""
    shape, lanes = (runtime.num_ranks,), range(config.max_in_flight)
    return tuple(_LaneViews(runtime, lane, adapter).view("source_wait_ns", shape, "int64") for lane in lanes)


@dataclass(frozen=True)
class _LaneViews:
    runtime: _core.MoERuntime
    lane: int
    adapter: ArrayAdapter

    def view(self, field: str, shape: tuple[int, ...], dtype: str) -> Array:
        size = num_bytes(shape, dtype)
        if self.adapter.device == "cpu":
            return self.adapter.over(self.runtime.lane_bytes(self.lane, field, size), shape, dtype)
        memory = DeviceMemory(self.runtime, self.runtime.lane_address(self.lane, field), size)
        return self.adapter.over(memory, shape, dtype)

    def output(self, config: MoECommunicatorConfig, shapes: LaneShapes) -> DispatchOutput:
        ranks, experts = self.runtime.num_ranks, self.runtime.num_local_experts
        rows, kind = ranks * config.max_tokens_per_rank, config.output_layout
        expert_major = kind is DispatchLayout.EXPERT_MAJOR
        return DispatchOutput(
            tokens=self.view("tokens", shapes.tokens, shapes.tokens_dtype),
            quant=replace(config.quant, block_scales=self.scales(config, shapes)) if shapes.num_scales else None,
            layout=DispatchLayoutInfo(
                kind=kind,
                num_tokens_per_expert=self.view("num_tokens_per_expert", (experts,), "int32") if expert_major else None,
                num_tokens_per_rank=None if expert_major else self.view("num_tokens_per_rank", (ranks,), "int32"),
                rank_ranges=self.view("rank_ranges", (experts, ranks, 2), "int32") if expert_major else None,
            ),
            topk_ids=None if expert_major else self.view("topk_ids", (rows, config.num_topk), "int32"),
            weights=None if expert_major else self.view("weights", (rows, config.num_topk), "float32"),
            source_token=self.view("source_token", (experts, rows), "int32") if expert_major else None,
            combine_input_buffer=self.view("combine_input", shapes.expert_output, "bfloat16"),
        )

    def scales(self, config: MoECommunicatorConfig, shapes: LaneShapes) -> Array:
        """Block scales [..., rows, S]; for COLUMN a view with token stride 1 of memory that is [..., S, stride].

        The stride is a multiple of 16 bytes, as TMA wants it, by which grouped GEMMs read scales.
        """
        *experts, rows, _ = shapes.tokens
        if config.quant.scale_layout is ScaleLayout.ROW:
            return self.view("scales", (*experts, rows, shapes.num_scales), shapes.scales_dtype)
        columns = self.view("scales", (*experts, shapes.num_scales, -(-rows // 4) * 4), shapes.scales_dtype)
        return columns[..., :rows].swapaxes(-1, -2)
