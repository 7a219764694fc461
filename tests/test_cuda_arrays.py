"""Arrays, devices and streams of CUDA communicators: what is taken, what comes out, and what is refused by name.

What needs no GPU is tested without one: adapters for a device that is not there refuse what is elsewhere.
"""

from __future__ import annotations

import math
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import expertwire as ew
from expertwire import _core
from expertwire.config import parse_device, to_core
from expertwire.interop.arrays import adapter_of, make_adapter
from expertwire.interop.cuda import DeviceMemory, HeldStreams, current_device, stream_address
from expertwire.reference import BF16

SHAPE: dict[str, Any] = {"num_experts": 4, "hidden_size": 128, "num_topk": 2, "max_tokens_per_rank": 3}
IDS = np.array([[0, 3], [2, -1], [1, 0]])


# Without a GPU


@pytest.mark.parametrize("thing", [np.zeros((3, 4), np.float32), None, [1.0], "x"])
def test_only_torch_and_cupy_have_arrays_on_a_gpu(thing: Any) -> None:
    with pytest.raises(
        ew.InvalidArgumentError, match=r"x = .* object: must be a torch tensor or a CuPy array on cuda:3"
    ):
        make_adapter(thing, "x", "cuda:3")


def test_numpy_is_refused_by_name() -> None:
    for framework in ("numpy", "jax"):
        with pytest.raises(ew.InvalidArgumentError, match=f'\'{framework}\': must be "torch" or "cupy" on cuda:0'):
            adapter_of(framework, "cuda:0")
    with pytest.raises(ew.InvalidArgumentError, match='\'cupy\': must be "numpy" or "torch" on cpu'):
        adapter_of("cupy")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_elsewhere_are_refused(device: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, device=device)
    words = rf"x = float32 \[3, 4\] array on {device}: this communicator runs on cuda:1 and takes arrays there"
    with pytest.raises(ew.InvalidArgumentError, match=words):
        make_adapter(tensor, "x", "cuda:1").address(tensor, "x", "float32", (3, 4))


def test_device_memory_describes_itself_and_keeps_its_owner() -> None:
    owner = object()
    before = sys.getrefcount(owner)
    memory = DeviceMemory(owner, 0x7F0000000000, 48)
    assert sys.getrefcount(owner) == before + 1
    assert memory.__cuda_array_interface__ == {
        "shape": (48,),
        "typestr": "|u1",
        "data": (0x7F0000000000, False),
        "strides": None,
        "stream": None,
        "version": 3,
    }


class Foreign:
    """A stream of a library that is neither torch nor CuPy."""

    def __init__(self, address: Any) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, Any]:
        return 0, self.address


def of_library(module: str, **fields: Any) -> Any:
    """Return an object of a class that claims to come from a module."""
    return type("Stream", (SimpleNamespace,), {"__module__": module})(**fields)


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (0, 0),
        (2, 2),
        (0x55550000, 0x55550000),
        (Foreign(0x1234), 0x1234),
        (SimpleNamespace(__cuda_stream__=(0, 0x1234)), 0x1234),
        (of_library("torch.cuda.streams", cuda_stream=0x77, device="cuda:3"), 0x77),
        (of_library("cupy.cuda.stream", ptr=0x88, device_id=3), 0x88),
        (of_library("cupy.cuda.stream", ptr=0, device_id=-1), 0),
    ],
)
def test_streams_are_taken_in_every_form(stream: Any, address: int) -> None:
    assert stream_address(stream, "cuda:3") == address


def test_the_stream_used_last_is_held_until_another_one_has_been_used() -> None:
    held = HeldStreams("cuda:3")
    streams = [Foreign(0x10 * number) for number in (1, 2, 3)]
    alive = [weakref.ref(stream) for stream in streams]
    assert held.address(streams[0]) == 0x10
    held.used()
    for stream in streams[1:]:  # named by calls that are refused
        held.address(stream)
    held.address(0x40)
    streams.clear()
    del stream
    assert all(one() is not None for one in alive)
    held.used()
    assert [one() is not None for one in alive] == [False, False, True]
    with pytest.raises(ew.InvalidArgumentError, match="stream = str object"):
        held.address("cuda")


def test_streams_are_held_while_the_last_one_is_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    held, streams, capturing = HeldStreams("cuda:3"), [Foreign(0x10), Foreign(0x20)], [0x20]
    monkeypatch.setattr("expertwire._core.is_stream_capturing", lambda stream: stream in capturing)
    alive = [weakref.ref(stream) for stream in streams]
    for address in (0x10, 0x20):
        assert held.address(streams.pop(0)) == address
        held.used()
    assert all(one() is not None for one in alive)
    capturing.clear()
    held.used()
    assert [one() is not None for one in alive] == [False, True]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (True, "stream = bool object: must be None, an address"),
        (-1, "stream = -1: must be"),
        ("cuda", "stream = str object"),
        (object(), "stream = object object"),
        (Foreign, "stream = type object"),
        (Foreign("here"), "stream = Foreign object"),
        (of_library("torch.cuda.streams", cuda_stream=7, device="cuda:0"), "Stream of cuda:0: must be of cuda:3"),
        (of_library("cupy.cuda.stream", ptr=7, device_id=1), "Stream of cuda:1: must be of cuda:3"),
        (of_library("cupy.cuda.memory", ptr=7), "stream = Stream object"),
        (of_library("torch", data=7), "stream = Stream object"),
    ],
)
def test_what_is_no_stream_of_the_device_is_refused(stream: Any, words: str) -> None:
    with pytest.raises(ew.InvalidArgumentError, match=words):
        stream_address(stream, "cuda:3")


