"""The drop-in for DeepEP, with real ranks over Gloo: what the low-latency test of the original checks, and bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from driving import run_threads
from expertwire import reference
from expertwire.interop.torch_arrays import DTYPES

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
from expertwire.interop import deep_ep  # noqa: E402
from expertwire.interop.deep_ep import communicators  # noqa: E402

RANKS, MOST, HIDDEN, EXPERTS, TOPK = 3, 8, 512, 6, 3
LOCAL = EXPERTS // RANKS
FORMATS = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]
INT_MASK = 2**32 - 1


def over_gloo(group: ew.Group, store: str, part: Any, *args: Any) -> Any:
    """Run part(buffer, *args) on this rank, with a Buffer over a Gloo process group."""
    dist.init_process_group("gloo", store=dist.FileStore(store, group.size), rank=group.rank, world_size=group.size)
    try:
        bytes_needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, group.size, EXPERTS)
        buffer = deep_ep.Buffer(
            dist.group.WORLD, 0, bytes_needed, low_latency_mode=True, num_qps_per_rank=LOCAL, explicitly_destroy=True
        )
        result = part(buffer, *args)
        buffer.destroy()
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor as NumPy, whatever its dtype."""
    name = next(name for name, dtype in DTYPES.items() if dtype is tensor.dtype)
    if name in ("bfloat16", "float8_e4m3fn"):
        width = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8}[name]
        return tensor.contiguous().view(width).numpy().view(getattr(ml_dtypes, name)).copy()
    return np.asarray(tensor.contiguous().numpy().copy())


