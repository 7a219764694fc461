"""Mistakes are refused where they are made, by name, before anything is sent; and the communicator stays usable."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import RANK_MAJOR
from conftest import num_cuda_devices
from driving import run_threads
from expertwire.types import DispatchDataType, QuantConfig
from losses import GRACE_S
from one_rank import BF16, FP8_QUANT, SHAPE, ids, rows, single

# The classes


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(ew.InvalidArgumentError, ValueError)
    assert issubclass(ew.UnsupportedError, NotImplementedError)
    assert issubclass(ew.PeerLostError, TimeoutError)
    for kind in (ew.InvalidArgumentError, ew.HandleError, ew.UnsupportedError, ew.PeerLostError, ew.BackendError):
        assert issubclass(kind, ew.Error)


# Construction


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": 0}, r"num_experts = 0: must be between 1 and"),
        ({"num_experts": -4}, r"num_experts = -4"),
        ({"hidden_size": 0}, r"hidden_size = 0"),
        ({"num_topk": 0}, r"num_topk = 0"),
        ({"num_topk": 5}, r"num_topk = 5: must be between 1 and min\(num_experts, 32\) = 4"),
        ({"num_topk": 33, "num_experts": 64}, r"num_topk = 33: must be between 1 and min\(num_experts, 32\) = 32"),
        ({"max_tokens_per_rank": 0}, r"max_tokens_per_rank = 0"),
        ({"max_tokens_per_rank": -1}, r"max_tokens_per_rank = -1"),
        ({"max_in_flight": 0}, r"max_in_flight = 0"),
        ({"timeout_s": 0}, r"timeout_s = 0"),
        ({"timeout_s": math.nan}, r"timeout_s = .*nan"),
        ({"timeout_s": math.inf}, r"timeout_s = .*inf"),
        ({"timeout_s": "10"}, r"timeout_s = '10': must be a number"),
        ({"hidden_size": 12}, r"hidden_size = 12: must be a multiple of 8 for BF16"),
        ({"hidden_size": 136, "quant": FP8_QUANT}, r"hidden_size = 136: must be a multiple of 128 for FP8_E4M3"),
        (
            {"hidden_size": 160, "quant": QuantConfig(DispatchDataType.MXFP8)},
            r"hidden_size = 160: must be a multiple of 128 for MXFP8 rows",
        ),
        ({"hidden_size": 128.0}, r"hidden_size = 128.0: must be an integer"),
        ({"hidden_size": True}, r"hidden_size = True: must be an integer"),
        ({"hidden_size": None}, r"hidden_size = None: must be an integer"),
        ({"num_experts": 2**40}, r"num_experts = 1099511627776: must be an integer of 32 bits"),
        ({"invalid_token_expert_id": 0}, r"invalid_token_expert_id = 0: must lie outside \[0, num_experts = 4\)"),
        ({"invalid_token_expert_id": 3}, r"invalid_token_expert_id = 3"),
        ({"experts_per_rank": [3]}, r"experts_per_rank = \[3\]: .* sum to num_experts = 4"),
        ({"experts_per_rank": [2, 2]}, r"experts_per_rank = \[2, 2\]: needs 1 counts"),
        ({"experts_per_rank": []}, r"experts_per_rank = \[\]"),
        ({"experts_per_rank": 4}, r"experts_per_rank = 4"),
        ({"experts_per_rank": ["4"]}, r"experts_per_rank = '4': must be an integer"),
        ({"num_blocks": 0}, r"num_blocks = 0: must be None, an integer >= 1"),
        ({"num_blocks": (4, 0)}, r"num_blocks = \(4, 0\)"),
        ({"num_blocks": (1, 2, 3)}, r"num_blocks = \(1, 2, 3\)"),
        ({"num_blocks": "2"}, r"num_blocks = '2'"),
        ({"validate": 1}, r"validate = 1: must be True or False"),
        ({"block_overlap": 1}, r"block_overlap = 1: must be True or False"),
        ({"device": "gpu"}, r"""device = 'gpu': must be None, "cpu", "cuda" or"""),
        ({"device": "cuda:x"}, r"device = 'cuda:x'"),
        ({"device": "cuda:"}, r"device = 'cuda:'"),
        ({"mode": "fast"}, r"""mode = 'fast': must be a MoEMode or one of "latency", "throughput"""),
        ({"output_layout": ew.CombineMode.DIRECT_SEND}, r"output_layout = <CombineMode.*must be a DispatchLayout"),
        ({"combine_mode": None}, r"combine_mode = None"),
        ({"on_peer_loss": "ignore"}, r"""on_peer_loss = 'ignore': .*"raise", "mask"""),
        ({"quant": "fp8"}, r"quant = 'fp8': must be a QuantConfig"),
        ({"quant": QuantConfig(format="int8")}, r"quant.format = 'int8'"),  # type: ignore[arg-type]
        ({"quant": QuantConfig(block_scales=np.ones(1))}, r"quant.block_scales: belongs to a dispatch call"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ew.InvalidArgumentError, match=words):
        single(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": ew.MoEMode.THROUGHPUT}, "mode = THROUGHPUT"),
        ({"output_layout": "token_major"}, "output_layout = TOKEN_MAJOR"),
    ],
)
def test_what_this_version_lacks_is_unsupported(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ew.UnsupportedError, match=words):
        single(**fields)


