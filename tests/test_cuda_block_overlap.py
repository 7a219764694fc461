"""overlap.block on CUDA: combine takes expert rows as a kernel beside it publishes them, in any order."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import DIRECT, EXPERT_MAJOR, RANK_MAJOR, REDUCE, Case, way_name
from cuda_driving import (
    EVERY_WAY,
    Place,
    capture,
    communicator,
    dispatch,
    exchange,
    poison,
    run_virtual,
    share,
    to_device,
    to_host,
)
from cuda_producer import Params, Producer
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
CASE = Case("overlap-block", (40, 25), 9, 512, 3, experts_per_rank=(5, 4), max_in_flight=2, weights="router")
#: More tokens than the kernels for few take.
MANY = Case("overlap-block-many", (200, 150), 16, 1024, 4, weights="router")
SIZES = (16, 1, 7, 1000)
NUM_STEPS = 8


def _of_way(case: Case, way: tuple, **fields: Any) -> Case:
    return replace(case, name=f"{case.name}-{way_name(*way)}", layout=way[0], combine_mode=way[1], **fields)


def _with_producer(place: Place, barrier: threading.Barrier) -> Producer:
    """Load a producer on all ranks, before any kernel waits for another rank."""
    made = Producer(place.device)
    barrier.wait()
    return made


def _config(comm: ew.MoECommunicator, size: int, value: int, **fields: Any) -> ew.OverlapConfig:
    """Return a configuration whose words are zeros, written by a copy: no kernel of torch's is launched."""
    words = -(-comm.num_ranks * comm.config.max_tokens_per_rank // size)
    shape = (comm.num_local_experts, words) if comm.config.output_layout is EXPERT_MAJOR else (words,)
    signal = to_device(np.zeros(shape, np.int32), str(comm.config.device))
    return comm.create_overlap_config(
        "combine", level="block", block_size_m=size, ready_signal=signal, ready_value=value, **fields
    )


def _rank_with_a_producer(
    group: ew.Group, place: Place, case: Case, fields: dict[str, Any], barrier: threading.Barrier
) -> list[Received]:
    """Combine rows that are poison until they are published; every other time combine is there before the producer."""
    results = []
    with communicator(group, case, place, two_phase=True, block_overlap=True, **fields) as comm:
        producer = _with_producer(place, barrier)
        overlaps: dict[int, ew.OverlapConfig] = {}
        for step in range(NUM_STEPS):
            given = case.inputs(step)[group.rank]
            out, handle = dispatch(comm, given)
            received = copy_output(out, to_host)
            answer = expert_output(case.config, received, local_experts(comm))
            rows = poison(torch.empty(answer.shape, dtype=torch.bfloat16, device=place.device))
            # The second time around the words are those of the first, which are not set back.
            size, parts = SIZES[step % len(SIZES)], 1 + step % 2
            sms = (None, 1, 3, 1000)[(step + group.rank) % 4]
            overlap = overlaps.get(size)
            if overlap is None:
                overlap = _config(comm, size, parts, num_comm_sms=sms)
            else:
                assert overlap.block is not None
                block = replace(overlap.block, ready_value=overlap.block.ready_value + parts, num_comm_sms=sms)
                overlap = ew.OverlapConfig(block=block)
            overlaps[size] = overlap
            assert overlap.block is not None
            work = producer.prepare(answer, rows, overlap.block, 10 * step + group.rank, parts)
            result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))
            torch.cuda.current_stream().synchronize()
            if step % 4 < 2:
                producer.start(work)
            if step % 3 == 2:
                request = comm.combine_async(rows, handle, out=result, overlap=overlap)
            else:
                request = None
                comm.combine(rows, handle, out=result, overlap=overlap)
            if step % 4 >= 2:
                producer.start(work)
            if request is not None:
                request.wait()
            results.append(Received(received, to_host(result)))
            producer.stream.synchronize()
            comm.check()
    return results


@pytest.mark.parametrize("policy", ["raise", "mask"])
@pytest.mark.parametrize("case", [CASE, MANY], ids=["few", "many"])
@EVERY_WAY
def test_rows_are_taken_as_they_are_published(way: tuple, case: Case, policy: str) -> None:
    case = _of_way(case, way)
    barrier = threading.Barrier(2, timeout=60)
    of_ranks = run_virtual(_rank_with_a_producer, share(2), case, {"on_peer_loss": policy}, barrier)
    for step in range(NUM_STEPS):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _rank_with_new_weights(group: ew.Group, place: Place, case: Case, barrier: threading.Barrier) -> Received:
    """Combine by blocks with weights in place of those of dispatch on one rank only, which has sums made twice."""
    with communicator(group, case, place, block_overlap=True) as comm:
        producer = _with_producer(place, barrier)
        given = case.inputs()[group.rank]
        out, handle = dispatch(comm, given)
        received = copy_output(out, to_host)
        answer = expert_output(case.config, received, local_experts(comm))
        rows = poison(torch.empty(answer.shape, dtype=torch.bfloat16, device=place.device))
        overlap = _config(comm, 4, 1)
        assert overlap.block is not None
        work = producer.prepare(answer, rows, overlap.block, group.rank)
        weights = None if group.rank else to_device(given.weights * np.float32(3), place.device)
        result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))
        torch.cuda.current_stream().synchronize()
        producer.start(work)
        comm.combine(rows, handle, weights=weights, out=result, overlap=overlap)
        combined = to_host(result)
        producer.stream.synchronize()
        return Received(received, combined)