def routed(rank: int, seed: int, num_tokens: int) -> tuple[Any, Any]:
    """Return ids with holes, int64 [T, K], and weights float32 [T, K]."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.rand(num_tokens, EXPERTS, generator=source).topk(TOPK, dim=1).indices
    ids[torch.rand(ids.shape, generator=source) < 0.2] = -1
    return ids.to(deep_ep.topk_idx_t), torch.rand(num_tokens, TOPK, generator=source)


def marked_tokens(rank: int) -> Any:
    """Return rows that tell their rank (all but the last block) and their index (the last block)."""
    x = torch.full((MOST, HIDDEN), float(rank - 2), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(MOST, dtype=torch.bfloat16).view(-1, 1)
    return x


def random_tokens(rank: int) -> Any:
    return torch.randn(MOST, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16() * 0.1


def dequantised(rows: Any, scales: Any) -> Any:
    """Return BF16 rows of FP8 rows [..., H] and their scales."""
    if scales.dtype == torch.int32:  # four exponent bytes each
        scales = (scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).int() << 23).view(torch.float32)
    return (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).bfloat16()


def relative_difference(a: Any, b: Any) -> float:
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def finish(event: Any, hook: Any) -> None:
    """Wait as the caller of the original would."""
    event.current_stream_wait() if hook is None else hook()


def check_rows(buffer: Any, rows: Any, result: tuple[Any, ...], all_ids: Any, scales_are_exact: bool) -> None:
    """Check counts, ranges, source tokens and the marks of :func:`marked_tokens` of one dispatch."""
    _, counts, handle, _, _ = result
    source_tokens, layout_range, *sizes = handle
    assert sizes == [MOST, HIDDEN, EXPERTS]
    assert (source_tokens.dtype, layout_range.dtype, counts.dtype) == (torch.int32, torch.int64, torch.int32)
    for local in range(LOCAL):
        chosen = (all_ids == buffer.rank * LOCAL + local).sum(dim=(1, 2))
        firsts, lengths = layout_range[local] >> 32, layout_range[local] & INT_MASK
        assert lengths.tolist() == chosen.tolist()
        assert int(counts[local]) == int(chosen.sum())
        for peer, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
            of_peer = rows[local, first : first + length]
            tokens = source_tokens[local, first : first + length]
            assert tokens.tolist() == (all_ids[peer] == buffer.rank * LOCAL + local).any(1).nonzero().flatten().tolist()
            if scales_are_exact:
                assert (of_peer[:, :-128] == peer - 2).all()
                assert (of_peer[:, -128:] == tokens.view(-1, 1)).all()
            else:
                assert relative_difference(of_peer[:, -1], tokens) < 0.007


def the_checks_of_the_original(buffer: Any, with_hook: bool) -> int:
    """Dispatch once or twice, combine one handle twice with new weights, in every format. Return how many."""
    rank, num_done = buffer.rank, 0
    ids, weights = routed(rank, 7, MOST)
    all_ids = torch.stack([routed(peer, 7, MOST)[0] for peer in range(RANKS)])
    how = {"async_finish": not with_hook, "return_recv_hook": with_hook}
    for make in (marked_tokens, random_tokens):
        for form in FORMATS:
            num_done += 1
            x, exact = make(rank), not form.get("round_scale", False)
            for _ in range(1 + num_done % 2):
                stats = torch.zeros(LOCAL, dtype=torch.int32)
                waited = torch.zeros(RANKS, dtype=torch.int64)
                result = buffer.low_latency_dispatch(
                    x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=stats,
                    dispatch_wait_recv_cost_stats=waited, **form, **how,
                )  # fmt: skip
                finish(result[3], result[4])
            assert torch.equal(stats, result[1])
            assert (waited >= 0).all()
            rows, handle = result[0], result[2]
            if form["use_fp8"]:
                rows = dequantised(*rows)
            if make is marked_tokens:
                check_rows(buffer, rows, result, all_ids, exact)
            outs = []
            for zero_copy in (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
                out = torch.full((MOST, HIDDEN), float("nan"), dtype=torch.bfloat16)
                nothing = torch.full_like(rows, float("nan")) if zero_copy else rows
                combined, event, hook = buffer.low_latency_combine(
                    nothing, ids, weights, handle, zero_copy=zero_copy, out=out, **how
                )
                finish(event, hook)
                assert combined is out
                want = x * weights.masked_fill(ids == -1, 0).sum(1, keepdim=True)
                assert not combined.isnan().any()
                assert relative_difference(want, combined) < (9e-4 if form["use_fp8"] else 1e-5)
                outs.append(combined.clone())
            assert_same_bits(to_numpy(outs[0]), to_numpy(outs[1]), "zero_copy")
    return num_done


def bits_and_strides(buffer: Any) -> bool:
    """Hold every format against the reference, with other numbers of tokens on each rank."""
    for step, form in enumerate(FORMATS):
        counts = [(5 * step + 3 * rank) % (MOST + 1) for rank in range(RANKS)]
        inputs, given = [], []
        for rank, count in enumerate(counts):
            ids, weights = routed(rank, step, count)
            x = random_tokens(rank)[:count].contiguous()
            given.append((x, ids, weights))
            inputs.append(reference.RankInput(to_numpy(x), to_numpy(ids), to_numpy(weights)))
        x, ids, weights = given[buffer.rank]
        narrow = ids.int() if step % 2 else ids
        rows, num_rows, handle, _, _ = buffer.low_latency_dispatch(x, narrow, MOST, EXPERTS, **form)
        config = handle.dispatched.comm.config
        assert config.combine_mode is buffer.combine_mode
        want = reference.dispatch(config, inputs)
        mine = want[buffer.rank]
        if form["use_fp8"]:
            rows, scales = rows
            width = HIDDEN // (512 if form.get("use_ue8m0") else 128)
            assert scales.shape == (LOCAL, RANKS * MOST, width)
            assert scales.stride() == (width * RANKS * MOST, 1, RANKS * MOST)
        assert rows.is_contiguous()
        for local, count in enumerate(num_rows.tolist()):
            assert count == int(mine.layout.num_tokens_per_expert[local])
            assert_same_bits(to_numpy(rows[local, :count]), mine.tokens[local, :count], "rows")
            if form["use_fp8"]:
                assert_same_bits(to_numpy(scales[local, :count]), mine.quant.block_scales[local, :count], "scales")
        answers = [np.zeros(one.tokens.shape, ml_dtypes.bfloat16) for one in want]
        for rank, answer in enumerate(answers):
            plain = np.random.default_rng(rank).normal(size=answer.shape)
            answer[...] = plain.astype(ml_dtypes.bfloat16)
        summed = reference.combine(config, inputs, answers)[buffer.rank]
        mine_out = torch.from_numpy(answers[buffer.rank].view(np.int16)).view(torch.bfloat16)
        combined, event, _ = buffer.low_latency_combine(mine_out, narrow, weights, handle)
        assert event.event is None
        assert_same_bits(to_numpy(combined), summed, "combine")
    return True


def two_micro_batches(buffer: Any) -> bool:
    """Send both dispatches before either is received, and both combines, as an engine with two micro-batches does."""
    ids, weights = routed(buffer.rank, 3, MOST)
    tokens = [random_tokens(buffer.rank + 10 * batch) for batch in range(2)]
    how = {"use_fp8": False, "return_recv_hook": True}
    sent = [buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, **how) for x in tokens]
    results = []
    for rows, counts, handle, event, hook in sent:
        assert event.event is None
        hook()
        with pytest.raises(
            ew.InvalidArgumentError, match="hook: what this low_latency_dispatch sent has been received"
        ):
            hook()
        assert counts.tolist() == [int(length) for length in (handle[1] & INT_MASK).sum(1)]
        results.append(buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True))
    factors = weights.masked_fill(ids == -1, 0).sum(1, keepdim=True)
    for x, (combined, _, hook) in zip(tokens, results, strict=True):
        hook()
        assert relative_difference(x * factors, combined) < 1e-5
        with pytest.raises(ew.InvalidArgumentError, match="hook: what this low_latency_combine sent"):
            hook()
    return True


def shapes_change(buffer: Any) -> bool:
    """Use more shapes than a Buffer keeps: the oldest goes, its handles are stale, and it comes back when asked for."""
    first = last = None
    for most in range(1, communicators.MOST + 2):
        x, ids = torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([[0]])
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, RANKS, use_fp8=False)
        first, last = first or (rows, handle), handle
        assert counts.tolist() == [RANKS * (buffer.rank == 0)]
    assert first is not None
    weights = torch.ones(1, 1)
    for stale in (first[1],):
        with pytest.raises(ew.HandleError, match="handle: stale: the communicator of its shapes"):
            buffer.low_latency_combine(first[0], ids, weights, stale)
        with pytest.raises(ew.HandleError, match="handle: stale"):
            buffer.get_next_low_latency_combine_buffer(stale)
    assert torch.equal(buffer.low_latency_combine(rows, ids, weights, last)[0], x)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 1, RANKS, use_fp8=False)
    assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], x)
    return len(buffer._communicators._kept) == communicators.MOST


def all_parts(buffer: Any) -> tuple[Any, ...]:
    blocking, in_halves = the_checks_of_the_original(buffer, False), the_checks_of_the_original(buffer, True)
    return blocking, in_halves, bits_and_strides(buffer), two_micro_batches(buffer), shapes_change(buffer)


def test_with_ranks_over_gloo(tmp_path: Path) -> None:
    results = ew.spawn(over_gloo, RANKS, str(tmp_path / "store"), all_parts, timeout_s=100)
    assert results == [(2 * len(FORMATS), 2 * len(FORMATS), True, True, True)] * RANKS


class Summing(deep_ep.Buffer):
    """Sends one sum for each rank."""

    combine_mode = ew.CombineMode.RANK_LOCAL_REDUCE


def summing_parts(group: ew.Group) -> tuple[Any, ...]:
    buffer = Summing(group, low_latency_mode=True)
    done = (the_checks_of_the_original(buffer, True), bits_and_strides(buffer), two_micro_batches(buffer))
    buffer.destroy()
    return done


def test_one_sum_for_each_rank_has_the_bits_of_that_mode() -> None:
    assert run_threads(summing_parts, RANKS) == [(2 * len(FORMATS), True, True)] * RANKS


def test_elements_of_a_handle_are_there_until_its_lane_is_used_again() -> None:
    buffer = deep_ep.Buffer(ew.local_group(1)[0], low_latency_mode=True)
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    first, second, third = (
        buffer.low_latency_dispatch(x, torch.tensor(ids), 4, 3, use_fp8=False)[2]
        for ids in ([[0], [1]], [[2], [2]], [[1], [-1]])
    )
    assert len(second) == 5
    assert second[2:] == (4, 128, 3) == tuple(second)[2:]
    assert second[-1] == 3
    assert second[0][2, :2].tolist() == [0, 1]
    assert second[1].tolist() == [[0], [0], [2]]
    assert third[1].shape == (3, 1)
    assert third[1].tolist() == [[0], [1], [0]]
    for read in (lambda: first[0], lambda: first[1], lambda: list(first)):
        with pytest.raises(ew.HandleError, match="handle: stale: its lane has been used by a newer dispatch"):
            read()
    assert first[2] == 4
    with pytest.raises(IndexError):
        first[5]
    buffer.destroy()
    with pytest.raises(ew.HandleError, match="or its communicator closed"):
        third[0]