@pytest.mark.skipif(num_cuda_devices() > 0, reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_without_a_gpu_cuda_is_unsupported(device: str) -> None:
    with pytest.raises(ew.UnsupportedError, match="device = cuda: "):
        single(device=device)
    with pytest.raises(ew.UnsupportedError, match="device = cuda: "):
        ew.MoECommunicator(*ew.local_group(1, device=device), **SHAPE)


def test_group_and_config_must_be_what_they_are_called() -> None:
    with pytest.raises(ew.InvalidArgumentError, match=r"group = .*must be an expertwire.Group"):
        ew.MoECommunicator(ew.local_group(1), **SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ew.InvalidArgumentError, match=r"config = .*must be a MoECommunicatorConfig"):
        ew.MoECommunicator(*ew.local_group(1), SHAPE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_expert"):
        ew.MoECommunicator(*ew.local_group(1), **SHAPE, num_expert=1)


def _refusal_of_construction(group: ew.Group, of_ranks: list[dict[str, Any]]) -> str:
    with pytest.raises(ew.InvalidArgumentError) as caught:
        ew.MoECommunicator(group, **{**SHAPE, **of_ranks[group.rank]})
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"max_tokens_per_rank": 4}, "max_tokens_per_rank is 3 on ranks 0, 2; 4 on rank 1"),
        ({"hidden_size": 256}, "hidden_size is 128 on ranks 0, 2; 256 on rank 1"),
        ({"num_experts": 6}, "num_experts is .*6 on rank 1"),
        ({"num_topk": 1}, "num_topk is .*1 on rank 1"),
        ({"output_layout": RANK_MAJOR}, "output_layout is .*RANK_MAJOR on rank 1"),
        ({"combine_mode": "direct_send"}, "combine_mode is .*DIRECT_SEND on rank 1"),
        ({"quant": FP8_QUANT}, "quant.format is .*FP8_E4M3 on rank 1"),
        ({"max_in_flight": 2}, "max_in_flight is .*2 on rank 1"),
        ({"invalid_token_expert_id": -2}, "invalid_token_expert_id is .*-2 on rank 1"),
    ],
)
def test_every_rank_hears_which_field_differs(other: dict[str, Any], words: str) -> None:
    even = {"num_experts": 3}
    refusals = run_threads(_refusal_of_construction, 3, [even, {**even, **other}, even])
    for refusal in refusals:
        assert "different configurations" in refusal
        assert re.search(words, refusal), refusal


