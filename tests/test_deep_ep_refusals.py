"""The drop-in for DeepEP refuses what is wrong before anything is sent, by the names its callers know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import expertwire as ew

torch = pytest.importorskip("torch")
from expertwire.interop import deep_ep  # noqa: E402

MOST, HIDDEN, EXPERTS = 3, 128, 4


def single(**fields: Any) -> deep_ep.Buffer:
    """Return the Buffer of the only rank of a group."""
    return deep_ep.Buffer(ew.local_group(1)[0], **{"low_latency_mode": True, **fields})


def good_dispatch(**changed: Any) -> dict[str, Any]:
    return {
        "x": torch.arange(2.0 * HIDDEN).view(2, HIDDEN).bfloat16(),
        "topk_idx": torch.tensor([[0, 3], [2, -1]]),
        "num_max_dispatch_tokens_per_rank": MOST,
        "num_experts": EXPERTS,
        "use_fp8": False,
        **changed,
    }


WIDE = torch.zeros(2, 2 * HIDDEN, dtype=torch.bfloat16)
WRONG_DISPATCHES = [
    ({"x": [[1.0]]}, "x = list object: must be a bfloat16 torch tensor"),
    ({"x": torch.zeros(2, HIDDEN)}, r"x = float32 \[2, 128\] array on cpu: the dtype must be bfloat16"),
    ({"x": WIDE[:, ::2]}, "x = non-contiguous"),
    ({"x": WIDE[0]}, r"x = tensor of shape \[256\]: must be \[T, hidden\]"),
    ({"x": torch.zeros(2, 64).bfloat16()}, "hidden a multiple of 128"),
    ({"x": torch.zeros(4, HIDDEN).bfloat16()}, "T <= num_max_dispatch_tokens_per_rank = 3"),
    ({"x": torch.zeros(2, HIDDEN, device="meta").bfloat16()}, "x = tensor on meta: must be on the CPU or on CUDA"),
    ({"topk_idx": torch.zeros(2, 2)}, "topk_idx = torch.float32 tensor: the dtype must be deep_ep.topk_idx_t"),
    ({"topk_idx": torch.tensor([0, 1])}, r"topk_idx = tensor of shape \[2\]: must be \[2, num_topk\]"),
    ({"topk_idx": torch.tensor([[0]])}, r"topk_idx = .*the shape must be \[2, 1\]"),
    ({"topk_idx": torch.tensor([[0, 1], [2, 3]]).T}, "topk_idx = non-contiguous"),
    ({"topk_idx": torch.tensor([[0, 4], [0, 1]])}, "4"),
    ({"num_max_dispatch_tokens_per_rank": 0}, "num_max_dispatch_tokens_per_rank = 0: must be an integer > 0"),
    ({"num_experts": "4"}, "num_experts = '4': must be an integer > 0"),
    ({"use_fp8": True, "use_ue8m0": True}, "use_ue8m0 = True: needs round_scale=True"),
    ({"async_finish": True, "return_recv_hook": True}, "async_finish = True, return_recv_hook = True: at most one"),
    ({"cumulative_local_expert_recv_stats": torch.zeros(4)}, "cumulative_local_expert_recv_stats = .*must be int32"),
    ({"cumulative_local_expert_recv_stats": torch.zeros(3).int()}, r"the shape must be \[4\]"),
    ({"dispatch_wait_recv_cost_stats": torch.zeros(1, 1).long()}, r"dispatch_wait_recv_cost_stats.*must be \[1\]"),
]


@pytest.mark.parametrize(("change", "text"), WRONG_DISPATCHES)
def test_wrong_dispatch(change: dict[str, Any], text: str) -> None:
    buffer = single()
    with pytest.raises(ew.InvalidArgumentError, match=text):
        buffer.low_latency_dispatch(**good_dispatch(**change))
    result = buffer.low_latency_dispatch(**good_dispatch())
    assert len(result) == 5
    assert result[1].tolist() == [1, 0, 1, 1]
    buffer.destroy()


def test_wrong_combine() -> None:
    buffer = single()
    call = good_dispatch()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(**call)
    good = {"x": rows, "topk_idx": call["topk_idx"], "topk_weights": torch.ones(2, 2), "handle": handle}
    wrong = [
        ({"x": rows[:2]}, r"x = .*the shape must be \[4, 3, 128\]"),
        ({"x": rows.float()}, "x = .*the dtype must be bfloat16"),
        ({"topk_idx": torch.zeros(3, 2).long()}, r"topk_idx = .*the shape must be \[2, 2\]"),
        ({"topk_idx": torch.zeros(2, 1).long()}, r"topk_idx = tensor of shape \[2, 1\]: num_topk was 2 at dispatch"),
        ({"topk_weights": torch.ones(2, 2).double()}, "topk_weights = .*the dtype must be float32"),
        ({"topk_weights": torch.ones(2, 2).T[:1]}, "topk_weights = .*shape"),
        ({"out": torch.ones(2, HIDDEN)}, "out = .*the dtype must be bfloat16"),
        ({"out": WIDE[:, ::2]}, "out = non-contiguous"),
        ({"handle": tuple(handle)}, "handle = tuple object: must be the very tuple"),
        ({"async_finish": True, "return_recv_hook": True}, "at most one"),
        ({"combine_wait_recv_cost_stats": torch.zeros(1)}, "combine_wait_recv_cost_stats = .*must be int64"),
    ]
    for change, text in wrong:
        with pytest.raises(ew.InvalidArgumentError, match=text):
            buffer.low_latency_combine(**{**good, **change})
    other = single()
    _, _, foreign, _, _ = other.low_latency_dispatch(**call)
    with pytest.raises(ew.HandleError, match="handle: belongs to another Buffer"):
        buffer.low_latency_combine(**{**good, "handle": foreign})
    combined, event, hook = buffer.low_latency_combine(**good)
    assert torch.equal(combined, call["x"] * torch.tensor([[2], [1]]).bfloat16())
    assert hook is None
    with pytest.raises(ew.InvalidArgumentError, match="event: there is nothing to wait for"):
        event.current_stream_wait()
    for _ in range(2):
        buffer.low_latency_dispatch(**call)
    with pytest.raises(ew.HandleError, match="stale"):
        buffer.low_latency_combine(**good)
    buffer.destroy()
    other.destroy()


def test_hooks_in_the_wrong_order_are_refused() -> None:
    buffer = single()
    call = good_dispatch(return_recv_hook=True)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(**call)
    combine = (rows, call["topk_idx"], torch.ones(2, 2), handle)
    with pytest.raises(ew.HandleError, match="received"):
        buffer.low_latency_combine(*combine)
    hook()
    combined, _, _ = buffer.low_latency_combine(*combine)
    assert torch.equal(combined, call["x"] * torch.tensor([[2], [1]]).bfloat16())
    hooks = [buffer.low_latency_dispatch(**call)[4] for _ in range(2)]
    with pytest.raises(ew.HandleError, match="received"):  # a third one would need a lane
        buffer.low_latency_dispatch(**call)
    hooks.pop(0)()
    buffer.low_latency_dispatch(**call)[4]()
    buffer.destroy()
    with pytest.raises(ew.InvalidArgumentError, match="closed"):
        hooks[0]()


def test_events() -> None:
    buffer = single()
    call = good_dispatch(async_finish=True)
    _, _, _, event, hook = buffer.low_latency_dispatch(**call)
    assert hook is None
    assert any(one is call["x"] for one in event.extra_tensors)
    with event:
        event.current_stream_wait()
    event.current_stream_wait(release_handle=True)
    assert event.extra_tensors is None
    with pytest.raises(ew.InvalidArgumentError, match="an earlier wait had release_handle=True"):
        event.current_stream_wait()
    deep_ep.Buffer.capture().current_stream_wait()
    with pytest.raises(ew.InvalidArgumentError, match="event = str object: must be None or an EventHandle"):
        deep_ep.EventOverlap("now")
    buffer.destroy()


def test_construction_and_destruction() -> None:
    (group,) = ew.local_group(1)
    with pytest.raises(ew.InvalidArgumentError, match="group, comm: exactly one of them must be given"):
        deep_ep.Buffer(None)
    with pytest.raises(ew.InvalidArgumentError, match="num_qps_per_rank = 0"):
        deep_ep.Buffer(group, num_qps_per_rank=0)
    with pytest.raises(ew.UnsupportedError, match="allow_nvlink_for_low_latency_mode = False"):
        deep_ep.Buffer(group, 0, 0, True, 1, False)
    with pytest.raises(ew.UnsupportedError, match="Buffer: is_intranode: this drop-in has no such arguments"):
        deep_ep.Buffer(group, is_intranode=True)
    buffer = deep_ep.Buffer(group, 1, 2, allow_mnnvl=True, use_fabric=True, explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (0, 1, 1, 2)
    with pytest.raises(ew.InvalidArgumentError, match="made with low_latency_mode=False"):
        buffer.low_latency_dispatch(**good_dispatch())
    buffer = single()
    rows, *_ = buffer.low_latency_dispatch(**good_dispatch())
    buffer.destroy()
    buffer.destroy()
    assert int(rows[3, 0, 1]) == 1
    with pytest.raises(ew.InvalidArgumentError, match="low_latency_dispatch: this Buffer has been destroyed"):
        buffer.low_latency_dispatch(**good_dispatch())


def test_what_is_left_out_refuses_by_name() -> None:
    buffer = single()
    call = good_dispatch()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(**call)
    combine = (rows, call["topk_idx"], torch.ones(2, 2), handle)
    with pytest.raises(ew.UnsupportedError, match="use_logfmt = True"):
        buffer.low_latency_combine(*combine, use_logfmt=True)
    with pytest.raises(ew.UnsupportedError, match="low_latency_combine: comp_signal, overlap: this drop-in"):
        buffer.low_latency_combine(*combine, overlap=True, comp_signal=None)
    with pytest.raises(ew.UnsupportedError, match="low_latency_dispatch: use_nvfp4"):
        buffer.low_latency_dispatch(**call, use_nvfp4=True)
    for name in ("dispatch", "combine", "get_dispatch_layout", "internode_dispatch", "internode_combine"):
        with pytest.raises(ew.UnsupportedError, match=f"Buffer.{name}: this version has no high-throughput mode"):
            getattr(buffer, name)(call["x"])
    for name in ("get_dispatch_config", "get_combine_config", "set_num_sms"):
        with pytest.raises(ew.UnsupportedError, match=f"Buffer.{name}"):
            getattr(deep_ep.Buffer, name)(8)
    with pytest.raises(ew.UnsupportedError, match="get_local_buffer_tensor"):
        buffer.get_local_buffer_tensor(torch.int8)
    with pytest.raises(ew.UnsupportedError, match="Config: it belongs to high-throughput mode"):
        deep_ep.Config(20, 6, 256)
    if not torch.cuda.is_available():
        with pytest.raises(ew.UnsupportedError, match="get_comm_stream: this machine has no CUDA device"):
            buffer.get_comm_stream()
    buffer.destroy()


def test_size_hint_and_clean() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert hint == 2 * 2 * 128 * 256 * 7168 * 2
    for wrong in ((0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        with pytest.raises(ew.InvalidArgumentError, match="must be an integer > 0"):
            deep_ep.Buffer.get_low_latency_rdma_size_hint(*wrong)
    buffer = single()
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    with pytest.raises(ew.InvalidArgumentError, match="hidden = 0"):
        buffer.clean_low_latency_buffer(MOST, 0, EXPERTS)
    buffer.destroy()


def survive(group: ew.Group, lost: int) -> tuple[list[int], list[int]] | None:
    """Lose a rank, which leaves, go on without it, and see it in the mask. Return the counts before and after."""
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    x, ids = torch.ones(1, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1, 2]])
    mask = torch.full((3,), 7, dtype=torch.int32)
    _, before, *_ = buffer.low_latency_dispatch(x, ids, 1, 3, use_fp8=False)
    before = before.tolist()
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [0, 0, 0]
    buffer.low_latency_clean_mask_buffer()
    if buffer.rank == lost:
        buffer.destroy()
        return None
    rows, after, handle, _, _ = buffer.low_latency_dispatch(x, ids, 1, 3, use_fp8=False)
    after = after.tolist()
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [int(rank == lost) for rank in range(3)]
    combined, _, _ = buffer.low_latency_combine(rows, ids, torch.ones(1, 3), handle)
    assert torch.equal(combined, 2 * x)
    buffer.low_latency_update_mask_buffer(lost, True)
    with pytest.raises(ew.UnsupportedError, match="is lost, and comes back by"):
        buffer.low_latency_update_mask_buffer(lost, False)
    with pytest.raises(ew.PeerLostError, match=rf"before ranks \({lost},\) were lost"):
        buffer.low_latency_dispatch(x, ids, 2, 3, use_fp8=False)
    buffer.low_latency_clean_mask_buffer()
    with pytest.raises(ew.HandleError, match="or by low_latency_clean_mask_buffer"):
        buffer.low_latency_combine(rows, ids, torch.ones(1, 3), handle)
    return before, after


def test_lost_ranks_are_masked() -> None:
    with ThreadPoolExecutor(3) as ranks:
        results = list(ranks.map(survive, ew.local_group(3), [1] * 3))
    assert results == [([3], [2]), None, ([3], [2])]


def test_mask_arguments() -> None:
    buffer, plain = single(enable_shrink=True), single()
    with pytest.raises(ew.InvalidArgumentError, match="made with enable_shrink=False"):
        plain.low_latency_query_mask_buffer(torch.zeros(1).int())
    with pytest.raises(ew.InvalidArgumentError, match=r"mask_status = .*the dtype must be int32"):
        buffer.low_latency_query_mask_buffer(torch.zeros(1))
    with pytest.raises(ew.InvalidArgumentError, match="rank_to_mask = 1: must be a rank, 0 to 0"):
        buffer.low_latency_update_mask_buffer(1)
    buffer.low_latency_update_mask_buffer(0, False)
    with pytest.raises(ew.UnsupportedError, match="the rank takes part"):
        buffer.low_latency_update_mask_buffer(0, True)
