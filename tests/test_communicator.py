"""MoECommunicator: what comes out of the calls, whose arrays they are, and how long they live."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import DIRECT, EXPERT_MAJOR, QUANTS, RANK_MAJOR, WAYS, Case, way_name
from driving import assert_received, exchange, expected, run_threads
from expertwire.types import DispatchDataType, QuantConfig, ScaleFormat, ScaleLayout
from test_arrays import Exporter

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPE: dict[str, Any] = {"num_experts": 4, "hidden_size": 16, "num_topk": 2, "max_tokens_per_rank": 3}


def single(**fields: Any) -> ew.MoECommunicator:
    return ew.MoECommunicator(*ew.local_group(1), **{**SHAPE, **fields})


def rows(num_tokens: int = 3, hidden_size: int = 16) -> np.ndarray:
    return np.arange(num_tokens * hidden_size, dtype=np.float32).reshape(num_tokens, hidden_size).astype(BF16)


def ids(num_tokens: int = 3) -> np.ndarray:
    return np.array([[0, 3], [2, -1], [1, 0]])[:num_tokens]


# Construction


def test_config_and_keywords_mean_the_same() -> None:
    config = ew.MoECommunicatorConfig(**SHAPE, output_layout=RANK_MAJOR, combine_mode=DIRECT)
    with ew.MoECommunicator(*ew.local_group(1), config) as by_config, single(
        output_layout="Rank_Major", combine_mode="DIRECT_SEND", mode="latency", on_peer_loss="raise", device="cpu"
    ) as by_name, ew.MoECommunicator(*ew.local_group(1), config, max_in_flight=2) as changed:  # fmt: skip
        assert by_config.config == by_name.config
        assert changed.config == replace(by_config.config, max_in_flight=2)


def test_config_has_its_defaults_filled_in() -> None:
    quant = QuantConfig(format=DispatchDataType.FP8_E4M3, scale_format=ScaleFormat.UE8M0)
    with single(hidden_size=128, quant=quant, num_experts=np.int64(4)) as comm:
        assert comm.config.experts_per_rank == (4,)
        assert comm.config.device == "cpu"
        assert comm.config.validate is True
        assert comm.config.quant.round_scale_pow2 is True
        assert comm.config.on_peer_loss is ew.PeerLossPolicy.RAISE
        with pytest.raises(FrozenInstanceError):
            comm.config.num_topk = 1  # type: ignore[misc]


def _describe(group: ew.Group) -> tuple[int, ...]:
    with ew.MoECommunicator(group, **{**SHAPE, "num_experts": 5}, experts_per_rank=[2, 0, 3]) as comm:
        return comm.rank, comm.num_ranks, comm.num_local_experts, comm.first_local_expert


def test_ranks_know_their_experts() -> None:
    assert run_threads(_describe, 3) == [(0, 3, 2, 0), (1, 3, 0, 2), (2, 3, 3, 2)]


def test_repr_says_what_it_is() -> None:
    comm = single()
    assert "rank 0 of 1, open" in repr(comm)
    comm.close()
    assert "closed" in repr(comm)


# Results, on one rank where they can be read off


def test_numpy_in_numpy_out() -> None:
    with single() as comm:
        out, handle = comm.dispatch(rows(), ids())
        assert out.tokens.shape == (4, 3, 16)
        assert out.tokens.dtype == BF16
        assert out.layout.num_tokens_per_expert.tolist() == [2, 1, 1, 1]
        assert out.layout.rank_ranges.tolist() == [[[0, 2]], [[0, 1]], [[0, 1]], [[0, 1]]]
        assert out.source_token[0, :2].tolist() == [0, 2]
        assert (out.quant, out.topk_ids, out.weights, out.layout.num_tokens_per_rank) == (None,) * 4
        assert_same_bits(out.tokens[0, :2], rows()[[0, 2]], "rows of expert 0")
        combined = comm.combine(out.tokens, handle)
        assert_same_bits(combined, (rows().astype(np.float32) * [[2], [1], [2]]).astype(BF16), "combined")
        assert (handle.num_tokens, handle.lane) == (3, 0)


def test_rank_major_output() -> None:
    with single(output_layout="rank_major", combine_mode="direct_send", invalid_token_expert_id=-7) as comm:
        weights = np.array([[0.5, 0.25], [1.0, 9.0]], np.float32)
        out, handle = comm.dispatch(rows(2), ids(2), weights)
        assert out.layout.num_tokens_per_rank.tolist() == [2]
        assert out.topk_ids.tolist() == [[0, 3], [2, -7], [-7, -7]]
        assert out.weights.tolist() == [[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]]
        assert out.combine_input_buffer.shape == (3, 2, 16)
        out.combine_input_buffer[:2, 0] = out.tokens[:2]
        out.combine_input_buffer[:2, 1] = 0
        assert_same_bits(comm.combine(out.combine_input_buffer, handle), rows(2), "combined")


def _rank_of_case(group: ew.Group, case: Case) -> Any:
    with ew.MoECommunicator(group, case.config) as comm:
        return exchange(comm, case.inputs()[group.rank])


@pytest.mark.parametrize(("layout", "combine_mode"), WAYS, ids=lambda way: way.name)
def test_ranks_agree_with_the_reference(layout: Any, combine_mode: Any) -> None:
    case = Case(
        f"agree-{way_name(layout, combine_mode)}", (4, 0, 3), 6, 16, 3, layout=layout, combine_mode=combine_mode
    )
    assert_received(run_threads(_rank_of_case, 3, case), expected(case.config, case.inputs()))


@pytest.mark.parametrize("scale_layout", list(ScaleLayout))
@pytest.mark.parametrize(("kind", "count"), [("float32", 6), ("ue8m0", 2), ("mxfp8", 6)])
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR])
def test_block_scales_have_the_asked_memory_order(
    layout: Any, max_tokens: int, kind: str, count: int, scale_layout: Any
) -> None:
    quant = replace(QUANTS[kind], scale_layout=scale_layout)
    with single(hidden_size=768, output_layout=layout, max_tokens_per_rank=max_tokens, quant=quant) as comm:
        out, _ = comm.dispatch(rows(3, 768), ids())
        scales = out.quant.block_scales
        assert out.tokens.dtype == FP8
        assert scales.dtype == (np.float32 if kind == "float32" else np.int32)
        assert scales.shape == (*out.tokens.shape[:-1], count)
        stride = 16 if max_tokens < 5 else 32  # bytes: TMA wants multiples of 16
        wanted = (
            (stride * count, 4, stride)
            if scale_layout is ScaleLayout.COLUMN
            else (4 * count * max_tokens, 4 * count, 4)
        )
        assert scales.strides == wanted[-scales.ndim :]
        assert scales.ctypes.data % 16 == 0
        assert out.quant == comm.config.quant


def test_torch_scales_are_what_grouped_gemms_take_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    quant = QuantConfig(DispatchDataType.MXFP8, scale_layout=ScaleLayout.COLUMN)
    with single(hidden_size=256, max_tokens_per_rank=5, quant=quant) as comm:
        x = torch.ones(3, 256, dtype=torch.bfloat16)
        out, _ = comm.dispatch(x, torch.from_numpy(ids()))
        scales = out.quant.block_scales
        assert (out.tokens.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.int32)
        assert (tuple(scales.shape), scales.stride()) == ((4, 5, 2), (16, 1, 8))
        assert scales.data_ptr() % 16 == 0
        assert scales[0, 0].tolist() == [0x77777777] * 2  # 2^-8 for 1 / 448 rounded up, in four bytes


def test_the_program_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "grouped_gemm.md"
    (program,) = re.findall(r"```python\n(import .*?)```", page.read_text(), re.DOTALL)
    exec(program, {})  # noqa: S102 (our own page)
    assert f"# {capsys.readouterr().out.strip()}" in program


def test_mxfp8_implies_its_scales() -> None:
    with single(hidden_size=128, quant=QuantConfig("mxfp8")) as comm:
        assert comm.config.quant == QuantConfig(DispatchDataType.MXFP8, True, ScaleFormat.UE8M0)
        assert (comm.config.quant.scale_block, comm.config.quant.packs_exponents) == (32, True)


def test_quantised_rows_travel_as_they_are() -> None:
    quant = QuantConfig(DispatchDataType.FP8_E4M3)
    with single(hidden_size=128, output_layout="rank_major", quant=quant) as comm:
        x = np.arange(256, dtype=np.uint8).reshape(2, 128).view(FP8)
        scales = np.array([[0.5], [3.0]], np.float32)
        out, _ = comm.dispatch(x, ids(2), quant=QuantConfig(block_scales=scales))
        assert_same_bits(out.tokens[:2], x, "tokens")
        assert_same_bits(out.quant.block_scales[:2], scales, "scales")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_any_index_type_and_token_count(dtype: Any, num_tokens: int) -> None:
    with single() as comm:
        out, handle = comm.dispatch(rows(num_tokens), ids(num_tokens).astype(dtype))
        combined = comm.combine(out.tokens, handle)
        assert combined.shape == (num_tokens, 16)
        assert handle.num_tokens == num_tokens


def test_weights_of_combine_replace_those_of_dispatch() -> None:
    with single() as comm:
        weights = np.full((3, 2), 0.5, np.float32)
        out, handle = comm.dispatch(rows(), np.array([[0, 1]] * 3), weights)
        weights[:] = np.nan  # the handle has its own copy
        assert_same_bits(comm.combine(out.tokens, handle), rows(), "with the weights of dispatch")
        ones = np.ones((3, 2), np.float32)
        assert_same_bits(comm.combine(out.tokens, handle, weights=ones), rows() + rows(), "with other weights")


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_thousands_of_small_calls(max_tokens: int) -> None:
    def rank_of(group: ew.Group) -> None:
        rng = np.random.default_rng(group.rank)
        with ew.MoECommunicator(
            group, num_experts=4, hidden_size=8, num_topk=1, max_tokens_per_rank=max_tokens
        ) as comm:
            for step in range(3000):
                num_tokens = int(rng.integers(0, max_tokens + 1))
                x = np.full((num_tokens, 8), 1 + step % 128, BF16)
                out, handle = comm.dispatch(x, rng.integers(0, 4, (num_tokens, 1)))
                assert_same_bits(comm.combine(out.tokens, handle), x, f"step {step}")

    run_threads(rank_of, 2)


# Arrays of other frameworks


def test_torch_in_torch_out() -> None:
    torch = pytest.importorskip("torch")
    with single() as comm:
        x = torch.from_numpy(rows().view(np.int16)).view(torch.bfloat16)
        for index_type in (torch.int32, torch.int64):
            out, handle = comm.dispatch(x, torch.tensor(ids(), dtype=index_type), torch.ones(3, 2))
            assert out.tokens.dtype is torch.bfloat16
            assert out.layout.num_tokens_per_expert.tolist() == [2, 1, 1, 1]
            assert torch.equal(out.tokens[0, :2], x[[0, 2]])
            combined = comm.combine(out.tokens, handle)
            assert combined.dtype is torch.bfloat16
            assert torch.equal(combined, x * torch.tensor([[2.0], [1.0], [2.0]], dtype=torch.bfloat16))
            own = torch.empty_like(x)
            assert comm.combine(out.tokens, handle, out=own) is own
            assert torch.equal(own, combined)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_torch_tensors_without_elements_have_no_address(layout: str) -> None:
    torch = pytest.importorskip("torch")

    def rank_of(group: ew.Group) -> Any:
        with ew.MoECommunicator(group, **SHAPE, experts_per_rank=(4, 0), output_layout=layout) as comm:
            num_tokens = (0, 2)[group.rank]
            x = torch.ones(num_tokens, 16, dtype=torch.bfloat16)
            assert num_tokens or x.data_ptr() == 0
            topk_ids = torch.tensor([[0, 1]] * num_tokens, dtype=torch.int64).reshape(num_tokens, 2)
            out, handle = comm.dispatch(x, topk_ids, torch.ones(num_tokens, 2))
            return comm.combine(out.tokens, handle)

    none, combined = run_threads(rank_of, 2)
    assert none.shape == (0, 16)
    times = 2 if layout == "expert_major" else 1  # one row for each expert, or for each rank
    assert torch.equal(combined, torch.full((2, 16), times, dtype=torch.bfloat16))


def test_torch_fp8() -> None:
    torch = pytest.importorskip("torch")
    quant = QuantConfig(DispatchDataType.FP8_E4M3, scale_layout=ScaleLayout.COLUMN)
    with single(hidden_size=256, quant=quant) as comm:
        x = torch.arange(256, dtype=torch.uint8).reshape(1, 256).view(torch.float8_e4m3fn)
        scales = torch.tensor([[0.5, 2.0]])
        out, handle = comm.dispatch(x, torch.tensor([[1, -1]]), quant=QuantConfig(block_scales=scales))
        assert out.tokens.dtype is torch.float8_e4m3fn
        assert out.quant.block_scales.stride() == (2 * 4, 1, 4)
        assert torch.equal(out.quant.block_scales[1, 0], scales[0])
        nan = torch.isnan(x.float())
        same = out.tokens[1, 0].view(torch.uint8) == x[0].view(torch.uint8)
        assert bool((same | nan[0]).all())
        answer = out.tokens.to(torch.bfloat16)
        assert torch.equal(comm.combine(answer, handle).isnan(), nan)


def test_frameworks_may_be_mixed_and_share_the_lane() -> None:
    torch = pytest.importorskip("torch")
    with single() as comm:
        out, handle = comm.dispatch(rows(), torch.tensor(ids()), torch.ones(3, 2))
        assert isinstance(out.tokens, np.ndarray)
        answer = comm.get_combine_input_buffer("torch")
        assert answer.data_ptr() == out.combine_input_buffer.__array_interface__["data"][0]
        answer.copy_(torch.from_numpy(out.tokens.view(np.int16)).view(torch.bfloat16))
        assert isinstance(comm.combine(answer, handle), torch.Tensor)
        assert isinstance(comm.combine(out.combine_input_buffer, handle), np.ndarray)


def test_dlpack_objects_in_numpy_out() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rows().view(np.int16)).view(torch.bfloat16)
    with single() as comm:
        weights = np.ones((3, 2), np.float32)
        out, handle = comm.dispatch(Exporter(x), Exporter(ids()), Exporter(weights))
        assert isinstance(out.tokens, np.ndarray)
        assert_same_bits(out.tokens[0, :2], rows()[[0, 2]], "rows of expert 0")
        assert isinstance(comm.combine(Exporter(comm.get_combine_input_buffer("torch")), handle), np.ndarray)
        with pytest.raises(ew.InvalidArgumentError, match=r"out = Exporter object: must be a NumPy array"):
            comm.combine(out.tokens, handle, out=Exporter(torch.empty_like(x)))


def test_working_with_numpy_does_not_import_torch() -> None:
    program = (
        "import sys, numpy as np, ml_dtypes, expertwire as ew\n"
        "shape = dict(num_experts=1, hidden_size=8, num_topk=1, max_tokens_per_rank=1)\n"
        "comm = ew.MoECommunicator(*ew.local_group(1), **shape)\n"
        "out, handle = comm.dispatch(np.ones((1, 8), ml_dtypes.bfloat16), np.zeros((1, 1), np.int64))\n"
        "assert (comm.combine(out.tokens, handle) == 1).all()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Accounts


def _count(group: ew.Group) -> tuple[ew.MoEStats, ew.MoEMemoryBytes, tuple[int, ...]]:
    with ew.MoECommunicator(group, **SHAPE) as comm:
        for _ in range(2):
            out, handle = comm.dispatch(rows(), ids())
        comm.combine(out.tokens, handle)
        comm.check()
        return comm.stats(), comm.memory_bytes(), comm.lost_ranks()


def test_stats_count_calls_rows_and_bytes() -> None:
    (first, memory, lost), (second, other_memory, _) = run_threads(_count, 2)
    for stats in (first, second):
        assert (stats.dispatch_calls, stats.combine_calls, stats.timeouts) == (2, 1, 0)
        assert len(stats.source_wait_seconds) == 2
        assert min(stats.source_wait_seconds) >= 0.0
    assert first.expert_tokens == (8, 4)  # experts 0 and 1: 2 and 1 rows from each of two ranks, twice
    assert second.expert_tokens == (4, 4)
    assert first.bytes_sent == second.bytes_received > 0
    assert second.bytes_sent == first.bytes_received > 0
    assert lost == ()
    assert memory == other_memory
    assert memory.total == memory.shared + memory.outputs + memory.private
    assert min(memory.shared, memory.outputs, memory.private) > 0


def test_waiting_leaves_other_threads_running() -> None:
    def rank_of(group: ew.Group, ticks: list[int]) -> None:
        with ew.MoECommunicator(group, **SHAPE) as comm:
            if group.rank == 1:  # rank 0 waits for this one
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    ticks[0] += 1
                    time.sleep(0.001)
            comm.dispatch(rows(), ids())

    ticks = [0]
    run_threads(rank_of, 2, ticks)
    assert ticks[0] > 20


def refusals(*calls: Callable[[], Any]) -> list[str]:
    texts = []
    for call in calls:
        with pytest.raises(ew.Error) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_a_second_thread_is_refused() -> None:
    entered, finished = threading.Event(), threading.Event()

    def rank_of(group: ew.Group) -> str:
        with ew.MoECommunicator(group, **SHAPE) as comm:
            if group.rank == 1:
                assert finished.wait(30)
                comm.dispatch(rows(), ids())
                return ""
            refusal: list[str] = []

            def intrude() -> None:
                entered.wait(30)
                time.sleep(0.1)  # until the owner waits inside
                refusal.extend(refusals(lambda: comm.dispatch(rows(), ids()), comm.stats, comm.close))
                finished.set()

            intruder = threading.Thread(target=intrude)
            intruder.start()
            entered.set()
            out, handle = comm.dispatch(rows(), ids())
            intruder.join()
            assert len(refusal) == 3
            assert out.layout.num_tokens_per_expert.tolist() == [4, 2]
            assert handle.num_tokens == 3
            return refusal[0]

    assert "another thread is inside this communicator" in run_threads(rank_of, 2)[0]