@pytest.mark.parametrize("mode", [REDUCE, DIRECT], ids=["reduce", "direct"])
def test_blocks_and_new_weights(mode: Any) -> None:
    case = _of_way(CASE, (EXPERT_MAJOR, mode))
    case = replace(case, name=f"{case.name}-weights")
    inputs = case.inputs()
    new = [inputs[0].weights * np.float32(3), None]
    of_ranks = run_virtual(_rank_with_new_weights, share(2), case, threading.Barrier(2, timeout=60))
    assert_received(of_ranks, expected(case.config, inputs, new))


def _rank_that_mixes(group: ew.Group, place: Place, case: Case) -> list[Received]:
    """Take turns: one rank combines by blocks that are published already, the other as ever."""
    results = []
    with communicator(group, case, place, block_overlap=group.rank == 0) as comm:
        for step in range(4):
            given = case.inputs(step)[group.rank]
            if group.rank or step % 2:
                results.append(exchange(comm, given))
                continue
            out, handle = dispatch(comm, given)
            received = copy_output(out, to_host)
            answer = to_device(expert_output(case.config, received, local_experts(comm)), place.device)
            overlap = _config(comm, 8, 0)  # zeros are what it waits for
            result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))
            results.append(Received(received, to_host(comm.combine(answer, handle, out=result, overlap=overlap))))
    return results


@EVERY_WAY
def test_others_need_not_combine_by_blocks(way: tuple) -> None:
    case = _of_way(CASE, way)
    case = replace(case, name=f"{case.name}-mixed")
    of_ranks = run_virtual(_rank_that_mixes, share(2), case)
    for step in range(4):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _replay(
    group: ew.Group, place: Place, case: Case, barrier: threading.Barrier, lock: threading.Lock
) -> list[Received]:
    """Capture a combine by blocks, and replay it over rows that a producer outside of the graph publishes."""
    with communicator(group, case, place, block_overlap=True) as comm:
        producer = _with_producer(place, barrier)
        given = case.inputs()[group.rank]
        out, handle = dispatch(comm, given)
        received = copy_output(out, to_host)
        answer = expert_output(case.config, received, local_experts(comm))
        rows = poison(torch.empty(answer.shape, dtype=torch.bfloat16, device=place.device))
        overlap = _config(comm, 4, 1)
        assert overlap.block is not None
        signal = overlap.block.ready_signal
        work = producer.prepare(answer, rows, overlap.block, group.rank)
        result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))

        def calls() -> None:
            comm.combine(rows, handle, out=result, overlap=overlap)

        graph = capture(calls, barrier, lock)
        results = []
        for _ in range(3):
            poison(rows)
            poison(result)
            signal.copy_(torch.zeros(signal.shape, dtype=torch.int32))
            torch.cuda.current_stream().synchronize()
            producer.start(work)
            graph.replay()
            results.append(Received(received, to_host(result)))
            producer.stream.synchronize()
            barrier.wait()
        return results


@EVERY_WAY
def test_a_captured_combine(way: tuple) -> None:
    case = _of_way(CASE, way)
    case = replace(case, name=f"{case.name}-graph")
    of_ranks = run_virtual(_replay, share(2), case, threading.Barrier(2, timeout=60), threading.Lock())
    for replay in range(3):
        got = [results[replay] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs()), f"replay {replay}")


def _missing_word(case: Case, overlap: ew.OverlapConfig, received: Any) -> int:
    """Return the word of the second block of the rows of rank 0, of one expert if need be."""
    assert overlap.block is not None
    size = overlap.block.block_size_m
    if case.layout is RANK_MAJOR:
        assert received.layout.num_tokens_per_rank[0] > size
        return 1
    counts = received.layout.rank_ranges[:, 0, 1]
    expert = int(np.argmax(counts))
    assert counts[expert] > size
    return expert * int(overlap.block.ready_signal.shape[1]) + 1


