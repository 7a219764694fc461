"""Drives cases on CUDA: arrays to a GPU and back, one rank's part, and ranks as threads that share one or more GPUs.

Ranks that share a GPU wait for each other inside their kernels. So nothing here launches a kernel of torch's, whose
first launch may wait for the whole device: arrays are copied, and the experts answer on the host.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_memory_order
from cases import QUANTS, WAYS, Case, way_name
from compiling import Wanted
from driving import POISON_BYTE, Received, assert_received, copy_output, expected_of_case, expert_output, local_experts
from driving import steps_of_case as steps_of_case_with
from expertwire.reference import BF16, FP8, RankInput
from expertwire.types import QuantConfig

torch = pytest.importorskip("torch")

_AS_BYTES = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
_FROM_BYTES = {theirs: ours for ours, theirs in _AS_BYTES.items()}
EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way_name(*way))
EVERY_PAYLOAD = pytest.mark.parametrize(
    "quant",
    [QuantConfig(), QUANTS["float32"], QUANTS["ue8m0-column"], QUANTS["mxfp8-column"]],
    ids=["bf16", "fp8", "ue8m0", "mxfp8"],
)
#: Virtual ranks take one such part of the multiprocessors, so that all their kernels can run at once.
_PARTS = 2
#: Bound of a rank's waits. Ranks that take turns on a GPU need tens of milliseconds; a test of all that hang ends soon.
TIMEOUT_S = 10.0


@dataclass
class Listing:
    """Instead of running: which kernels the communicators of the tests need.

    Attributes:
        architecture, num_sms: of the GPUs.
        num_ranks_here: ranks on one GPU, of the communicator that is being noted.
        wanted: the communicators, each once.
    """

    architecture: str
    num_sms: int
    num_ranks_here: int = 1
    wanted: dict[str, Wanted] = field(default_factory=dict)

    def note(self, group: ew.Group, config: ew.MoECommunicatorConfig, name: str) -> None:
        config = replace(config, device=None, timeout_s=1.0)
        wanted = Wanted(name, config, group.size, self.architecture, self.num_sms // self.num_ranks_here)
        self.wanted[repr(replace(wanted, name=""))] = wanted


_listing: Listing | None = None


def start_listing(architecture: str, num_sms: int) -> Listing:
    """Let communicators be noted in what is returned, and tests end there. No GPU is touched from now on."""
    global _listing  # noqa: PLW0603 (a mode of the whole process)
    _listing = Listing(architecture, num_sms)
    return _listing


def settle(device: Any) -> None:
    """Let the current stream end its work, before a copy to or from pageable memory.

    A copy queued behind a kernel that waits for another rank would hold up the copies of that rank.
    """
    torch.cuda.current_stream(device).synchronize()


def to_device(array: np.ndarray | None, device: str) -> Any:
    """Return a tensor with the elements of a NumPy array, whose dtype may be one of ml_dtypes."""
    if array is None:
        return None
    settle(device)
    dtype = _AS_BYTES.get(array.dtype)
    if dtype is None:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).to(device).view(dtype)


def to_host(tensor: Any) -> np.ndarray:
    """Return a NumPy array with the elements of a tensor, in the same memory order."""
    if tensor.ndim > 1 and tensor.stride(-1) != 1:
        *experts, rows, columns = tensor.shape
        assert tensor.stride(-2) == 1
        assert tensor.data_ptr() % 16 == 0
        whole = tensor.as_strided((*experts, columns, tensor.stride(-1)), (*tensor.stride()[:-2], tensor.stride(-1), 1))
        assert whole.is_contiguous()
        return to_host(whole)[..., :rows].swapaxes(-1, -2)
    if tensor.is_cuda:
        settle(tensor.device)
    dtype = _FROM_BYTES.get(tensor.dtype)
    if dtype is None:
        return np.asarray(tensor.cpu().numpy())
    return np.asarray(tensor.view(torch.uint8).cpu().numpy().view(dtype))


def poison(tensor: Any) -> Any:
    settle(tensor.device)
    of_bytes = tensor.view(torch.uint8)
    of_bytes.copy_(torch.full(of_bytes.shape, POISON_BYTE, dtype=torch.uint8))
    return tensor


def dispatch(comm: ew.MoECommunicator, given: RankInput) -> tuple[ew.DispatchOutput, Any]:
    """Dispatch into a poisoned buffer."""
    device = comm.config.device
    poison(comm.get_dispatch_output_buffer("torch"))
    scales = to_device(given.block_scales, device)
    quant = None if scales is None else ew.QuantConfig(block_scales=scales)
    arrays = [to_device(array, device) for array in (given.x, given.topk_ids, given.weights)]
    return comm.dispatch(*arrays, quant=quant)


def exchange(
    comm: ew.MoECommunicator, given: RankInput, new_weights: np.ndarray | None = None, fill: float = 0.75
) -> Received:
    """Dispatch, let the experts answer on the host, and combine."""
    config, device = comm.config, comm.config.device
    out, handle = dispatch(comm, given)
    received = copy_output(out, to_host)
    assert_memory_order(received)
    answer = to_device(expert_output(config, received, local_experts(comm), fill), device)
    result = poison(torch.empty((len(given.x), config.hidden_size), dtype=torch.bfloat16, device=device))
    combined = comm.combine(answer, handle, weights=to_device(new_weights, device), out=result)
    assert combined is result
    return Received(received, to_host(combined))


@dataclass(frozen=True)
class Place:
    """Where a rank lives.

    Attributes:
        device: such as ``"cuda:0"``.
        num_blocks: grid size of its kernels; None lets the communicator choose.
    """

    device: str = "cuda:0"
    num_blocks: int | tuple[int, int] | None = None


def share(num_ranks: int, num_devices: int = 1) -> list[Place]:
    """Return a place for each rank, so that all kernels of the ranks of one device can run at once."""
    of_device = -(-num_ranks // num_devices)
    num_sms = _listing.num_sms if _listing else torch.cuda.get_device_properties(0).multi_processor_count
    num_blocks = max(num_sms // of_device // _PARTS, 1)
    return [Place(f"cuda:{rank // of_device}", num_blocks) for rank in range(num_ranks)]


def reserve_memory() -> None:
    """Let torch take memory for the current stream now, for it may wait for the device, and not while a peer waits."""
    megabyte = 1 << 20  # up to it, torch takes memory from a pool of its own
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (64 * megabyte, *(16 * [megabyte]))]
    del taken  # kept by torch


def capture(calls: Callable[[], object], barrier: threading.Barrier, lock: threading.Lock) -> Any:
    """Return a graph, captured while nothing runs on any rank, one rank at a time: torch waits for the device first."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.synchronize()
    barrier.wait()
    with lock, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        calls()
    barrier.wait()  # each capture has torch give back what all streams had
    reserve_memory()
    barrier.wait()
    return graph


