"""The communicators behind a Buffer: one for each shape and format that calls have used, made when the first one comes.

Calls are collective and their shapes are equal on all ranks, so every rank makes, uses and drops the same ones in the
same order. Their number is bounded: one more than :data:`MOST` drops the one whose last call is the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from expertwire import _core
from expertwire.communicator import MoECommunicator
from expertwire.errors import InvalidArgumentError, PeerLostError, UnsupportedError
from expertwire.groups import Group
from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    PeerLossPolicy,
    QuantConfig,
    ScaleFormat,
    ScaleLayout,
)

#: Most communicators that a Buffer holds at a time. One layer shape in BF16 and all three FP8 formats takes four.
MOST = 8
#: Dispatches whose results may be held at a time, as with the original.
LANES = 2


def _fp8(round_scale: bool, scale_format: ScaleFormat) -> QuantConfig:
    return QuantConfig(DispatchDataType.FP8_E4M3, round_scale, scale_format, ScaleLayout.COLUMN)


#: Payload of the rows. Scales have token stride 1.
FORMATS = {
    "bf16": QuantConfig(),
    "fp8": _fp8(False, ScaleFormat.FLOAT32),
    "fp8_rounded": _fp8(True, ScaleFormat.FLOAT32),
    "fp8_ue8m0": _fp8(True, ScaleFormat.UE8M0),
}


class Problem(NamedTuple):
    """What a communicator is made for, in the words of the drop-in's callers; equal on all ranks but for the device.

    Attributes:
        num_max_dispatch_tokens_per_rank: M.
        hidden: H.
        num_experts: E.
        num_topk: K.
        device: ``"cpu"`` or ``"cuda:3"``.
        payload: one of :data:`FORMATS`.
    """

    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    num_topk: int
    device: str
    payload: str


@dataclass
class _Kept:
    comm: MoECommunicator
    in_graph: bool = False
    latest: dict[int, _core.DispatchHandle] = field(default_factory=dict)  # of each lane


class Communicators:
    """The communicators of one Buffer.

    Args:
        group: who takes part.
        on_peer_loss: of all of them.
        timeout_s: of all of them.
        combine_mode: of all of them.
    """

    def __init__(self, group: Group, on_peer_loss: PeerLossPolicy, timeout_s: float, combine_mode: CombineMode) -> None:
        self._group = group
        self._on_peer_loss = on_peer_loss
        self._timeout_s = timeout_s
        self._combine_mode = combine_mode
        self._kept: dict[Problem, _Kept] = {}  # the oldest use first

    def get(self, problem: Problem) -> MoECommunicator:
        """The communicator for a problem. Collective where it is the first call for it.

        Raises:
            InvalidArgumentError: a first call during the capture of a CUDA graph.
            UnsupportedError: one too many, and all that there are belong to captured graphs.
            PeerLostError: a first call after ranks were lost.
            Error: as for :class:`expertwire.MoECommunicator`.
        """
        kept = self._kept.get(problem)
        return self._make(problem) if kept is None else kept.comm

    def used(self, problem: Problem) -> None:
        """Notes that a call has gone out: only then is it one that all ranks have made."""
        kept = self._kept[problem] = self._kept.pop(problem)
        kept.in_graph = kept.in_graph or is_capturing(problem.device)

    def dispatched(self, problem: Problem, handle: _core.DispatchHandle) -> None:
        """Notes that a dispatch has gone out."""
        self.used(problem)
        self._kept[problem].latest[handle.lane] = handle

    def is_latest(self, comm: MoECommunicator, handle: _core.DispatchHandle) -> bool:
        """Whether no newer dispatch has used the handle's lane, and the communicator is one of these."""
        return any(kept.comm is comm and kept.latest.get(handle.lane) is handle for kept in self._kept.values())

    def holds(self, comm: MoECommunicator) -> bool:
        """Whether it is one of these and open."""
        return any(kept.comm is comm for kept in self._kept.values())

    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks that any communicator has lost, ascending."""
        return tuple(sorted({rank for kept in self._kept.values() for rank in kept.comm.lost_ranks()}))

    def close(self) -> None:
        """Closes all of them. The next call makes a new one."""
        while self._kept:
            self._kept.popitem()[1].comm.close()

    def _make(self, problem: Problem) -> MoECommunicator:
        if is_capturing(problem.device):
            raise InvalidArgumentError(
                "low_latency_dispatch: the first call with these shapes and this format allocates memory and meets "
                "the other ranks, which a CUDA graph cannot hold: make one call of this kind before the capture"
            )
        if lost := self.lost_ranks():
            raise PeerLostError(
                f"low_latency_dispatch: no call had these shapes and this format before ranks {lost} were lost, and "
                "without them nothing new is made; low_latency_clean_mask_buffer() on all ranks starts anew",
                lost,
                "construct",
            )
        if len(self._kept) >= MOST:
            self._drop_oldest()
        comm = MoECommunicator(
            self._group,
            num_experts=problem.num_experts,
            hidden_size=problem.hidden,
            num_topk=problem.num_topk,
            max_tokens_per_rank=problem.num_max_dispatch_tokens_per_rank,
            output_layout=DispatchLayout.EXPERT_MAJOR,
            combine_mode=self._combine_mode,
            quant=FORMATS[problem.payload],
            max_in_flight=LANES,
            two_phase=True,  # for hooks
            device=problem.device,
            timeout_s=self._timeout_s,
            on_peer_loss=self._on_peer_loss,
        )
        self._kept[problem] = _Kept(comm)
        return comm

    def _drop_oldest(self) -> None:
        oldest = next((problem for problem, kept in self._kept.items() if not kept.in_graph), None)
        if oldest is None:
            raise UnsupportedError(
                f"low_latency_dispatch: the {MOST} combinations of shapes and format that a Buffer serves at a time "
                "are all in captured CUDA graphs: make another Buffer"
            )
        self._kept.pop(oldest).comm.close()


def is_capturing(device: str) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device != "cpu" and bool(torch.cuda.is_current_stream_capturing())