def test_a_mistake_of_one_rank_is_heard_by_all() -> None:
    even = {"num_experts": 3}
    refusals = run_threads(_refusal_of_construction, 3, [even, {**even, "num_topk": 9}, even])
    assert "num_topk = 9: must be between 1 and" in refusals[1]
    for refusal in (refusals[0], refusals[2]):
        assert "rank 1" in refusal or "on rank 1" in refusal


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": 5}, "num_experts = 5: is not divisible by the 2 ranks; give experts_per_rank"),
        ({"experts_per_rank": [4]}, r"experts_per_rank = \[4\]: needs 2 counts"),
        ({"experts_per_rank": [5, -1]}, r"experts_per_rank = \[5, -1\]"),
        ({"experts_per_rank": [2, 3]}, r"experts_per_rank = \[2, 3\]: .* sum to num_experts = 4"),
    ],
)
def test_experts_that_cannot_be_placed(fields: dict[str, Any], words: str) -> None:
    for refusal in run_threads(_refusal_of_construction, 2, [fields, fields]):
        assert re.search(words, refusal), refusal


def test_what_the_system_refuses_is_a_backend_error() -> None:
    huge = {"hidden_size": 2**20, "max_tokens_per_rank": 2**30, "output_layout": "rank_major"}
    with pytest.raises(ew.BackendError):
        single(**huge)


# Handles


def test_what_is_no_handle_is_refused() -> None:
    with single() as comm:
        out, _ = comm.dispatch(rows(), ids())
        for thing in (None, 0, "handle", out):
            with pytest.raises(ew.HandleError, match=r"handle = .* object: must be the handle that dispatch returned"):
                comm.combine(out.tokens, thing)
        with pytest.raises(TypeError):
            ew.DispatchHandle()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_stale_handles_are_refused(max_in_flight: int) -> None:
    with single(max_in_flight=max_in_flight) as comm:
        out, first = comm.dispatch(rows(), ids())
        for _ in range(max_in_flight - 1):
            comm.dispatch(rows(), ids())
            comm.combine(out.tokens, first)
        _, last = comm.dispatch(rows(), ids())
        with pytest.raises(ew.HandleError, match=f"stale.*max_in_flight = {max_in_flight}"):
            comm.combine(out.tokens, first)
        comm.combine(out.tokens, last)
        comm.combine(out.tokens, last)


def test_handles_of_another_communicator_are_refused() -> None:
    with single() as one, single() as other:
        out, mine = one.dispatch(rows(), ids())
        _, theirs = other.dispatch(rows(), ids())
        with pytest.raises(ew.HandleError, match="belongs to another communicator"):
            one.combine(out.tokens, theirs)
        one.combine(out.tokens, mine)


# One rank's mistake does not disturb the others


MISTAKES: list[Callable[[ew.MoECommunicator], Any]] = [
    lambda comm: comm.dispatch(rows(4), np.zeros((4, 2), int)),
    lambda comm: comm.dispatch(rows(), np.array([[0, 9], [1, 2], [1, 2]])),
    lambda comm: comm.dispatch(rows(), np.array([[0, 1], [1, 2], [2, 2]])),
    lambda comm: comm.dispatch(rows(), ids(), np.ones((3, 2))),
]


def test_peers_wait_for_the_corrected_call() -> None:
    def rank_of(group: ew.Group) -> np.ndarray:
        with ew.MoECommunicator(group, **SHAPE) as comm:
            for mistake in MISTAKES:
                if group.rank == 0:
                    with pytest.raises(ew.InvalidArgumentError):
                        mistake(comm)
                    time.sleep(0.02)
                out, handle = comm.dispatch(rows(), ids())
                if group.rank == 1:
                    with pytest.raises(ew.InvalidArgumentError):
                        comm.combine(out.tokens, handle, out=out.tokens[0])
                combined = comm.combine(out.tokens, handle)
            assert comm.stats().dispatch_calls == len(MISTAKES)
            return combined

    want = np.repeat(np.array([[2.0], [1.0], [2.0]]), 128, axis=1).astype(BF16)
    for combined in run_threads(rank_of, 2):
        assert_same_bits(combined, want, "combined")


