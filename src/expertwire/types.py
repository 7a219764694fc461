"""Enums and dataclasses of the public API. Plain values: importing this module does no work and needs no backend.

Symbols used in every docstring of the package: R ranks, E global experts, L experts on this rank, T tokens of this
rank in this call, M ``max_tokens_per_rank``, H ``hidden_size``, K ``num_topk``, S = H / 128 scale blocks (MXFP8:
H / 32), F ``max_in_flight``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: An array of whichever framework the caller uses: NumPy (with ml_dtypes), torch or CuPy.
Array = Any

#: Hidden elements that share one FP8 scale.
SCALE_BLOCK = 128
#: The same of MXFP8.
MX_SCALE_BLOCK = 32
#: Largest finite float8_e4m3fn; the value to which a block's largest element is scaled.
FP8_E4M3_MAX = 448.0
#: Smallest block maximum; keeps the scale of an all-zero block finite and normal.
FP8_MIN_AMAX = 1e-4
#: Largest number of experts that one token may choose.
MAX_TOPK = 32


class MoEMode(Enum):
    """How a communicator trades latency against throughput. Only ``LATENCY`` exists in this version."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class DispatchLayout(Enum):
    """Layout of the rows that ``dispatch`` returns and ``combine`` takes."""

    EXPERT_MAJOR = "expert_major"
    RANK_MAJOR = "rank_major"
    TOKEN_MAJOR = "token_major"


class CombineMode(Enum):
    """Where expert outputs of one token are summed: per expert rank first, or all on the token's rank."""

    RANK_LOCAL_REDUCE = "rank_local_reduce"
    DIRECT_SEND = "direct_send"


class DispatchDataType(Enum):
    """Payload format of dispatched rows. Combine is BF16 always.

    ``FP8_E4M3``: a scale for each 128 elements. ``MXFP8``: E4M3 with a UE8M0 scale for each 32.
    """

    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    MXFP8 = "mxfp8"


class ScaleFormat(Enum):
    """Format of block scales: one float32, or one biased exponent byte with four packed in an int32."""

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"


class ScaleLayout(Enum):
    """Memory order of block scales; ``COLUMN`` has token stride 1."""

    ROW = "row"
    COLUMN = "column"


class PeerLossPolicy(Enum):
    """What a communicator does once a rank is lost: raise from then on, or go on without that rank."""

    RAISE = "raise"
    MASK = "mask"


@dataclass(frozen=True)
class QuantConfig:
    """Payload format of dispatch.

    The constructor of a communicator reads every field but ``block_scales``. ``quant=`` of one ``dispatch`` call only
    carries ``block_scales`` for rows that the caller has quantised, and so does ``DispatchOutput.quant``.

    Attributes:
        format: payload of the rows.
        round_scale_pow2: round each scale up to a power of two before quantising.
        scale_format: ``UE8M0`` implies ``round_scale_pow2``, and is implied by ``MXFP8``.
        scale_layout: memory order of the scales that dispatch returns.
        block_scales: FLOAT32: float32 [..., S]; UE8M0: int32 [..., ceil(S / 4)].
    """

    format: DispatchDataType = DispatchDataType.BF16
    round_scale_pow2: bool = False
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    scale_layout: ScaleLayout = ScaleLayout.ROW
    block_scales: Array | None = field(default=None, compare=False)

    @property
    def scale_block(self) -> int:
        """Elements that share a scale."""
        return MX_SCALE_BLOCK if self.format is DispatchDataType.MXFP8 else SCALE_BLOCK

    @property
    def packs_exponents(self) -> bool:
        """Scales are exponent bytes, four in an int32."""
        return self.format is DispatchDataType.MXFP8 or self.scale_format is ScaleFormat.UE8M0


