"""Arrays of each framework: taken by address without a copy, made over given memory, and refused with the reason."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import expertwire as ew
from expertwire.interop.arrays import ITEM_BYTES, adapter_of, make_adapter

NUMPY_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float32": np.float32,
    "int32": np.int32,
    "int64": np.int64,
}


class Exporter:
    """An array of a framework that is neither NumPy nor torch."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def zeros(framework: str, shape: tuple[int, ...], dtype: str) -> Any:
    if framework == "numpy":
        return np.zeros(shape, NUMPY_DTYPES[dtype])
    torch = pytest.importorskip("torch")
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0]) if isinstance(array, np.ndarray) else int(array.data_ptr())


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_address_is_where_the_array_lies(framework: str, dtype: str) -> None:
    array = zeros(framework, (4, 6), dtype)
    adapter = make_adapter(array, "x")
    assert adapter.framework == framework
    assert adapter.dtype(array) == dtype
    assert tuple(adapter.shape(array)) == (4, 6)
    assert adapter.address(array, "x", dtype, (4, 6), writable=True) == address(array)
    assert adapter.address(array[2:], "x", dtype, (2, 6)) == address(array) + 2 * 6 * ITEM_BYTES[dtype]
    adapter.address(array[:0], "x", dtype, (0, 6))
    adapter.address(array[:, :1][:1], "x", dtype, (1, 1))  # one element has no gaps


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_arrays_over_given_memory_share_it(framework: str, dtype: str) -> None:
    memory = np.arange(2 * 3 * ITEM_BYTES[dtype], dtype=np.uint8)
    adapter = make_adapter(zeros(framework, (0,), dtype), "x")
    array = adapter.over(memory, (2, 3), dtype)
    assert adapter.dtype(array) == dtype
    assert tuple(array.shape) == (2, 3)
    assert address(array) == address(memory)
    array[...] = 0
    assert not memory.any()
    assert tuple(adapter.over(np.empty(0, np.uint8), (0, 3), dtype).shape) == (0, 3)
    assert adapter.dtype(adapter.empty((5, 1), dtype)) == dtype


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_over_given_memory_keep_it_alive(framework: str) -> None:
    adapter = make_adapter(zeros(framework, (0,), "float32"), "x")
    array = adapter.over(np.full(4096, 0x3F, np.uint8), (1024,), "float32")
    np.full(4096, 0xFF, np.uint8)  # would take the freed memory
    assert np.asarray(array).view(np.uint8).tolist() == [0x3F] * 4096


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.reshape(6, 4), r"x = float32 \[6, 4\] array on cpu: the shape must be \[4, 6\]"),
        (lambda a: a[:, None], r"\[4, 1, 6\].*the shape must be"),
        (lambda a: a.reshape(-1), r"\[24\].*the shape must be"),
        (lambda a: a.reshape(6, 4).T, "non-contiguous float32.*must be contiguous"),
    ],
)
def test_wrong_shape_or_order_is_refused(framework: str, change: Any, words: str) -> None:
    array = change(zeros(framework, (4, 6), "float32"))
    with pytest.raises(ew.InvalidArgumentError, match=words):
        make_adapter(array, "x").address(array, "x", "float32", (4, 6))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_wrong_dtype_is_refused(framework: str) -> None:
    array = zeros(framework, (4, 6), "float32")
    with pytest.raises(ew.InvalidArgumentError, match=r"weights = float32 \[4, 6\].*the dtype must be bfloat16"):
        make_adapter(array, "weights").address(array, "weights", "bfloat16", (4, 6))


def test_numpy_arrays_with_gaps_of_foreign_order_misaligned_or_read_only_are_refused() -> None:
    adapter = adapter_of("numpy")
    every_second = np.zeros((4, 12), np.float32)[:, ::2]
    misaligned = np.zeros(4 * 6 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 6)
    read_only = np.zeros((4, 6), np.float32)
    read_only.flags.writeable = False
    adapter.address(read_only, "x", "float32", (4, 6))
    for array, words in [
        (every_second, "must be contiguous"),
        (np.zeros((4, 6), ">f4"), "float32 of foreign byte order.*the dtype must be float32"),
        (misaligned, "must be aligned to 4 bytes"),
        (read_only, "read-only.*must be writable"),
        (np.zeros((4, 6), np.float16), "float16"),
    ]:
        with pytest.raises(ew.InvalidArgumentError, match=words):
            adapter.address(array, "x", "float32", (4, 6), writable=True)


def test_numpy_subclasses_are_numpy(tmp_path: Any) -> None:
    array = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(4, 6))
    assert make_adapter(array, "x").address(array, "x", "float32", (4, 6)) == address(np.asarray(array))


