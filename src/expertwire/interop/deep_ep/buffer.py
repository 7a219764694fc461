"""Buffer: the low-latency calls of DeepEP on top of communicators."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from expertwire.communicator import MoECommunicator
from expertwire.errors import InvalidArgumentError, UnsupportedError
from expertwire.groups import Group
from expertwire.interop.arrays import refuse
from expertwire.interop.deep_ep import arguments
from expertwire.interop.deep_ep.communicators import LANES, Communicators
from expertwire.interop.deep_ep.dispatched import Dispatched, LowLatencyHandle, RecvStats, answer, opened, received_rows
from expertwire.interop.deep_ep.events import EventHandle, EventOverlap
from expertwire.interop.deep_ep.hooks import RecvHook
from expertwire.interop.deep_ep.left_out import LeftOut, refuse_unknown
from expertwire.interop.deep_ep.waiting import WaitingTimes
from expertwire.requests import MoERequest
from expertwire.types import Array, CombineMode, PeerLossPolicy

_BF16_BYTES = 2
_ROW_BUFFERS = 2  # what dispatch returns, and what combine takes


class Buffer(LeftOut):
    """The ranks of a group that exchange tokens. Made by all of them, and called by all in the same order.

    Memory belongs to communicators, one for each combination of shapes and format that calls use, at most eight at a
    time; the first call of a combination makes its communicator, collectively. What ``low_latency_dispatch`` returns
    lies in it, and is valid until two newer dispatches of the same combination.

    Args:
        group: a ``torch.distributed`` process group, an :class:`expertwire.Group`, or ``None`` with ``comm``.
        num_nvl_bytes: kept as an attribute; memory follows from the calls alone.
        num_rdma_bytes: the same.
        low_latency_mode: must be true for the low-latency calls.
        num_qps_per_rank: > 0, and else without a meaning here: nothing has queue pairs.
        allow_nvlink_for_low_latency_mode: must be true: rows go through memory that ranks share, on GPUs over NVLink.
        allow_mnnvl: accepted; ranks of one host reach each other without.
        use_fabric: accepted likewise.
        explicitly_destroy: kept as an attribute; ``destroy`` may be called in any case.
        enable_shrink: go on without lost ranks, and answer the calls about the mask.
        comm: an mpi4py communicator in place of ``group``.

    Attributes:
        num_sms: of the high-throughput kernels of the original, which read it; without an effect here.
        timeout_s: bound of every wait for a peer, seconds; set it on the class before a Buffer is made.
        combine_mode: ``DIRECT_SEND`` sends back a row for each expert and rounds once, like the original;
            ``RANK_LOCAL_REDUCE`` sends one sum for each rank, which is faster, and rounds that one, too. Set it on the
            class likewise, the same on all ranks.

    Raises:
        InvalidArgumentError: an argument is wrong.
        UnsupportedError: ``allow_nvlink_for_low_latency_mode=False``, or an argument that is unknown here.
    """

    num_sms: int = 20
    timeout_s: float = 100.0
    combine_mode: CombineMode = CombineMode.DIRECT_SEND

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        *,
        allow_mnnvl: bool = False,  # noqa: ARG002
        use_fabric: bool = False,  # noqa: ARG002
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        **unknown: object,
    ) -> None:
        refuse_unknown("Buffer", unknown)
        arguments.positive(num_qps_per_rank, "num_qps_per_rank")
        if not allow_nvlink_for_low_latency_mode:
            raise UnsupportedError("allow_nvlink_for_low_latency_mode = False: there is no other way between GPUs here")
        self._group = _group_of(group, comm)
        self.group = comm if group is None else group
        self.rank, self.group_size = self._group.rank, self._group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        policy = PeerLossPolicy.MASK if enable_shrink else PeerLossPolicy.RAISE
        self._communicators = Communicators(self._group, policy, self.timeout_s, self.combine_mode)
        self._comm_streams: dict[int, Any] = {}  # by device
        self._destroyed = False

    def destroy(self) -> None:
        """Ends this rank's part. Results stay readable for whoever holds them; twice is fine."""
        self._communicators.close()
        self._destroyed = True

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 rows are there: always."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of the rows of one combination in BF16: two lanes of dispatched rows and of expert outputs.

        Staging and routing facts come on top; ``docs/layout.md`` has the formula of all of it.
        """
        rows = arguments.positive(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank")
        rows *= arguments.positive(num_experts, "num_experts")  # R * M for each of E / R experts
        arguments.positive(num_ranks, "num_ranks")
        return LANES * _ROW_BUFFERS * rows * arguments.positive(hidden, "hidden") * _BF16_BYTES

    def get_comm_stream(self) -> Any:
        """The ``torch.cuda.Stream`` of calls with ``async_finish=True`` on the current device."""
        if not torch.cuda.is_available():
            raise UnsupportedError("get_comm_stream: this machine has no CUDA device, and the CPU has no streams")
        device = torch.cuda.current_device()
        if device not in self._comm_streams:
            self._comm_streams[device] = torch.cuda.Stream()
        return self._comm_streams[device]

    def low_latency_dispatch(
        self,
        x: Array,
        topk_idx: Array,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Array | None = None,
        dispatch_wait_recv_cost_stats: Array | None = None,
        *,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **unknown: object,
    ) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, RecvHook | None]:
        """Sends tokens to the ranks of their experts and receives those for the experts of this rank. Collective.

        Args:
            x: bfloat16 [T, H], H a multiple of 128; 0 <= T <= M.
            topk_idx: int64 or int32 [T, K]; negative: this slot selects nothing.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks.
            num_experts: E, a multiple of R; expert e belongs to rank e // (E / R).
            cumulative_local_expert_recv_stats: int32 [L], to which the rows received for each expert are added.
            dispatch_wait_recv_cost_stats: int64 [R], to which the nanoseconds spent waiting for each rank are added.
            use_fp8: quantise rows to FP8 in blocks of 128 elements.
            round_scale: round scales up to powers of two. Without ``use_fp8`` it says nothing, as the next one.
            use_ue8m0: scales as exponent bytes, four in an int32; needs ``round_scale``.
            async_finish: run on the communication stream; the current one does not wait.
            return_recv_hook: send only; the hook receives, on the stream that is current when it is called.
            unknown: what only some forks of the original have; refused.

        Returns:
            The rows [L, R*M, H], in FP8 with their scales [L, R*M, H / 128] (UE8M0: [L, R*M, ceil(H / 512)]) of token
            stride 1; the counts int32 [L]; the handle; the event; the hook, or ``None``.

        Raises:
            InvalidArgumentError: an argument is wrong; nothing was sent.
            UnsupportedError: an unknown argument.
            PeerLostError: a rank did not take part.
        """
        self._enter("low_latency_dispatch", unknown, async_finish, return_recv_hook)
        most, payload = num_max_dispatch_tokens_per_rank, arguments.payload_of(use_fp8, round_scale, use_ue8m0)
        problem = arguments.problem_of(x, topk_idx, most, num_experts, self.group_size, payload)
        stats = RecvStats(cumulative_local_expert_recv_stats, problem, self.group_size)
        waiting = WaitingTimes(dispatch_wait_recv_cost_stats, "dispatch_wait_recv_cost_stats", self.group_size, problem)
        comm = self._communicators.get(problem)
        hook = None
        stream = self._forked_stream(async_finish, problem.device)
        with torch.cuda.stream(stream) if stream else nullcontext():
            if return_recv_hook:
                request = comm.dispatch_async(x, topk_idx)
                output, core_handle = request.result
                hook = RecvHook("low_latency_dispatch", partial(_receive, waiting, comm, request, stats))
            else:
                with waiting.of(comm):
                    output, core_handle = comm.dispatch(x, topk_idx)
                stats.add(output)
            self._communicators.dispatched(problem, core_handle)
        handle = LowLatencyHandle.of(Dispatched(self._communicators, comm, problem, output, core_handle))
        rows, counts = received_rows(output), output.layout.num_tokens_per_expert
        kept = (x, topk_idx, rows, counts, handle, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        return rows, counts, handle, _event(async_finish, stream, kept), hook

    def low_latency_combine(
        self,
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        *,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Array | None = None,
        combine_wait_recv_cost_stats: Array | None = None,
        **unknown: object,
    ) -> tuple[Array, EventOverlap, RecvHook | None]:
        """Returns expert outputs to their tokens' ranks and sums them with the weights. Collective.

        Args:
            x: bfloat16 [L, R*M, H], rows in the places of the dispatched ones.
            topk_idx: [T, K] as given to dispatch, whose own copy decides.
            topk_weights: float32 [T, K].
            handle: from the dispatch; may be combined again until two newer dispatches have been made.
            use_logfmt: LogFMT rows, which are not in this version.
            zero_copy: the rows of ``x`` are not read: they lie in ``get_next_low_latency_combine_buffer(handle)``.
            async_finish: run on the communication stream; the current one does not wait.
            return_recv_hook: send only; the hook receives, on the stream that is current when it is called.
            out: bfloat16 [T, H] to write to; ``None``: a new one.
            combine_wait_recv_cost_stats: int64 [R], to which the nanoseconds spent waiting for each rank are added.
            unknown: what only some forks of the original have; refused.

        Returns:
            bfloat16 [T, H], summed in float32 in the order of ``combine_mode`` (``docs/numerics.md``); the event; the
            hook, or ``None``.

        Raises:
            HandleError: the handle is stale or another Buffer's.
            InvalidArgumentError: an argument is wrong; nothing was sent.
            UnsupportedError: ``use_logfmt``, or an unknown argument.
            PeerLostError: a rank did not take part.
        """
        self._enter("low_latency_combine", unknown, async_finish, return_recv_hook)
        if use_logfmt:
            raise UnsupportedError("use_logfmt = True: expert outputs travel in BF16 in this version")
        dispatched = opened(handle, self._communicators)
        out = answer(dispatched, x, topk_idx, topk_weights, out)
        problem = dispatched.problem
        waiting = WaitingTimes(combine_wait_recv_cost_stats, "combine_wait_recv_cost_stats", self.group_size, problem)
        comm, sent = dispatched.comm, dispatched.output.combine_input_buffer if zero_copy else x
        hook = None
        stream = self._forked_stream(async_finish, problem.device)
        with torch.cuda.stream(stream) if stream else nullcontext():
            if return_recv_hook:
                request = comm.combine_async(sent, dispatched.handle, weights=topk_weights, out=out)
                hook = RecvHook("low_latency_combine", partial(_receive, waiting, comm, request))
            else:
                with waiting.of(comm):
                    comm.combine(sent, dispatched.handle, weights=topk_weights, out=out)
            self._communicators.used(problem)
        kept = (sent, topk_idx, topk_weights, handle, out, combine_wait_recv_cost_stats)
        return out, _event(async_finish, stream, kept), hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Array:
        """What combine reads with ``zero_copy=True``: bfloat16 [L, R*M, H], to be filled by the caller."""
        self._enter("get_next_low_latency_combine_buffer", {}, False, False)
        return opened(handle, self._communicators).output.combine_input_buffer

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing but look at its arguments: no call leaves anything behind that another one would have to clean.

        Unlike the original it meets no other rank.
        """
        self._enter("clean_low_latency_buffer", {}, False, False)
        arguments.positive(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank")
        arguments.positive(hidden, "hidden")
        arguments.positive(num_experts, "num_experts")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Says that a rank is lost, or is not. Only what is so already: ranks are found lost by waiting for them.

        Raises:
            UnsupportedError: ``mask`` is not what the rank is now.
        """
        self._enter_mask("low_latency_update_mask_buffer")
        if (
            isinstance(rank_to_mask, bool)
            or not isinstance(rank_to_mask, int)
            or not 0 <= rank_to_mask < self.group_size
        ):
            refuse("rank_to_mask", repr(rank_to_mask), f"must be a rank, 0 to {self.group_size - 1}")
        if (rank_to_mask in self._communicators.lost_ranks()) != mask:
            now = (
                "takes part" if mask else "is lost, and comes back by low_latency_clean_mask_buffer() on all ranks only"
            )
            raise UnsupportedError(f"low_latency_update_mask_buffer({rank_to_mask}, mask={mask}): the rank {now}")

    def low_latency_query_mask_buffer(self, mask_status: Array) -> None:
        """Writes 1 for ranks that are lost and 0 for the others to ``mask_status``, int32 [R] on any device."""
        self._enter_mask("low_latency_query_mask_buffer")
        where = str(mask_status.device) if isinstance(mask_status, torch.Tensor) else "cpu"
        arguments.tensor(mask_status, "mask_status", "int32", (self.group_size,), where)
        lost = self._communicators.lost_ranks()
        mask_status.copy_(torch.tensor([int(rank in lost) for rank in range(self.group_size)], dtype=torch.int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """After losses, starts anew with all ranks of the group: each calls this, and then the next dispatch.

        Closes the communicators, so that earlier handles are stale and captured graphs must be captured again. Without
        losses it does nothing.
        """
        self._enter_mask("low_latency_clean_mask_buffer")
        if self._communicators.lost_ranks():
            self._communicators.close()

    def _enter(self, method: str, unknown: dict[str, object], async_finish: bool, return_recv_hook: bool) -> None:
        if self._destroyed:
            raise InvalidArgumentError(f"{method}: this Buffer has been destroyed")
        if not self.low_latency_mode:
            raise InvalidArgumentError(f"{method}: this Buffer was made with low_latency_mode=False")
        refuse_unknown(method, unknown)
        arguments.finishing(async_finish, return_recv_hook)

    def _enter_mask(self, method: str) -> None:
        self._enter(method, {}, False, False)
        if not self.enable_shrink:
            raise InvalidArgumentError(f"{method}: this Buffer was made with enable_shrink=False")

    def _forked_stream(self, async_finish: bool, device: str) -> Any:
        """The communication stream, behind what the current one has to do, if a call is to run there."""
        if not async_finish or device == "cpu":
            return None
        with torch.cuda.device(device):
            stream = self.get_comm_stream()
            stream.wait_stream(torch.cuda.current_stream())
        return stream


def _event(async_finish: bool, stream: Any, kept: tuple[Any, ...]) -> EventOverlap:
    return EventOverlap(EventHandle(stream), kept) if async_finish else EventOverlap()


def _group_of(group: Any, comm: Any) -> Group:
    if (group is None) == (comm is None):
        raise InvalidArgumentError("group, comm: exactly one of them must be given")
    if isinstance(group, Group):
        return group
    return Group.from_mpi(comm) if group is None else Group.from_torch(group)


def _receive(waiting: WaitingTimes, comm: MoECommunicator, request: MoERequest, stats: RecvStats | None = None) -> None:
    with waiting.of(comm):
        result = request.wait()
    if stats is not None:
        stats.add(result[0])
