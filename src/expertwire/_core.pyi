"""
C++ core of expertwire. An implementation detail of the package: use the names of expertwire itself.
"""

from collections.abc import Callable, Sequence
import enum

import numpy
import numpy.typing


def version() -> str: ...

def buffer_address(array: object) -> int:
    """Address of the first element of a NumPy array."""

class DlpackArray:
    """An array of another framework, held through DLPack."""

    @staticmethod
    def open(array: object) -> DlpackArray | None:
        """Takes an array's memory for reading; None if it exports none."""

    @property
    def address(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def contiguous(self) -> bool: ...

class Bootstrap:
    """One rank's end of the exchange at set-up."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Collective. Returns the contributions of all ranks by rank."""

    def barrier(self) -> None:
        """Collective. Returns once every rank has called."""

def make_local_bootstraps(size: int, timeout_s: float = 300.0) -> list[Bootstrap]:
    """Makes one bootstrap for each of `size` threads of this process."""

def make_host_bootstrap(rank: int, size: int, key: str, timeout_s: float = 300.0) -> Bootstrap:
    """
    Meets the other processes of this host and user that pass the same key.
    """

def make_callable_bootstrap(rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]) -> Bootstrap:
    """
    Makes a bootstrap whose collective is a Python function from bytes to a list of bytes.
    """

class MoEMode(enum.Enum):
    LATENCY = 0

    THROUGHPUT = 1

class DispatchLayout(enum.Enum):
    EXPERT_MAJOR = 0

    RANK_MAJOR = 1

    TOKEN_MAJOR = 2

class CombineMode(enum.Enum):
    RANK_LOCAL_REDUCE = 0

    DIRECT_SEND = 1

class DispatchDataType(enum.Enum):
    BF16 = 0

    FP8_E4M3 = 1

    MXFP8 = 2

class ScaleFormat(enum.Enum):
    FLOAT32 = 0

    UE8M0 = 1

class ScaleLayout(enum.Enum):
    ROW = 0

    COLUMN = 1

class IndexType(enum.Enum):
    INT32 = 0

    INT64 = 1

class PeerLossPolicy(enum.Enum):
    RAISE = 0

    MASK = 1

class DeviceType(enum.Enum):
    CPU = 0

    CUDA = 1

class QuantConfig:
    def __init__(self) -> None: ...

    @property
    def format(self) -> DispatchDataType: ...

    @format.setter
    def format(self, arg: DispatchDataType, /) -> None: ...

    @property
    def round_scale_pow2(self) -> bool: ...

    @round_scale_pow2.setter
    def round_scale_pow2(self, arg: bool, /) -> None: ...

    @property
    def scale_format(self) -> ScaleFormat: ...

    @scale_format.setter
    def scale_format(self, arg: ScaleFormat, /) -> None: ...

    @property
    def scale_layout(self) -> ScaleLayout: ...

    @scale_layout.setter
    def scale_layout(self, arg: ScaleLayout, /) -> None: ...

class Device:
    def __init__(self) -> None: ...

    @property
    def type(self) -> DeviceType: ...

    @type.setter
    def type(self, arg: DeviceType, /) -> None: ...

    @property
    def index(self) -> int: ...

    @index.setter
    def index(self, arg: int, /) -> None: ...

