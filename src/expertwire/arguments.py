"""The arguments of a call: checked, and written as addresses into the core's request.

Everything here is seen before anything is sent, so a refused call costs the other ranks nothing but time.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from expertwire import _core
from expertwire.config import parse_int
from expertwire.errors import HandleError, InvalidArgumentError, UnsupportedError
from expertwire.interop.arrays import ArrayAdapter, adapter_of, make_adapter, refuse, shape_text
from expertwire.interop.cuda import HeldStreams, event_address
from expertwire.lanes import LaneShapes
from expertwire.overlap import BlockOverlapConfig, OperationOverlapConfig, OverlapConfig, num_blocks_of, num_comm_sms_of
from expertwire.types import Array, DispatchLayout, MoECommunicatorConfig, QuantConfig

#: As the calls take them: x, topk_ids, weights, quant, output_buffer, stream, overlap.
DispatchArguments: TypeAlias = (
    "tuple[Array, Array, Array | None, QuantConfig | None, Array | None, object | None, OverlapConfig | None]"
)
#: expert_output, handle, weights, out, stream, overlap.
CombineArguments: TypeAlias = (
    "tuple[Array, _core.DispatchHandle, Array | None, Array | None, object | None, OverlapConfig | None]"
)

_INDEX_TYPES = {"int32": _core.IndexType.INT32, "int64": _core.IndexType.INT64}


class ArgumentReader:
    """Reads arguments for one communicator.

    ``held`` receives what an address belongs to besides the arguments themselves; keep both during the call. Tensors
    that are just as they must be are read in C++ (``PlainArguments``); whatever is not goes through the checks here.

    Args:
        config: the communicator's, with every default filled in.
        shapes: of its arrays.
        device: where its arrays lie: ``"cpu"`` or ``"cuda:3"``.
        core_config: the same configuration as the core's.
    """

    def __init__(
        self, config: MoECommunicatorConfig, shapes: LaneShapes, device: str, core_config: _core.RuntimeConfig
    ) -> None:
        self._device = device
        self._core_config = core_config
        self._on_cuda = device != "cpu"
        self._config = config
        self._shapes = shapes
        self._fp8 = shapes.num_scales > 0
        self._adapters: dict[type, ArrayAdapter] = {}
        self._plain: dict[type, _core.PlainArguments] = {}  # of the types that have it
        self.streams = HeldStreams(device)

    def dispatch(
        self, request: _core.LatencyDispatchRequest, arguments: DispatchArguments, held: list[Array]
    ) -> ArrayAdapter:
        """Reads all arguments of a dispatch. Returns the adapter of ``x``."""
        x, topk_ids, weights, quant, output_buffer, stream, overlap = arguments
        if quant is None and output_buffer is None and stream is None and overlap is None:
            plain = self._plain.get(type(x))
            if plain is not None and plain.dispatch(request, x, topk_ids, weights):
                return self._adapters[type(x)]
        adapter = self.tokens(request, x, quant, held)
        self.routing(request, topk_ids, weights, held)
        if output_buffer is not None:
            self.target(request, output_buffer, held)
        if overlap is not None:
            stream = self._overlap(request, overlap, stream)
        if stream is not None:
            request.stream = self.named_stream(stream)
        elif self._on_cuda:
            request.stream = self._current_stream(adapter)
        return adapter

    def combine(self, request: _core.LatencyCombineRequest, arguments: CombineArguments, held: list[Array]) -> Array:
        """Reads all arguments of a combine. Returns its ``out``, made here if none is given."""
        expert_output, handle, weights, out, stream, overlap = arguments
        if type(handle) is not _core.DispatchHandle:
            raise HandleError(f"handle = {type(handle).__name__} object: must be the handle that dispatch returned")
        request.handle = handle
        request.num_tokens = handle.num_tokens
        if stream is None and overlap is None:
            plain = self._plain.get(type(expert_output))
            if plain is not None:
                if out is None:
                    out = self._new_out(self._adapters[type(expert_output)], request, None)
                if plain.combine(request, expert_output, weights, out):
                    return out
        adapter = self.expert_output(request, expert_output, weights, held)
        if overlap is not None:
            stream = self._overlap(request, overlap, stream)
            if overlap.block is not None:
                self._ready(request, overlap.block, held)
        asked = None if stream is None else self.named_stream(stream)
        if self._on_cuda:
            request.stream = self._current_stream(adapter) if asked is None else asked
        if out is None:
            out = self._new_out(adapter, request, asked)
        self.out(request, out, held)
        return out

    def tokens(
        self, request: _core.LatencyDispatchRequest, x: Array, quant: QuantConfig | None, held: list[Array]
    ) -> ArrayAdapter:
        """Reads ``x`` and the block scales that ``quant`` carries. Returns the adapter of ``x``."""
        adapter, opened = self._opened(x, "x", held)
        shape = adapter.shape(opened)
        hidden_size, most = self._config.hidden_size, self._config.max_tokens_per_rank
        if len(shape) != 2 or shape[0] > most:
            allowed = f"must be [T, {hidden_size}] with T <= max_tokens_per_rank = {most}"
            refuse("x", f"array of shape {shape_text(shape)}", allowed)
        request.num_tokens = shape[0]
        dtype = "bfloat16"
        if self._fp8 or quant is not None:
            dtype = self._scales(request, quant, adapter.dtype(opened), held)
        request.x = adapter.address(opened, "x", dtype, (shape[0], hidden_size))
        return adapter

    def routing(
        self, request: _core.LatencyDispatchRequest, topk_ids: Array, weights: Array | None, held: list[Array]
    ) -> None:
        """Reads ``topk_ids`` and ``weights``."""
        adapter, opened = self._opened(topk_ids, "topk_ids", held)
        dtype = adapter.dtype(opened)
        if dtype not in _INDEX_TYPES:
            refuse("topk_ids", f"{dtype} array", "the dtype must be int32 or int64")
        shape = (request.num_tokens, self._config.num_topk)
        request.topk_ids_type = _INDEX_TYPES[dtype]
        request.topk_ids = adapter.address(opened, "topk_ids", dtype, shape)
        if weights is not None:
            adapter, opened = self._opened(weights, "weights", held)
            request.weights = adapter.address(opened, "weights", "float32", shape)

    def target(self, request: _core.LatencyDispatchRequest, output_buffer: Array, held: list[Array]) -> None:
        """Reads ``output_buffer``."""
        adapter, opened = self._opened(output_buffer, "output_buffer", held, writable=True)
        shape, dtype = self._shapes.tokens, self._shapes.tokens_dtype
        request.output_buffer = adapter.address(opened, "output_buffer", dtype, shape, True)

    def expert_output(
        self, request: _core.LatencyCombineRequest, expert_output: Array, weights: Array | None, held: list[Array]
    ) -> ArrayAdapter:
        """Reads ``expert_output`` and the ``weights`` of combine. Returns the adapter of ``expert_output``."""
        adapter, opened = self._opened(expert_output, "expert_output", held)
        request.expert_output = adapter.address(opened, "expert_output", "bfloat16", self._shapes.expert_output)
        if weights is not None:
            if self._config.output_layout is not DispatchLayout.EXPERT_MAJOR:
                refuse("weights", f"{type(weights).__name__} object", "must be None: RANK_MAJOR rows come weighted")
            of_weights, opened = self._opened(weights, "weights", held)
            shape = (request.num_tokens, self._config.num_topk)
            request.weights = of_weights.address(opened, "weights", "float32", shape)
        return adapter

    def out(self, request: _core.LatencyCombineRequest, out: Array, held: list[Array]) -> None:
        """Reads ``out``."""
        rows = (request.num_tokens, self._config.hidden_size)
        adapter, opened = self._opened(out, "out", held, writable=True)
        request.out = adapter.address(opened, "out", "bfloat16", rows, True)

    def stream_for(self, array: Array, stream: object | None) -> int:
        """The stream that ``stream`` names, or the current one of the framework of ``array``; 0 on the CPU."""
        if stream is not None:
            return self.named_stream(stream)
        if self._device == "cpu":
            return 0
        return self._current_stream(self._adapters.get(type(array)) or make_adapter(array, "array", self._device))

    def named_stream(self, stream: object) -> int:
        """The address of a stream that the caller named, which is held."""
        if self._device == "cpu":
            raise InvalidArgumentError(f"stream = {stream!r}: the CPU has no streams; must be None")
        return self.streams.address(stream)

    def _new_out(self, adapter: ArrayAdapter, request: _core.LatencyCombineRequest, stream: int | None) -> Array:
        return adapter.empty((request.num_tokens, self._config.hidden_size), "bfloat16", stream)

    def _current_stream(self, adapter: ArrayAdapter) -> int:
        stream = adapter.current_stream()
        return stream if isinstance(stream, int) else self.streams.address(stream)

    def _overlap(
        self,
        request: _core.LatencyDispatchRequest | _core.LatencyCombineRequest,
        overlap: OverlapConfig,
        stream: object | None,
    ) -> object | None:
        """Reads what concerns the whole operation. Returns the stream to run on."""
        if not isinstance(overlap, OverlapConfig):
            refuse("overlap", f"{type(overlap).__name__} object", "must be None or an OverlapConfig")
        if overlap.operation is None:
            if isinstance(request, _core.LatencyDispatchRequest):
                refuse("overlap", "a config of blocks", "dispatch takes one of the whole operation only")
            return stream
        request.max_num_blocks = num_comm_sms_of(overlap.operation)
        if overlap.operation.wait_event is not None:
            if not self._on_cuda:
                refuse("overlap.operation.wait_event", repr(overlap.operation.wait_event), "must be None on the CPU")
            request.wait_event = event_address(overlap.operation.wait_event)
        if overlap.operation.stream is None:
            return stream
        if stream is not None:
            refuse("stream", repr(stream), "must be None: overlap.operation.stream names one")
        return overlap.operation.stream

    def _ready(self, request: _core.LatencyCombineRequest, block: BlockOverlapConfig, held: list[Array]) -> None:
        self._require_blocks("overlap.block")
        request.max_num_blocks = num_comm_sms_of(block)
        adapter, opened = self._opened(block.ready_signal, "ready_signal", held)
        words = adapter.address(opened, "ready_signal", "int32", self.signal_shape(block.block_size_m))
        request.set_ready(words, block.block_size_m, parse_int(block.ready_value, "ready_value"))

    def overlap_config(
        self, op: str, level: str, block_size_m: int, framework: str | None, fields: dict[str, Any]
    ) -> OverlapConfig:
        """What ``create_overlap_config`` returns."""
        if op not in ("dispatch", "combine"):
            refuse("op", repr(op), 'must be "dispatch" or "combine"')
        if level == "op":
            made = OverlapConfig(operation=OperationOverlapConfig(**fields))
            self._overlap(_core.LatencyCombineRequest(), made, None)
            return made
        if level != "block":
            refuse("level", repr(level), 'must be "op" or "block"')
        if op != "combine":
            refuse("level", repr(level), 'dispatch has level "op" only')
        self._require_blocks('level = "block"')
        if "ready_signal" not in fields:
            framework = framework or ("torch" if self._on_cuda else "numpy")
            signal = adapter_of(framework, self._device).empty(self.signal_shape(block_size_m), "int32")
            signal[...] = 0
            fields = fields | {"ready_signal": signal}
        block = BlockOverlapConfig(block_size_m, **fields)
        num_comm_sms_of(block)
        return OverlapConfig(block=block)

    def _require_blocks(self, given: str) -> None:
        if self._on_cuda and not self._config.block_overlap:
            raise UnsupportedError(
                f"{given}: on CUDA only for a communicator made with block_overlap=True, which loads the kernels for it"
            )

    def signal_shape(self, block_size_m: object) -> tuple[int, ...]:
        """Shape of ``ready_signal`` for blocks of so many rows."""
        expert_major = self._config.output_layout is DispatchLayout.EXPERT_MAJOR
        rows = self._shapes.tokens[1 if expert_major else 0]
        blocks = num_blocks_of(rows, block_size_m)
        return (self._shapes.tokens[0], blocks) if expert_major else (blocks,)

    def _opened(self, array: Array, name: str, held: list[Array], writable: bool = False) -> tuple[ArrayAdapter, Array]:
        adapter = self._adapters.get(type(array))
        if adapter is None:
            adapter = self._adapters[type(array)] = make_adapter(array, name, self._device)
            if type(array) is adapter.plain_type:
                plain = _core.plain_arguments(type(array), self._core_config, self._shapes.expert_output)
                if plain is not None:
                    self._plain[type(array)] = plain
        opened = adapter.open(array, name, writable)
        held.append(opened)
        return adapter, opened

    def _scales(
        self, request: _core.LatencyDispatchRequest, quant: QuantConfig | None, x_dtype: str, held: list[Array]
    ) -> str:
        """Reads the block scales, if there are any. Returns the dtype that ``x`` must have."""
        if quant is not None and not isinstance(quant, QuantConfig):
            refuse("quant", f"{type(quant).__name__} object", "must be None or a QuantConfig with block_scales")
        scales = None if quant is None else quant.block_scales
        if scales is None:
            if self._fp8 and x_dtype == "float8_e4m3fn":
                refuse("quant", "no block_scales", "float8_e4m3fn rows need quant=QuantConfig(block_scales=...)")
            return "bfloat16"
        if not self._fp8:
            refuse("quant", "block_scales", "must be None: this communicator dispatches BF16 rows")
        if x_dtype == "bfloat16":
            refuse("quant", "block_scales", "must be None: x is bfloat16, and is quantised on its way")
        adapter, opened = self._opened(scales, "quant.block_scales", held)
        shape = (request.num_tokens, self._shapes.num_scales)
        request.block_scales = adapter.address(opened, "quant.block_scales", self._shapes.scales_dtype, shape)
        return "float8_e4m3fn"