@dataclass(frozen=True)
class MoECommunicatorConfig:
    """Everything that describes a communicator but its group. Equal on all ranks, else construction fails.

    Attributes:
        num_experts: E, global experts; with a placement the physical ones.
        hidden_size: H, elements of a row; a multiple of 8 (BF16) or 128 (FP8_E4M3, MXFP8).
        num_topk: K, experts a token chooses; at most ``min(E, 32)``.
        max_tokens_per_rank: M, most tokens one rank brings to one call.
        experts_per_rank: experts of each rank in order, zero allowed; ``None`` splits E evenly over R.
        mode: only ``LATENCY`` is implemented.
        output_layout: ``EXPERT_MAJOR`` or ``RANK_MAJOR``.
        combine_mode: see :class:`CombineMode`.
        quant: payload format of dispatch.
        invalid_token_expert_id: what unused entries of RANK_MAJOR ``topk_ids`` hold; outside [0, E).
        num_blocks: CUDA grid size, one for both operations or (dispatch, combine); ``None`` chooses. The CPU backend
            runs in the calling thread and has no grid: there it changes nothing.
        max_in_flight: F, lanes used in turn; a dispatch output lives until F newer dispatches.
        validate: check expert ids on the device; ``None``: on for the CPU, ``EXPERTWIRE_VALIDATE`` for CUDA.
        two_phase: CUDA: also load the kernels of ``dispatch_async`` and ``combine_async``, which are refused without;
            the CPU always has them.
        block_overlap: CUDA: also load the kernels of combine with ``overlap.block``, which is refused without; the CPU
            always has them.
        device: ``None`` (the group's), ``"cpu"``, ``"cuda:3"``, or ``"cuda"``: torch's or CuPy's current device.
        timeout_s: bound of every wait, seconds.
        on_peer_loss: ``"raise"`` or ``"mask"``.
        placement: ``None``: ``topk_ids`` choose among the E experts. Else [E], the logical expert that each of the E
            physical ones holds, or -1 for none: ``topk_ids`` choose logical experts, 0 to G - 1, each of which is
            held at least once. ``update_placement`` replaces it (``docs/placement.md``).
    """

    num_experts: int
    hidden_size: int
    num_topk: int
    max_tokens_per_rank: int
    experts_per_rank: tuple[int, ...] | None = None
    mode: MoEMode = MoEMode.LATENCY
    output_layout: DispatchLayout = DispatchLayout.EXPERT_MAJOR
    combine_mode: CombineMode = CombineMode.RANK_LOCAL_REDUCE
    quant: QuantConfig = field(default_factory=QuantConfig)
    invalid_token_expert_id: int = -1
    num_blocks: int | tuple[int, int] | None = None
    max_in_flight: int = 1
    validate: bool | None = None
    two_phase: bool = False
    block_overlap: bool = False
    device: str | None = None
    timeout_s: float = 100.0
    on_peer_loss: PeerLossPolicy | str = PeerLossPolicy.RAISE
    placement: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DispatchLayoutInfo:
    """Which rows of a dispatch output are valid.

    Attributes:
        kind: the layout.
        num_tokens_per_expert: EXPERT_MAJOR: int32 [L]; rows of each local expert.
        num_tokens_per_rank: RANK_MAJOR: int32 [R]; rows from each source rank.
        rank_ranges: EXPERT_MAJOR: int32 [L, R, 2]; (first row, row count) of each source rank within an expert.
    """

    kind: DispatchLayout
    num_tokens_per_expert: Array | None = None
    num_tokens_per_rank: Array | None = None
    rank_ranges: Array | None = None


@dataclass(frozen=True)
class DispatchOutput:
    """What ``dispatch`` received. The runtime owns the arrays; they are valid until F newer dispatches.

    Attributes:
        tokens: EXPERT_MAJOR [L, R*M, H], RANK_MAJOR [R*M, H]; bfloat16 or float8_e4m3fn. Rows beyond the counts are
            unspecified.
        quant: ``None`` for BF16; else the format with ``block_scales`` in the order of the tokens.
        layout: counts.
        topk_ids: RANK_MAJOR: int32 [R*M, K] global ids of local (with a placement: physical) experts,
            ``invalid_token_expert_id`` elsewhere.
        weights: RANK_MAJOR: float32 [R*M, K], 0 elsewhere.
        source_token: EXPERT_MAJOR: int32 [L, R*M]; source rank * M + token index.
        combine_input_buffer: BF16 buffer with the shape ``combine`` takes; using it is optional.
    """

    tokens: Array
    quant: QuantConfig | None
    layout: DispatchLayoutInfo
    topk_ids: Array | None = None
    weights: Array | None = None
    source_token: Array | None = None
    combine_input_buffer: Array | None = None


@dataclass(frozen=True)
class MoEStats:
    """What a communicator has done since it was made. Counts are of this rank.

    Attributes:
        dispatch_calls: completed dispatches.
        combine_calls: completed combines.
        bytes_sent: rows and scales that left this rank for other ranks.
        bytes_received: the same, from other ranks.
        timeouts: waits that ended without the awaited rank.
        expert_tokens: [L]; rows received for each local (physical) expert, since the communicator was made: what a
            load balancer reads (``docs/placement.md``).
        source_wait_seconds: [R]; seconds spent waiting for each rank; on CUDA the time in operations until that rank
            was heard to be in the same one.
    """

    dispatch_calls: int
    combine_calls: int
    bytes_sent: int
    bytes_received: int
    timeouts: int
    expert_tokens: tuple[int, ...]
    source_wait_seconds: tuple[float, ...]


@dataclass(frozen=True)
class MoEMemoryBytes:
    """Bytes that a communicator holds on this rank: a formula of the configuration (``docs/layout.md``).

    Attributes:
        shared: mapped by every rank: packets and staging; on CUDA what peers push into.
        outputs: lane buffers; on the CPU address space, of which only the part in use is backed by memory.
        private: routing facts and scratch.
    """

    shared: int
    outputs: int
    private: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.shared + self.outputs + self.private