def _stop(group: ew.Group, place: Place, case: Case, policy: str, barrier: threading.Barrier) -> tuple[Any, ...]:
    """Be rank 1, whose producer leaves out one block, or the other, which waits for its rows."""
    with communicator(group, case, place, block_overlap=True, timeout_s=1.0, on_peer_loss=policy) as comm:
        producer = _with_producer(place, barrier)
        given = case.inputs()[group.rank]
        exchange(comm, given)
        out, handle = dispatch(comm, given)
        received = copy_output(out, to_host)
        answer = expert_output(case.config, received, local_experts(comm))
        rows = poison(torch.empty(answer.shape, dtype=torch.bfloat16, device=place.device))
        overlap = _config(comm, 4, 1)
        assert overlap.block is not None
        missing = _missing_word(case, overlap, received) if group.rank else -1
        work: Params = producer.prepare(answer, rows, overlap.block, group.rank, but=missing)
        result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))
        torch.cuda.current_stream().synchronize()
        producer.start(work)
        comm.combine(rows, handle, out=result, overlap=overlap)
        combined = to_host(result)
        producer.stream.synchronize()
        told: tuple[Any, ...] = ((), "")
        try:
            comm.check()
        except ew.PeerLostError as error:
            told = error.ranks, str(error)
            with pytest.raises(ew.PeerLostError):
                dispatch(comm, given)
        lost = comm.lost_ranks()
        barrier.wait()  # its memory stays until nobody stores into it
        return (*told, lost, missing, np.isnan(combined.astype(np.float32)).all())


@pytest.mark.parametrize("policy", ["raise", "mask"])
@EVERY_WAY
def test_a_producer_that_stops_is_told(way: tuple, policy: str) -> None:
    case = _of_way(CASE, way)
    case = replace(case, name=f"{case.name}-stops", tokens=(40, 40), max_tokens=40)
    other, late = run_virtual(_stop, share(2), case, policy, threading.Barrier(2, timeout=60))
    ranks, text, lost, missing, is_nan = late
    assert ranks == lost == (1,)
    assert is_nan
    assert "this rank (1) has waited in vain for the block of expert_output with row " in text
    row = int(text.split(" with row ")[1].split()[0])
    words_of_group = -(-2 * 40 // 4)
    assert row // 4 == missing % words_of_group
    if way[0] is EXPERT_MAJOR:
        assert f"with row {row} of local expert {missing // words_of_group} to be published" in text
    assert "its word of ready_signal, 0, did not become ready_value within timeout_s = 1" in text
    assert other[2] == (1,)
    if policy == "raise":
        assert other[0] == (1,)
        assert "rank 1 did not arrive" in other[1]
        assert other[4]


def _refuse(group: ew.Group, place: Place) -> None:
    case = replace(CASE, name="overlap-block-refused", tokens=(5,), experts_per_rank=None)
    given = case.inputs()[0]
    with communicator(group, case, place) as comm:
        out, handle = dispatch(comm, given)
        signal = to_device(np.zeros((9, 1), np.int32), place.device)
        with pytest.raises(ew.UnsupportedError, match=r'level = "block": on CUDA only .* block_overlap=True'):
            comm.create_overlap_config("combine", level="block", ready_signal=signal)
        by_hand = ew.OverlapConfig(block=ew.BlockOverlapConfig(64, signal))
        with pytest.raises(ew.UnsupportedError, match=r"overlap.block: on CUDA only .* block_overlap=True"):
            comm.combine(out.combine_input_buffer, handle, overlap=by_hand)
        comm.combine(out.combine_input_buffer, handle)
    with communicator(group, case, place, block_overlap=True) as comm:
        out, handle = dispatch(comm, given)
        for wrong in (torch.zeros((9, 1), dtype=torch.int32), to_device(np.zeros((9, 2), np.int32), place.device)):
            by_hand = ew.OverlapConfig(block=ew.BlockOverlapConfig(64, wrong))
            with pytest.raises(ew.InvalidArgumentError, match="ready_signal = "):
                comm.combine(out.combine_input_buffer, handle, overlap=by_hand)
        with pytest.raises(ew.InvalidArgumentError, match="num_comm_sms = 0"):
            comm.create_overlap_config("combine", level="block", ready_signal=signal, num_comm_sms=0)
        with pytest.raises(ew.InvalidArgumentError, match="block_size_m = 0"):
            comm.create_overlap_config("combine", level="block", block_size_m=0)
        with pytest.raises(ew.InvalidArgumentError, match="dispatch takes one of the whole operation only"):
            comm.dispatch(
                to_device(given.x, place.device),
                to_device(given.topk_ids, place.device),
                overlap=ew.OverlapConfig(block=ew.BlockOverlapConfig(64, signal)),
            )
        made = comm.create_overlap_config("combine", level="block", block_size_m=2)
        assert made.block is not None
        assert made.block.ready_signal.device == torch.device(place.device)
        assert not to_host(made.block.ready_signal).any()
        comm.combine(out.combine_input_buffer, handle, overlap=replace(made, block=replace(made.block, ready_value=0)))
        torch.cuda.current_stream().synchronize()
        comm.check()


def test_wrong_configurations_are_refused() -> None:
    run_virtual(_refuse, share(1))


def test_the_example_gives_the_same_bits(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    if request.config.getoption("list_kernels", None) is not None:
        pytest.skip("compiles its kernels as it runs")
    command = [sys.executable, str(ROOT / "examples" / "block_overlap.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == 3
