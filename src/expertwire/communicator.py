"""MoECommunicator: argument checks, arrays in and out, lifetimes. What is sent and when is the core's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from expertwire import _core
from expertwire.arguments import ArgumentReader, CombineArguments, DispatchArguments
from expertwire.communicator_facts import CommunicatorFacts
from expertwire.config import parse_bool, parse_placement, resolved, to_core
from expertwire.errors import HandleError, InvalidArgumentError, UnsupportedError
from expertwire.groups import Group
from expertwire.interop.arrays import ArrayAdapter, adapter_of
from expertwire.interop.cuda import current_stream
from expertwire.lanes import lane_outputs, lane_shapes, lane_wait_counters
from expertwire.nvrtc import use_installed_nvrtc
from expertwire.overlap import OverlapConfig
from expertwire.requests import MoERequest, SentOperation, SentOperations
from expertwire.types import (
    Array,
    DispatchOutput,
    MoECommunicatorConfig,
    QuantConfig,
)


class MoECommunicator(CommunicatorFacts):
    """One rank's end of expert-parallel dispatch and combine.

    Collective: every rank of the group makes one, with the same configuration, and calls the same operations in the
    same order. One thread at a time; a second one is refused. Usable as a context manager.

    Args:
        group: who takes part.
        config: the configuration as one value.
        fields: the fields of :class:`MoECommunicatorConfig` as keyword arguments, alone or over ``config``. Enum
            members may be given by name: ``output_layout="rank_major"``.

    Raises:
        InvalidArgumentError: a field is wrong, or ranks differ in one; every rank is told.
        UnsupportedError: a mode, layout or device that this version does not have.
        BackendError: the operating system refused memory or a connection.
        PeerLostError: a rank did not take part in time.
    """

    def __init__(self, group: Group, config: MoECommunicatorConfig | None = None, **fields: Any) -> None:
        if not isinstance(group, Group):
            raise InvalidArgumentError(f"group = {group!r}: must be an expertwire.Group, one for each rank")
        if config is not None and not isinstance(config, MoECommunicatorConfig):
            raise InvalidArgumentError(f"config = {config!r}: must be a MoECommunicatorConfig")
        asked = MoECommunicatorConfig(**fields) if config is None else replace(config, **fields)
        core_config = to_core(asked, group.device)
        if core_config.device.type == _core.DeviceType.CUDA:
            use_installed_nvrtc()
        runtime = _core.MoERuntime(group.bootstrap, core_config)
        super().__init__(runtime, resolved(asked, runtime.config))
        self._device = str(self._config.device)
        self._on_cuda = self._device != "cpu"
        self._shapes = lane_shapes(self._config, self._num_ranks, self._num_local_experts)
        self._reader = ArgumentReader(self._config, self._shapes, self._device, runtime.config)
        self._outputs: dict[str, list[DispatchOutput]] = {}  # by framework
        self._last_lane = 0
        self._sent = SentOperations(runtime, self._reader.stream_for, self._on_cuda)

    def dispatch(
        self,
        x: Array,
        topk_ids: Array,
        weights: Array | None = None,
        quant: QuantConfig | None = None,
        output_buffer: Array | None = None,
        stream: object | None = None,
        *,
        overlap: OverlapConfig | None = None,
    ) -> tuple[DispatchOutput, _core.DispatchHandle]:
        """Sends each token to the ranks that own its experts and receives those for this rank's experts. Collective.

        Args:
            x: [T, H] bfloat16; float8_e4m3fn when ``quant`` carries block scales. 0 <= T <= M.
            topk_ids: [T, K] int32 or int64, global expert ids (with a placement: logical ones); negative: this slot
                selects nothing.
            weights: [T, K] float32; ``None``: 1 everywhere.
            quant: carries ``block_scales`` of rows that the caller has quantised: [T, S] float32 or, for UE8M0,
                [T, ceil(S / 4)] int32. Its other fields are not looked at: the communicator's hold.
            output_buffer: receives the tokens instead of the lane's own buffer; shape and dtype of the output.
            stream: CUDA only: what to run on instead of the current stream of the framework of ``x``: an address, a
                stream of torch or CuPy, or anything with ``__cuda_stream__``.
            overlap: how it runs beside other work; see :meth:`create_overlap_config`.

        Returns:
            The output, in arrays of the framework of ``x`` that the communicator owns and that stay valid until F newer
            dispatches, and the handle that ``combine`` takes. On CUDA the call returns at once, and arguments and
            output are read and written in the order of the stream.

        Raises:
            InvalidArgumentError: an argument is wrong; nothing was sent, and a corrected call may follow.
            PeerLostError: a rank did not take part.
        """
        runtime = self._open_runtime("dispatch")
        return self._dispatch(runtime, runtime.dispatch, (x, topk_ids, weights, quant, output_buffer, stream, overlap))

    def dispatch_async(
        self,
        x: Array,
        topk_ids: Array,
        weights: Array | None = None,
        quant: QuantConfig | None = None,
        output_buffer: Array | None = None,
        stream: object | None = None,
        *,
        overlap: OverlapConfig | None = None,
    ) -> MoERequest:
        """Sends as :meth:`dispatch` does, and leaves receiving to ``wait()`` of the request. Collective.

        Inputs may be changed as soon as the call has returned, on CUDA in stream order; output arrays belong to the
        operation until ``wait``. Within a lane everything is received before the next dispatch is sent: with
        ``max_in_flight=2`` two dispatches with their combines may be under way. Other ranks may call :meth:`dispatch`
        for the same operation.

        Args:
            x: as for :meth:`dispatch`.
            topk_ids: as for :meth:`dispatch`.
            weights: as for :meth:`dispatch`.
            quant: as for :meth:`dispatch`.
            output_buffer: as for :meth:`dispatch`.
            stream: CUDA only: that of the send.
            overlap: as for the blocking call; it is the send that takes rows as they are published.

        Returns:
            A request whose ``wait()`` returns what :meth:`dispatch` returns.

        Raises:
            InvalidArgumentError: an argument is wrong; nothing was sent, and a corrected call may follow.
            HandleError: what was sent before on the lane has not been received; nothing was sent.
            UnsupportedError: on CUDA, the communicator was made without ``two_phase=True``.
            PeerLostError: a rank was lost before.
        """
        runtime = self._open_runtime("dispatch_async")
        made = self._dispatch(
            runtime, runtime.dispatch_send, (x, topk_ids, weights, quant, output_buffer, stream, overlap)
        )
        return self._sent.add(SentOperation("dispatch", made[1], made[0].tokens, made))

    def combine(
        self,
        expert_output: Array,
        handle: _core.DispatchHandle,
        weights: Array | None = None,
        out: Array | None = None,
        stream: object | None = None,
        *,
        overlap: OverlapConfig | None = None,
    ) -> Array:
        """Returns expert outputs to their tokens' ranks and sums them with the routing weights. Collective.

        Args:
            expert_output: bfloat16 in the layout and row order of the dispatch output: [L, R*M, H] or [R*M, H];
                [R*M, K, H] for RANK_MAJOR with DIRECT_SEND. Rows beyond the counts are not read.
            handle: from the dispatch whose tokens these are; may be combined again until it is stale.
            weights: [T, K] float32 instead of those given at dispatch; EXPERT_MAJOR only.
            out: [T, H] bfloat16 to write to; ``None``: a new array.
            stream: CUDA only, as for ``dispatch``; a new array is allocated for use on it.
            overlap: how it runs beside other work, or that it takes rows as they are published.

        Returns:
            [T, H] bfloat16: ``out``, or a new array of the framework of ``expert_output``.

        Raises:
            HandleError: the handle is not one, stale, or another communicator's.
            InvalidArgumentError: an argument is wrong; nothing was sent, and a corrected call may follow.
            PeerLostError: a rank did not take part.
        """
        return self._combine(
            self._open_runtime("combine").combine, (expert_output, handle, weights, out, stream, overlap)
        )

    def combine_async(
        self,
        expert_output: Array,
        handle: _core.DispatchHandle,
        weights: Array | None = None,
        out: Array | None = None,
        stream: object | None = None,
        *,
        overlap: OverlapConfig | None = None,
    ) -> MoERequest:
        """Sends as :meth:`combine` does, and leaves receiving to ``wait()`` of the request. Collective.

        As :meth:`dispatch_async`. EXPERT_MAJOR with RANK_LOCAL_REDUCE sums before it sends: it waits for the weights of
        ranks that gave none to dispatch.

        Args:
            expert_output: as for :meth:`combine`.
            handle: as for :meth:`combine`.
            weights: as for :meth:`combine`; with RANK_LOCAL_REDUCE only if dispatch was given none.
            out: as for :meth:`combine`.
            stream: CUDA only: that of the send.
            overlap: as for the blocking call; it is the send that takes rows as they are published.

        Returns:
            A request whose ``wait()`` returns what :meth:`combine` returns.

        Raises:
            HandleError: as :meth:`combine`; also if the dispatch, or a combine of it, was sent and not received.
            UnsupportedError: ``weights`` in place of those of dispatch with RANK_LOCAL_REDUCE; on CUDA, the
                communicator was made without ``two_phase=True``.
            InvalidArgumentError: an argument is wrong; nothing was sent, and a corrected call may follow.
            PeerLostError: a rank was lost before.
        """
        send = self._open_runtime("combine_async").combine_send
        made = self._combine(send, (expert_output, handle, weights, out, stream, overlap))
        return self._sent.add(SentOperation("combine", handle, made, made))

    def update_placement(
        self, placement: Sequence[int], *, stream: object | None = None, collective: bool = True
    ) -> None:
        """Replaces the placement of a communicator that was made with one. Collective.

        Every rank calls it at the same place in the order of operations. Dispatches after it go by the new placement;
        those before it, and their combines, by theirs, also when they are still under way. Moving the weights of
        experts is the caller's. Nothing is allocated, and kernels and captured graphs stay as they are.

        Args:
            placement: [E]: the logical expert that each physical one holds, or -1 for none; every logical expert from 0
                to G - 1 at least once, with the G of construction.
            stream: CUDA only: where in the order of work the table is replaced, instead of the current stream of torch,
                or else CuPy. The call waits for the work that it holds. Dispatches of this communicator follow on any
                stream; replayed graphs if they do on this.
            collective: ``False`` exchanges nothing and replaces this rank's table alone; that all who go on give the
                same one is then up to the caller. For those who are left when a rank was lost.

        Raises:
            InvalidArgumentError: the placement is wrong on some rank, or ranks gave different ones; every rank is told,
                and the old placement stays. Also: made without a placement; a stream that is being captured.
            PeerLostError: a rank did not take part in time.
        """
        runtime = self._open_runtime("update_placement")
        table, together = parse_placement(placement), parse_bool(collective, "collective")
        if stream is None and self._on_cuda:
            stream = current_stream(self._device)
        runtime.update_placement(table, 0 if stream is None else self._reader.named_stream(stream), together)
        self._reader.streams.used()
        self._config = replace(self._config, placement=tuple(table))

    def get_dispatch_output_buffer(self, framework: str = "numpy") -> Array:
        """The tokens buffer of the lane that the next dispatch uses: [L, R*M, H] or [R*M, H].

        Args:
            framework: ``"numpy"`` or ``"torch"`` on the CPU, ``"torch"`` or ``"cupy"`` on CUDA.
        """
        runtime = self._open_runtime("get_dispatch_output_buffer")
        adapter = adapter_of(framework, self._device)
        return adapter.renew(self._lanes(runtime, adapter)[runtime.next_lane]).tokens

    def get_combine_input_buffer(self, framework: str = "numpy") -> Array:
        """The bfloat16 buffer for expert outputs of the last dispatch's lane, with the shape that combine takes.

        Args:
            framework: as for :meth:`get_dispatch_output_buffer`.
        """
        runtime = self._open_runtime("get_combine_input_buffer")
        adapter = adapter_of(framework, self._device)
        return adapter.renew(self._lanes(runtime, adapter)[self._last_lane]).combine_input_buffer

    def get_source_wait_counters(self, framework: str = "torch") -> tuple[Array, ...]:
        """How long operations have waited, counted on the GPU: for each lane an int64 [R] of nanoseconds.

        Element r grows by the time from the begin of a dispatch or combine until rank r was heard to be in it, too.
        Read them on the stream of the calls, without waiting for the device; do not write to them. Their sum over the
        lanes is what :meth:`stats` returns as ``source_wait_seconds``.

        Args:
            framework: ``"torch"`` or ``"cupy"``.

        Raises:
            UnsupportedError: on the CPU, where ``stats()`` has the times.
        """
        runtime = self._open_runtime("get_source_wait_counters")
        if not self._on_cuda:
            raise UnsupportedError("get_source_wait_counters: on CUDA only; stats() has the times of the CPU backend")
        return lane_wait_counters(runtime, self._config, adapter_of(framework, self._device))

    def close(self) -> None:
        """Ends this rank's part. Peers that wait for it are told on the CPU, and find out by their time-outs on CUDA.

        Twice is fine. Arrays that dispatch returned stay readable: the memory goes when the last of them does, and on
        CUDA the last graph that holds one of the communicator's kernels.
        """
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
            self._sent.close()
            self._outputs.clear()

    def create_overlap_config(
        self,
        op: str,
        handle: _core.DispatchHandle | None = None,
        level: str = "op",
        block_size_m: int = 64,
        framework: str | None = None,
        **fields: Any,
    ) -> OverlapConfig:
        """Makes what ``overlap=`` of a call takes. Concerns this rank alone.

        Args:
            op: ``"dispatch"`` or ``"combine"``.
            handle: of the dispatch that is to be combined; looked at only to refuse what is none.
            level: ``"op"``: the whole operation; ``fields`` are those of :class:`OperationOverlapConfig`.
                ``"block"``, of combine only: rows are taken as they are published, with a new ``ready_signal`` of zeros
                unless ``fields`` has one; ``fields`` are those of :class:`BlockOverlapConfig`.
            block_size_m: rows of a block.
            framework: of a new ``ready_signal``: ``"numpy"``, ``"torch"`` or ``"cupy"``. ``None``: the first on the
                CPU, the second on CUDA, where the zeros are written on its current stream.
            fields: the fields of the configuration.

        Raises:
            InvalidArgumentError: a value is wrong, or the level is not one of this operation.
            HandleError: ``handle`` is none.
            UnsupportedError: blocks on CUDA, without ``block_overlap=True`` of the communicator.
        """
        self._open_runtime("create_overlap_config")
        if handle is not None and type(handle) is not _core.DispatchHandle:
            raise HandleError(f"handle = {type(handle).__name__} object: must be the handle that dispatch returned")
        return self._reader.overlap_config(op, level, block_size_m, framework, fields)

    def __enter__(self) -> MoECommunicator:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def __del__(self) -> None:
        """Closes. Arrays may live on."""
        if hasattr(self, "_sent"):  # its construction has not failed
            self.close()

    def _dispatch(
        self,
        runtime: _core.MoERuntime,
        send: Callable[[_core.LatencyDispatchRequest], _core.DispatchHandle],
        arguments: DispatchArguments,
    ) -> tuple[DispatchOutput, _core.DispatchHandle]:
        held: list[Array] = []  # what the addresses in the request belong to
        request = _core.LatencyDispatchRequest()
        adapter = self._reader.dispatch(request, arguments, held)
        if self._sent.by_lane:
            self._sent.settle(runtime.next_lane, request.stream if self._on_cuda else None)
        handle = send(request)
        self._reader.streams.used()
        self._last_lane = handle.lane
        output = adapter.renew(self._lanes(runtime, adapter)[handle.lane])
        output_buffer = arguments[4]
        return (output if output_buffer is None else replace(output, tokens=output_buffer)), handle

    def _combine(self, send: Callable[[_core.LatencyCombineRequest], None], arguments: CombineArguments) -> Array:
        held: list[Array] = []
        request = _core.LatencyCombineRequest()
        out = self._reader.combine(request, arguments, held)
        if self._sent.by_lane:
            self._sent.settle(request.handle.lane, request.stream if self._on_cuda else None)
        send(request)
        self._reader.streams.used()
        return out

    def _lanes(self, runtime: _core.MoERuntime, adapter: ArrayAdapter) -> list[DispatchOutput]:
        outputs = self._outputs.get(adapter.framework)
        if outputs is None:
            outputs = self._outputs[adapter.framework] = lane_outputs(runtime, self._config, self._shapes, adapter)
        return outputs