def test_cuda_means_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        initialised = True

        def is_initialized(self) -> bool:
            return self.initialised

        def is_available(self) -> bool:
            return True

        def current_device(self) -> int:
            return 5

    runtime = SimpleNamespace(getDevice=lambda: 2)
    cupy = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, runtime=runtime))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda()))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    assert current_device() == parse_device("cuda").index == 5
    assert parse_device("CUDA:1").index == 1
    assert parse_device("cpu").index == 0
    monkeypatch.setattr(Cuda, "initialised", False)
    assert current_device() == 2
    cupy.cuda.is_available = lambda: False
    assert current_device() == 0


def test_device_and_validate_reach_the_core() -> None:
    def core(validate: bool | None, device: str | None) -> _core.RuntimeConfig:
        return to_core(ew.MoECommunicatorConfig(**SHAPE, validate=validate, device=device), "cuda:2")

    of_group = core(None, None)
    assert (of_group.device.type, of_group.device.index) == (_core.DeviceType.CUDA, 2)
    assert of_group.validate is _core.env_validate()
    assert core(True, "cuda:4").validate is True
    assert core(True, "cuda:4").device.index == 4
    assert core(None, "cpu").validate is True


def test_ranks_of_a_local_group_may_have_a_device_each() -> None:
    groups = ew.local_group(3, device=["cuda:0", "cuda:1", "cpu"])
    assert [group.device for group in groups] == ["cuda:0", "cuda:1", "cpu"]
    assert [group.device for group in ew.local_group(2, device="cuda")] == ["cuda"] * 2
    with pytest.raises(ew.InvalidArgumentError, match=r"device = .*one for each of the 3 ranks"):
        ew.local_group(3, device=("cuda:0", "cuda:1"))


# With a GPU


def single(**fields: Any) -> ew.MoECommunicator:
    return ew.MoECommunicator(*ew.local_group(1), **{**SHAPE, "device": "cuda:0", **fields})


@pytest.mark.gpu
def test_a_mistake_is_refused_and_the_call_after_it_works() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((3, 128), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.tensor(IDS, device="cuda:0")
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"x": np.ones((3, 128), BF16)}, "x = ndarray object: must be a torch tensor or a CuPy array on cuda:0"),
        ({"x": x.cpu()}, "x = .* on cpu: this communicator runs on cuda:0"),
        ({"topk_ids": ids.cpu()}, "topk_ids = .* on cpu: this communicator runs on cuda:0"),
        ({"weights": np.ones((3, 2), np.float32)}, "weights = ndarray object"),
        ({"x": x.float()}, "x = float32 .*dtype must be bfloat16"),
        ({"topk_ids": ids.T.contiguous().T}, "topk_ids = non-contiguous"),
        ({"stream": "default"}, "stream = str object"),
        ({"output_buffer": torch.empty((4, 3, 128), dtype=torch.bfloat16)}, "output_buffer = .* on cpu"),
    ]
    with single() as comm:
        for changes, words in mistakes:
            with pytest.raises(ew.InvalidArgumentError, match=words):
                comm.dispatch(**{"x": x, "topk_ids": ids, **changes})
        with pytest.raises(ew.InvalidArgumentError, match='framework = \'numpy\': must be "torch" or "cupy" on cuda:0'):
            comm.get_dispatch_output_buffer()
        out, handle = comm.dispatch(x, ids)
        with pytest.raises(ew.InvalidArgumentError, match="expert_output = ndarray object"):
            comm.combine(np.ones((4, 3, 128), BF16), handle)
        with pytest.raises(ew.InvalidArgumentError, match="expert_output overlaps out"):
            comm.combine(out.tokens, handle, out=out.tokens[0])
        combined = comm.combine(out.tokens, handle)
        assert combined.device == x.device
        assert combined.float().cpu()[:, 0].tolist() == [2.0, 1.0, 2.0]
        own = torch.empty((4, 3, 128), dtype=torch.bfloat16, device="cuda:0")
        assert comm.dispatch(x, ids, output_buffer=own)[0].tokens is own