class RuntimeConfig:
    def __init__(self) -> None: ...

    @property
    def num_experts(self) -> int: ...

    @num_experts.setter
    def num_experts(self, arg: int, /) -> None: ...

    @property
    def hidden_size(self) -> int: ...

    @hidden_size.setter
    def hidden_size(self, arg: int, /) -> None: ...

    @property
    def num_topk(self) -> int: ...

    @num_topk.setter
    def num_topk(self, arg: int, /) -> None: ...

    @property
    def max_tokens_per_rank(self) -> int: ...

    @max_tokens_per_rank.setter
    def max_tokens_per_rank(self, arg: int, /) -> None: ...

    @property
    def experts_per_rank(self) -> list[int]: ...

    @experts_per_rank.setter
    def experts_per_rank(self, arg: Sequence[int], /) -> None: ...

    @property
    def placement(self) -> list[int]: ...

    @placement.setter
    def placement(self, arg: Sequence[int], /) -> None: ...

    @property
    def mode(self) -> MoEMode: ...

    @mode.setter
    def mode(self, arg: MoEMode, /) -> None: ...

    @property
    def output_layout(self) -> DispatchLayout: ...

    @output_layout.setter
    def output_layout(self, arg: DispatchLayout, /) -> None: ...

    @property
    def combine_mode(self) -> CombineMode: ...

    @combine_mode.setter
    def combine_mode(self, arg: CombineMode, /) -> None: ...

    @property
    def quant(self) -> QuantConfig: ...

    @quant.setter
    def quant(self, arg: QuantConfig, /) -> None: ...

    @property
    def invalid_token_expert_id(self) -> int: ...

    @invalid_token_expert_id.setter
    def invalid_token_expert_id(self, arg: int, /) -> None: ...

    @property
    def dispatch_num_blocks(self) -> int: ...

    @dispatch_num_blocks.setter
    def dispatch_num_blocks(self, arg: int, /) -> None: ...

    @property
    def combine_num_blocks(self) -> int: ...

    @combine_num_blocks.setter
    def combine_num_blocks(self, arg: int, /) -> None: ...

    @property
    def max_in_flight(self) -> int: ...

    @max_in_flight.setter
    def max_in_flight(self, arg: int, /) -> None: ...

    @property
    def validate(self) -> bool: ...

    @validate.setter
    def validate(self, arg: bool, /) -> None: ...

    @property
    def two_phase(self) -> bool: ...

    @two_phase.setter
    def two_phase(self, arg: bool, /) -> None: ...

    @property
    def block_overlap(self) -> bool: ...

    @block_overlap.setter
    def block_overlap(self, arg: bool, /) -> None: ...

    @property
    def device(self) -> Device: ...

    @device.setter
    def device(self, arg: Device, /) -> None: ...

    @property
    def timeout_s(self) -> float: ...

    @timeout_s.setter
    def timeout_s(self, arg: float, /) -> None: ...

    @property
    def on_peer_loss(self) -> PeerLossPolicy: ...

    @on_peer_loss.setter
    def on_peer_loss(self, arg: PeerLossPolicy, /) -> None: ...

def env_validate() -> bool:
    """What EXPERTWIRE_VALIDATE says."""

class KernelResources:
    """What a CUDA kernel takes of a thread."""

    @property
    def registers(self) -> int: ...

    @property
    def stack_bytes(self) -> int: ...

    @property
    def spill_bytes(self) -> int: ...

class KernelImage:
    """A CUDA source compiled for one architecture."""

    @property
    def cubin(self) -> bytes: ...

    @property
    def log(self) -> str: ...

    @property
    def resources(self) -> dict[str, KernelResources]: ...

    @property
    def from_cache(self) -> bool: ...

    @property
    def is_kept(self) -> bool: ...

def compile_source(source: str, architecture: str) -> KernelImage:
    """
    Compiles a source that may include the kernel headers, or takes the result from the cache. Needs no GPU; `architecture` is such as sm_90a.
    """

def precompile_kernels(config: RuntimeConfig, num_ranks: int, architecture: str, num_sms: int = 0) -> list[KernelImage]:
    """
    Compiles all kernels of a communicator on a GPU of which each rank has `num_sms` multiprocessors, 0 for any GPU, or takes them from the cache. Needs no GPU; raises what making the communicator would.
    """

def set_nvrtc_search_path(folders: Sequence[str]) -> None:
    """
    Names folders to look for the CUDA compiler library in, after the places that need no telling.
    """

def nvtx_state() -> str:
    """
    Ranges for a profiler: off, on, or why there are none although EXPERTWIRE_NVTX is 1.
    """

def is_stream_capturing(stream: int) -> bool:
    """Whether the CUDA stream at an address is being captured into a graph."""

def cuda_why_unusable() -> str | None:
    """
    Why this machine cannot run the CUDA backend, and what to do; None if it can.
    """