@contextlib.contextmanager
def living_at(place: Place) -> Iterator[Any]:
    """Make the place's device current in this thread, and a stream of its own, which is yielded."""
    if _listing:
        yield None
        return
    torch.cuda.set_device(place.device)
    stream = torch.cuda.Stream(place.device)
    with torch.cuda.stream(stream):
        reserve_memory()
        yield stream


def communicator(group: ew.Group, case: Case, place: Place, **fields: Any) -> ew.MoECommunicator:
    if _listing:
        _listing.note(group, replace(case.config, num_blocks=place.num_blocks, **fields), case.name)
        pytest.skip("listed")
    settings = {"timeout_s": TIMEOUT_S} | fields
    return ew.MoECommunicator(group, case.config, device=place.device, num_blocks=place.num_blocks, **settings)


def run_virtual(fn: Callable[..., Any], places: Sequence[Place], *args: Any) -> list[Any]:
    """Run fn(group, place, *args) in one thread for each place and return the results; raise the first failure."""
    if _listing:
        _listing.num_ranks_here = max(Counter(place.device for place in places).values())
        fn(ew.local_group(len(places))[0], places[0], *args)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "32":
        pytest.skip("virtual ranks need CUDA_DEVICE_MAX_CONNECTIONS=32 from before CUDA has started")

    def rank_of(group: ew.Group, place: Place) -> Any:
        with living_at(place):
            return fn(group, place, *args)

    gc.collect()  # now: what a failed test has left frees memory, which waits for the device
    gc.disable()
    try:
        with ThreadPoolExecutor(len(places)) as pool:
            futures = [pool.submit(rank_of, *one) for one in zip(ew.local_group(len(places)), places, strict=True)]
    finally:
        gc.enable()
    for rank, future in enumerate(futures):
        if error := future.exception():
            print(f"rank {rank}: {error!r}", file=sys.stderr)  # only the first is raised
    return [future.result() for future in futures]


def rank_of_case(group: ew.Group, place: Place, case: Case, num_steps: int, **fields: Any) -> list[Received]:
    """Be one rank of a case."""
    with communicator(group, case, place, **fields) as comm:
        return steps_of_case_with(comm, case, num_steps, exchange)


def check_case(case: Case, of_ranks: list[list[Received]]) -> None:
    for step in range(len(of_ranks[0])):
        assert_received([results[step] for results in of_ranks], expected_of_case(case, step), case.name)
