"""The drop-in for DeepEP on GPUs: streams, events, hooks, captures, and what needs the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew

torch = pytest.importorskip("torch")
from expertwire.interop import deep_ep  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MOST, HIDDEN, EXPERTS = 4, 512, 4
CALL = {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
IDS, WEIGHTS = [[0, 3], [2, -1], [1, 0]], [[0.5, 0.25], [2.0, 9.0], [1.0, 1.0]]
SUMS = [[0.75], [2.0], [2.0]]  # of the weights whose slots select something

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _not_while_kernels_are_listed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("list_kernels", None) is not None:
        pytest.skip("compiles its kernels as it runs")


def single() -> deep_ep.Buffer:
    return deep_ep.Buffer(ew.local_group(1)[0], low_latency_mode=True)


def inputs(num_rows: int = 3) -> tuple[Any, Any, Any]:
    x = torch.arange(num_rows * HIDDEN).view(num_rows, HIDDEN).remainder(128).bfloat16().cuda()
    ids = torch.full((num_rows, 2), -1)
    weights = torch.zeros(num_rows, 2)
    ids[:3], weights[:3] = torch.tensor(IDS), torch.tensor(WEIGHTS)
    return x, ids.cuda(), weights.cuda()


def wanted(x: Any) -> Any:
    return (x[:3].cpu().float() * torch.tensor(SUMS)).bfloat16()


@pytest.mark.parametrize("mode", ew.CombineMode)
@pytest.mark.parametrize("form", ["plain", "event", "hook"])
def test_forms_of_a_call(form: str, mode: ew.CombineMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.Buffer, "combine_mode", mode)
    buffer, (x, ids, weights) = single(), inputs()
    how = {"async_finish": form == "event", "return_recv_hook": form == "hook"}
    stats = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    for zero_copy in (False, True):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, **CALL, use_fp8=False, cumulative_local_expert_recv_stats=stats, **how
        )
        if form == "event":
            event.current_stream_wait()
        elif form == "hook":
            hook()
        assert counts.tolist() == [2, 1, 1, 1]
        assert [int(length) for length in (handle[1] & (2**32 - 1)).flatten()] == [2, 1, 1, 1]
        assert handle[0][0, :2].tolist() == [0, 2]
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
        given = torch.full_like(rows, float("nan")) if zero_copy else rows
        y, event, hook = buffer.low_latency_combine(given, ids, weights, handle, zero_copy=zero_copy, **how)
        if form == "event":
            event.current_stream_wait()
        elif form == "hook":
            hook()
        assert torch.equal(y.cpu(), wanted(x))
    assert stats.tolist() == [4, 2, 2, 2]
    buffer.destroy()


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_scales_have_token_stride_one(use_ue8m0: bool) -> None:
    buffer, (x, ids, _) = single(), inputs()
    (rows, scales), *_ = buffer.low_latency_dispatch(x, ids, **CALL, round_scale=use_ue8m0, use_ue8m0=use_ue8m0)
    assert rows.dtype is torch.float8_e4m3fn
    assert scales.shape == (EXPERTS, MOST, 1 if use_ue8m0 else 4)
    assert scales.stride()[1:] == (1, MOST)
    buffer.destroy()


def test_captured_calls_replay_and_the_first_call_is_refused_in_a_capture() -> None:
    buffer, (x, ids, weights) = single(), inputs(MOST)
    out = torch.empty_like(x)

    def layer() -> None:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, **CALL, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle, out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        refused = torch.cuda.CUDAGraph()
        refused.capture_begin()
        with pytest.raises(ew.InvalidArgumentError, match="make one call of this kind before the capture"):
            layer()
        out.zero_()  # torch warns of an empty graph
        refused.capture_end()
        layer()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            layer()
        for scale in (1, 2):
            x.mul_(scale)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out[:3].cpu(), wanted(x))
            assert not out[3].any()
    torch.cuda.synchronize()
    del graph
    buffer.destroy()


def test_waiting_times_are_added_on_the_device() -> None:
    buffer, (x, ids, weights) = single(), inputs()
    waited = torch.full((1,), 7, dtype=torch.int64, device="cuda")
    (rows, *_), _, handle, _, _ = buffer.low_latency_dispatch(x, ids, **CALL, dispatch_wait_recv_cost_stats=waited)
    answer = torch.zeros(rows.shape, dtype=torch.bfloat16, device="cuda")
    buffer.low_latency_combine(answer, ids, weights, handle, combine_wait_recv_cost_stats=waited)
    assert waited.tolist() == [7]  # alone, nobody is waited for; among several ranks: test_cuda_faults.py
    buffer.destroy()


@pytest.mark.multi_gpu
def test_serving_layer_in_a_process_for_each_gpu() -> None:
    command = [sys.executable, str(ROOT / "examples" / "serving_layer.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