class DispatchHandle:
    """Names one dispatch of one communicator; combine takes it."""

    @property
    def lane(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def __repr__(self) -> str: ...

class LatencyDispatchRequest:
    """Inputs of one dispatch, as addresses."""

    def __init__(self) -> None: ...

    @property
    def topk_ids_type(self) -> IndexType: ...

    @topk_ids_type.setter
    def topk_ids_type(self, arg: IndexType, /) -> None: ...

    @property
    def num_tokens(self) -> int: ...

    @num_tokens.setter
    def num_tokens(self, arg: int, /) -> None: ...

    @property
    def x(self) -> int: ...

    @x.setter
    def x(self, arg: int, /) -> None: ...

    @property
    def block_scales(self) -> int: ...

    @block_scales.setter
    def block_scales(self, arg: int, /) -> None: ...

    @property
    def topk_ids(self) -> int: ...

    @topk_ids.setter
    def topk_ids(self, arg: int, /) -> None: ...

    @property
    def weights(self) -> int: ...

    @weights.setter
    def weights(self, arg: int, /) -> None: ...

    @property
    def output_buffer(self) -> int: ...

    @output_buffer.setter
    def output_buffer(self, arg: int, /) -> None: ...

    @property
    def stream(self) -> int: ...

    @stream.setter
    def stream(self, arg: int, /) -> None: ...

    @property
    def wait_event(self) -> int: ...

    @wait_event.setter
    def wait_event(self, arg: int, /) -> None: ...

    @property
    def max_num_blocks(self) -> int: ...

    @max_num_blocks.setter
    def max_num_blocks(self, arg: int, /) -> None: ...

class LatencyCombineRequest:
    """Inputs and output of one combine, as addresses."""

    def __init__(self) -> None: ...

    @property
    def handle(self) -> DispatchHandle: ...

    @handle.setter
    def handle(self, arg: DispatchHandle, /) -> None: ...

    @property
    def num_tokens(self) -> int: ...

    @num_tokens.setter
    def num_tokens(self, arg: int, /) -> None: ...

    @property
    def expert_output(self) -> int: ...

    @expert_output.setter
    def expert_output(self, arg: int, /) -> None: ...

    @property
    def weights(self) -> int: ...

    @weights.setter
    def weights(self, arg: int, /) -> None: ...

    @property
    def out(self) -> int: ...

    @out.setter
    def out(self, arg: int, /) -> None: ...

    @property
    def stream(self) -> int: ...

    @stream.setter
    def stream(self, arg: int, /) -> None: ...

    @property
    def wait_event(self) -> int: ...

    @wait_event.setter
    def wait_event(self, arg: int, /) -> None: ...

    @property
    def max_num_blocks(self) -> int: ...

    @max_num_blocks.setter
    def max_num_blocks(self, arg: int, /) -> None: ...

    def set_ready(self, words: int, block_size_m: int, value: int) -> None: ...

class MemoryBytes:
    @property
    def shared(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def private(self) -> int: ...

class RuntimeStats:
    @property
    def dispatch_calls(self) -> int: ...

    @property
    def combine_calls(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    @property
    def timeouts(self) -> int: ...

    @property
    def expert_tokens(self) -> list[int]: ...

    @property
    def source_wait_seconds(self) -> list[float]: ...

class Machine:
    """What a plan depends on besides the problem."""

    @property
    def num_cores(self) -> int: ...

    @property
    def cpu_isa(self) -> str: ...

    @property
    def cpu_isas(self) -> list[str]: ...

def this_machine() -> Machine:
    """Describes the machine this process runs on."""

def cpu_isa() -> str:
    """The instruction set in use: plain, avx2, avx512 or neon."""

def cpu_isas() -> list[str]:
    """Every instruction set this build and processor can run."""

class MoERuntime:
    """One rank's end of a group."""

    def __init__(self, bootstrap: Bootstrap, config: RuntimeConfig) -> None: ...

    def dispatch(self, request: LatencyDispatchRequest) -> DispatchHandle: ...

    def combine(self, request: LatencyCombineRequest) -> None: ...

    def update_placement(self, placement: Sequence[int], stream: int, collective: bool) -> None: ...

    def dispatch_send(self, request: LatencyDispatchRequest) -> DispatchHandle: ...

    def dispatch_receive(self, handle: DispatchHandle, stream: int = 0) -> None: ...

    def dispatch_done(self, handle: DispatchHandle) -> bool: ...

    def combine_send(self, request: LatencyCombineRequest) -> None: ...

    def combine_receive(self, handle: DispatchHandle, stream: int = 0) -> None: ...

    def combine_done(self, handle: DispatchHandle) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_local_experts(self) -> int: ...

    @property
    def first_local_expert(self) -> int: ...

    @property
    def config(self) -> RuntimeConfig: ...

    @property
    def is_available(self) -> bool: ...

    @property
    def next_lane(self) -> int: ...

    def lane_bytes(self, lane: int, field: str, num_bytes: int) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The bytes of one lane buffer on the CPU, as an array that keeps the runtime alive.
        """

    def lane_address(self, lane: int, field: str) -> int:
        """
        Where a lane buffer lies, in the memory of the runtime's device; 0 if the configuration has none.
        """

    def memory_bytes(self) -> MemoryBytes: ...

    def stats(self) -> RuntimeStats: ...

    def lost_ranks(self) -> list[int]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...

class PlainArguments:
    """Reads arguments that are tensors of one type, just as they must be."""

    def dispatch(self, request: LatencyDispatchRequest, x: object | None, topk_ids: object | None, weights: object | None) -> bool:
        """Whether they are. If not, the request is as it was."""

    def combine(self, request: LatencyCombineRequest, expert_output: object | None, weights: object | None, out: object | None) -> bool:
        """Whether they are. If not, the request is as it was."""

def plain_arguments(tensor_type: object, config: RuntimeConfig, expert_output: Sequence[int]) -> PlainArguments | None:
    """For tensors of a type, if it has DLPack's C functions."""
