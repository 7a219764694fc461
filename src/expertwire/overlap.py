"""How an operation runs beside other work: on which stream and SMs, or block by block as its rows are made."""

from __future__ import annotations

from dataclasses import dataclass

from expertwire.config import parse_int
from expertwire.errors import InvalidArgumentError
from expertwire.types import Array


@dataclass(frozen=True)
class OperationOverlapConfig:
    """Overlap of a whole operation with what other streams do. On the CPU ``stream`` and ``wait_event`` are errors.

    Attributes:
        stream: CUDA: what to run on instead of the current stream, as ``stream=`` of a call.
        wait_event: CUDA: an event that the operation waits for: an address, or a ``torch.cuda.Event`` or CuPy event
            that has been recorded.
        num_comm_sms: CUDA: the operation takes at most so many SMs, a block each; ``None``: as configured. Bits do not
            depend on it. No effect on the CPU.
    """

    stream: object | None = None
    wait_event: object | None = None
    num_comm_sms: int | None = None


@dataclass(frozen=True)
class BlockOverlapConfig:
    """Combine begins while its expert rows are being made, and takes each block of them once it is published.

    A producer writes the rows of a block, and then stores ``ready_value`` in the block's word of ``ready_signal``, with
    release order of the device's (CUDA) or the process's (CPU) scope. ``docs/overlap.md`` has the protocol. CUDA needs
    ``block_overlap=True`` of the communicator.

    Attributes:
        block_size_m: rows of a block; the last one of an expert may be shorter.
        ready_signal: int32, a word for each block: EXPERT_MAJOR [L, ceil(R*M / block_size_m)], RANK_MAJOR
            [ceil(R*M / block_size_m)]. Written by the producer alone. It must live until the combine has
            sent, on CUDA until it has run.
        ready_value: the value that says so; any other one says "not yet".
        num_comm_sms: CUDA: the combine takes at most so many SMs, a block each, and leaves the others to the producer;
            ``None``: half of those configured. No effect on the CPU.
    """

    block_size_m: int
    ready_signal: Array
    ready_value: int = 1
    num_comm_sms: int | None = None


@dataclass(frozen=True)
class OverlapConfig:
    """``overlap=`` of a call. Exactly one of the two.

    Attributes:
        operation: of a dispatch or a combine.
        block: of a combine.

    Raises:
        InvalidArgumentError: both, or none of them.
    """

    operation: OperationOverlapConfig | None = None
    block: BlockOverlapConfig | None = None

    def __post_init__(self) -> None:
        _require("overlap.operation", self.operation, OperationOverlapConfig)
        _require("overlap.block", self.block, BlockOverlapConfig)
        if (self.operation is None) == (self.block is None):
            given = "neither" if self.block is None else "both"
            raise InvalidArgumentError(f"overlap = {given} of operation and block: must be exactly one of the two")


def num_blocks_of(rows: int, block_size_m: object) -> int:
    """Blocks in so many rows. Raises InvalidArgumentError unless ``block_size_m`` is an integer >= 1."""
    size = parse_int(block_size_m, "block_size_m")
    if size < 1:
        raise InvalidArgumentError(f"block_size_m = {size}: must be >= 1")
    return -(-rows // size)


def num_comm_sms_of(config: OperationOverlapConfig | BlockOverlapConfig) -> int:
    """The bound, or 0 for none. Raises InvalidArgumentError unless it is None or an integer >= 1."""
    if config.num_comm_sms is None:
        return 0
    bound = parse_int(config.num_comm_sms, "num_comm_sms")
    if bound < 1:
        raise InvalidArgumentError(f"num_comm_sms = {bound}: must be None or >= 1")
    return bound


def _require(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidArgumentError(f"{name} = {type(value).__name__} object: must be None or {kind.__name__}")