# The end of a communicator, one's own or a peer's


def test_closed_communicators_refuse_everything() -> None:
    comm = single()
    out, handle = comm.dispatch(rows(), ids())
    comm.close()
    comm.close()
    for name, call in {
        "dispatch": lambda: comm.dispatch(rows(), ids()),
        "combine": lambda: comm.combine(out.tokens, handle),
        "get_dispatch_output_buffer": comm.get_dispatch_output_buffer,
        "get_combine_input_buffer": comm.get_combine_input_buffer,
        "stats": comm.stats,
        "memory_bytes": comm.memory_bytes,
        "check": comm.check,
        "lost_ranks": comm.lost_ranks,
    }.items():
        with pytest.raises(ew.InvalidArgumentError, match=f"{name}: this communicator is closed"):
            call()
    assert not comm.is_available
    assert comm.config.num_topk == 2
    assert (comm.rank, comm.num_ranks) == (0, 1)


def test_combines_of_different_lanes_never_meet() -> None:
    timeout_s = 0.5

    def rank_of(group: ew.Group) -> str:
        with ew.MoECommunicator(group, **SHAPE, max_in_flight=2, timeout_s=timeout_s) as comm:
            dispatched = [comm.dispatch(rows(), ids()) for _ in range(2)]
            out, handle = dispatched[group.rank]
            start = time.monotonic()
            with pytest.raises(ew.PeerLostError) as caught:
                comm.combine(out.tokens, handle)
            assert time.monotonic() - start <= timeout_s + GRACE_S
            return caught.value.operation

    assert run_threads(rank_of, 2) == ["combine"] * 2


@pytest.mark.parametrize("way", ["closes", "stays away"])
def test_a_lost_peer_is_named(way: str) -> None:
    waited = threading.Event()

    def rank_of(group: ew.Group) -> ew.PeerLostError | None:
        timeout_s = 0.3 if way == "stays away" else 30.0
        comm = ew.MoECommunicator(group, **SHAPE, timeout_s=timeout_s)
        comm.dispatch(rows(), ids())
        if group.rank == 1:
            if way == "stays away":
                waited.wait(30)
            comm.close()
            return None
        start = time.monotonic()
        with pytest.raises(ew.PeerLostError) as caught:
            comm.dispatch(rows(), ids())
        assert time.monotonic() - start <= (timeout_s if way == "stays away" else 0) + GRACE_S
        waited.set()
        assert not comm.is_available
        assert "lost a rank" in repr(comm)
        assert comm.lost_ranks() == (1,)
        for call in (lambda: comm.dispatch(rows(), ids()), comm.check):
            with pytest.raises(ew.PeerLostError, match="1"):
                call()
        comm.close()
        return caught.value

    error = run_threads(rank_of, 2)[0]
    assert error.ranks == (1,)
    assert error.operation == "dispatch"
    assert error.epoch == 2
    assert "rank 1" in str(error)


def test_a_masked_peer_is_gone_and_the_rest_goes_on() -> None:
    def rank_of(group: ew.Group) -> None:
        with ew.MoECommunicator(group, **SHAPE, on_peer_loss="mask") as comm:
            if group.rank == 1:
                return
            for _ in range(2):
                out, handle = comm.dispatch(rows(), ids())
                assert out.layout.num_tokens_per_expert.tolist() == [2, 1]  # its own rows for experts 0 and 1
                one_each = np.array([[1.0], [0.0], [2.0]]) * np.ones(128)
                assert_same_bits(comm.combine(out.tokens, handle), one_each.astype(BF16), "combined")
            assert comm.lost_ranks() == (1,)
            assert comm.is_available

    run_threads(rank_of, 2)