def test_torch_tensors_off_the_cpu_or_without_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    adapter = adapter_of("torch")
    with pytest.raises(ew.InvalidArgumentError, match="on meta: this communicator runs on the CPU"):
        adapter.address(torch.zeros(4, 6, device="meta"), "x", "float32", (4, 6))
    with pytest.raises(ew.InvalidArgumentError, match="must be contiguous"):
        adapter.address(torch.zeros(4, 6).to_sparse(), "x", "float32", (4, 6))
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    assert make_adapter(parameter, "x").address(parameter, "x", "float32", (4, 6)) == parameter.data_ptr()


def test_other_frameworks_come_in_through_dlpack() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    exporter = Exporter(array)
    adapter = make_adapter(exporter, "x")
    opened = adapter.open(exporter, "x")
    assert adapter.framework == "numpy"
    assert tuple(adapter.shape(opened)) == (4, 6)
    assert adapter.dtype(opened) == "float32"
    assert adapter.address(opened, "x", "float32", (4, 6)) == address(array)
    assert isinstance(adapter.empty((1, 2), "bfloat16"), np.ndarray)


def test_bfloat16_and_fp8_cross_dlpack() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.zeros(4, 6, dtype=torch.bfloat16)
    adapter = make_adapter(Exporter(rows), "x")
    opened = adapter.open(Exporter(rows), "x")
    assert adapter.address(opened, "x", "bfloat16", (4, 6)) == rows.data_ptr()
    quantised = np.zeros((4, 6), np.uint8)
    opened = adapter.open(Exporter(quantised), "x")
    assert adapter.address(opened, "x", "float8_e4m3fn", (4, 6)) == address(quantised)
    with pytest.raises(ew.InvalidArgumentError, match=r"uint8.*the dtype must be bfloat16"):
        adapter.address(opened, "x", "bfloat16", (4, 6))


def test_dlpack_objects_that_do_not_fit_are_refused() -> None:
    array = np.zeros((4, 6), np.float32)
    adapter = make_adapter(Exporter(array), "x")
    opened = adapter.open(Exporter(array.T), "x")
    with pytest.raises(ew.InvalidArgumentError, match="must be contiguous"):
        adapter.address(opened, "x", "float32", (6, 4))
    with pytest.raises(ew.InvalidArgumentError, match="DLPack device type 2: must lie in CPU memory"):
        adapter.open(Exporter(array, device=(2, 0)), "x")
    with pytest.raises(ew.InvalidArgumentError, match="does not export its memory through DLPack"):
        adapter.open(Exporter(np.zeros((4, 6), ml_dtypes.bfloat16)), "x")
    with pytest.raises(ew.InvalidArgumentError, match=r"out = .*must be a NumPy array or a torch tensor"):
        adapter.open(Exporter(array), "out", writable=True)


@pytest.mark.parametrize("thing", [None, [[1.0]], 3, "x", b"bytes", np.ndarray, memoryview(b"abc")])
def test_what_is_no_array_is_refused(thing: Any) -> None:
    with pytest.raises(ew.InvalidArgumentError, match=r"x = .* object: must be a NumPy array"):
        make_adapter(thing, "x")


def test_unknown_frameworks_are_refused() -> None:
    with pytest.raises(ew.InvalidArgumentError, match='framework = \'jax\': must be "numpy" or "torch"'):
        adapter_of("jax")


def test_torch_outputs_carry_nothing_from_one_dispatch_to_the_next() -> None:
    torch = pytest.importorskip("torch")
    x, topk_ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    (group,) = ew.local_group(1)
    with ew.MoECommunicator(group, num_experts=4, hidden_size=128, num_topk=2, max_tokens_per_rank=3) as comm:
        with torch.inference_mode():  # a warm-up: what it makes must serve training, too
            comm.dispatch(x, topk_ids)
        with torch.device("meta"):
            out, handle = comm.dispatch(x, topk_ids)
            assert comm.combine(out.tokens, handle).device.type == "cpu"
        out.tokens.requires_grad_()
        out.combine_input_buffer[0] = out.tokens[0] * torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
        again, _ = comm.dispatch(x, topk_ids)
        assert not again.tokens.requires_grad
        assert not again.tokens.is_inference()
        assert not again.combine_input_buffer.requires_grad
        negated = torch.complex(torch.zeros(3, 2), torch.ones(3, 2)).conj().imag
        with pytest.raises(ew.InvalidArgumentError, match="weights = non-contiguous"):
            comm.dispatch(x, topk_ids, negated)


# ExternalStream(0) of torch is some other stream, whose memory would be written on the default one.
@pytest.mark.parametrize("stream", [0, 0x10])
def test_torch_results_belong_to_the_stream_that_writes_them(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    torch = pytest.importorskip("torch")
    used = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: (0, device.type))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: (address, device.type))
    monkeypatch.setattr(torch.cuda, "stream", lambda of: contextlib.nullcontext(used.append(of)))
    adapter_of("torch").empty((2, 8), "bfloat16", stream)
    assert used == [(stream, "cpu")]