@pytest.mark.gpu
def test_rows_that_begin_within_a_word_are_refused() -> None:
    """Contiguous and aligned to its elements, but kernels move words of 16 bytes: the context would be lost."""
    torch = pytest.importorskip("torch")

    def shifted(*shape: int) -> Any:
        return torch.ones(math.prod(shape) + 4, dtype=torch.bfloat16, device="cuda:0")[4:].view(shape)

    ids = torch.tensor(IDS, device="cuda:0")
    words = "is misaligned: its address must be a multiple of 16"
    with single() as comm:
        x = torch.ones((3, 128), dtype=torch.bfloat16, device="cuda:0")
        with pytest.raises(ew.InvalidArgumentError, match=f"x {words}"):
            comm.dispatch(shifted(3, 128), ids)
        with pytest.raises(ew.InvalidArgumentError, match=f"output_buffer {words}"):
            comm.dispatch(x, ids, output_buffer=shifted(4, 3, 128))
        out, handle = comm.dispatch(x, ids)
        with pytest.raises(ew.InvalidArgumentError, match=f"expert_output {words}"):
            comm.combine(shifted(4, 3, 128), handle)
        with pytest.raises(ew.InvalidArgumentError, match=f"out {words}"):
            comm.combine(out.tokens, handle, out=shifted(3, 128))
        assert comm.combine(out.tokens, handle).float().cpu()[:, 0].tolist() == [2.0, 1.0, 2.0]


@pytest.mark.gpu
def test_cuda_arrays_are_refused_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((3, 128), dtype=torch.bfloat16, device="cuda:0")
    with single(device="cpu") as comm:
        with pytest.raises(ew.InvalidArgumentError, match=r"x = .* on cuda:0: this communicator runs on the CPU"):
            comm.dispatch(x, torch.tensor(IDS))
        with pytest.raises(ew.InvalidArgumentError, match=r"stream = .*the CPU has no streams"):
            comm.dispatch(x.cpu(), torch.tensor(IDS), stream=torch.cuda.current_stream())


@pytest.mark.multi_gpu
def test_arrays_and_streams_of_another_gpu_are_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((3, 128), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.tensor(IDS, device="cuda:0")
    with single(device="cuda:1") as comm:
        with pytest.raises(ew.InvalidArgumentError, match=r"x = .* on cuda:0: this communicator runs on cuda:1"):
            comm.dispatch(x, ids)
        with pytest.raises(ew.InvalidArgumentError, match="stream = Stream of cuda:0: must be of cuda:1"):
            comm.dispatch(x.to("cuda:1"), ids.to("cuda:1"), stream=torch.cuda.Stream("cuda:0"))
        out, handle = comm.dispatch(x.to("cuda:1"), ids.to("cuda:1"))  # the current device is another one
        assert str(out.tokens.device) == "cuda:1"
        assert comm.combine(out.tokens, handle).float().cpu()[:, 0].tolist() == [2.0, 1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.parametrize("as_integers", [False, True])
def test_cupy_in_cupy_out(as_integers: bool) -> None:
    cupy = pytest.importorskip("cupy")
    has_bfloat16 = int(cupy.__version__.partition(".")[0]) >= 14
    bits = cupy.asarray(np.ones((3, 128), BF16).view(np.uint16))
    x = bits if as_integers or not has_bfloat16 else bits.view(ml_dtypes.bfloat16)
    with single() as comm, cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
        out, handle = comm.dispatch(x, cupy.asarray(IDS), cupy.ones((3, 2), np.float32))
        assert isinstance(out.tokens, cupy.ndarray)
        assert out.tokens.dtype == (BF16 if has_bfloat16 else np.uint16)
        assert out.tokens.data.ptr == comm._runtime.lane_address(0, "tokens")
        assert out.layout.num_tokens_per_expert.get().tolist() == [2, 1, 1, 1]
        assert comm.get_dispatch_output_buffer("cupy") is out.tokens
        combined = comm.combine(out.tokens, handle, stream=stream)
        assert combined.get().view(BF16)[:, 0].tolist() == [2.0, 1.0, 2.0]
        own = cupy.empty((3, 128), np.uint16)
        assert comm.combine(out.tokens, handle, out=own) is own
        assert own.get().view(BF16)[:, 0].tolist() == [2.0, 1.0, 2.0]
        with pytest.raises(ew.InvalidArgumentError, match=r"x = float32 .*dtype must be bfloat16"):
            comm.dispatch(cupy.ones((3, 128), np.float32), cupy.asarray(IDS))


@pytest.mark.gpu
def test_cupy_fp8_comes_as_bytes() -> None:
    cupy = pytest.importorskip("cupy")
    quant = ew.QuantConfig(ew.DispatchDataType.FP8_E4M3, scale_layout=ew.ScaleLayout.COLUMN)
    with single(quant=quant) as comm, cupy.cuda.Device(0):
        rows = cupy.asarray(np.arange(3 * 128, dtype=np.uint8).reshape(3, 128) % 120)
        scales = cupy.asarray(np.array([[0.5], [2.0], [3.0]], np.float32))
        out, _ = comm.dispatch(rows, cupy.asarray(IDS), quant=ew.QuantConfig(block_scales=scales))
        assert out.tokens.dtype == np.uint8
        assert out.quant is not None
        assert out.quant.block_scales.strides[-2] == 4
        assert (out.tokens[0, :2] == rows[[0, 2]]).all()
        assert out.quant.block_scales[0, :2, 0].get().tolist() == [0.5, 3.0]
