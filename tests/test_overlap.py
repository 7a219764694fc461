"""overlap= of the calls: configurations, and combine that takes rows as a producer publishes them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import DIRECT, EXPERT_MAJOR, RANK_MAJOR, REDUCE, Case
from driving import (
    Received,
    assert_received,
    copy_output,
    dispatch,
    exchange,
    expected,
    expert_output,
    local_experts,
    poison,
    run_processes,
    run_threads,
)
from expertwire.reference import BF16
from test_communicator import ids, rows, single

CASE = Case("overlap", (7, 2, 6), num_experts=9, hidden_size=40, num_topk=3, max_tokens=7, weights="router")
WAYS = [
    replace(CASE, layout=layout, combine_mode=mode)
    for layout in (EXPERT_MAJOR, RANK_MAJOR)
    for mode in (REDUCE, DIRECT)
]
ALL_WAYS = pytest.mark.parametrize("case", WAYS, ids=lambda c: f"{c.layout.value}-{c.combine_mode.value}")


class Producer(threading.Thread):
    """Finishes blocks of expert rows one by one in random order. Until it does, they are poison."""

    def __init__(self, answer: np.ndarray, block: ew.BlockOverlapConfig, seed: int) -> None:
        super().__init__(daemon=True)
        self.rows = poison(np.empty_like(answer))
        self.answer, self.block = answer, block
        blocks = list(np.ndindex(*block.ready_signal.shape))
        np.random.default_rng(seed).shuffle(blocks)
        self.blocks = [tuple(int(at) for at in block) for block in blocks]

    def run(self) -> None:
        size = self.block.block_size_m
        for *expert, number in self.blocks:
            time.sleep(0.0005)
            where = (*expert, slice(number * size, (number + 1) * size))
            self.rows[where] = self.answer[where]
            self.block.ready_signal[(*expert, number)] = self.block.ready_value


def rank_with_a_producer(group: ew.Group, case: Case, num_rounds: int) -> list[Received]:
    results = []
    with ew.MoECommunicator(group, case.config) as comm:
        signal = None
        for step in range(num_rounds):
            given = case.inputs(step)[group.rank]
            out, handle = dispatch(comm, given)
            received = copy_output(out)
            answer = expert_output(case.config, received, local_experts(comm))
            # A value of its own for each step saves setting the words back.
            size = (1, 3, 4, 50)[(step + group.rank) % 4]
            fields = {"ready_value": step + 1} | ({} if signal is None or size != 3 else {"ready_signal": signal})
            overlap = comm.create_overlap_config("combine", handle=handle, level="block", block_size_m=size, **fields)
            assert overlap.block is not None
            signal = overlap.block.ready_signal if size == 3 else signal
            producer = Producer(answer, overlap.block, 10 * step + group.rank)
            producer.start()
            result = poison(np.empty((len(given.x), case.hidden_size), BF16))
            if step % 3 == 2:
                combined = comm.combine_async(producer.rows, handle, out=result, overlap=overlap).wait()
            else:
                combined = comm.combine(producer.rows, handle, out=result, overlap=overlap)
            results.append(Received(received, combined))
            producer.join()
    return results


@ALL_WAYS
def test_rows_are_taken_as_they_are_published(case: Case) -> None:
    of_ranks = run_threads(rank_with_a_producer, 3, case, 6)
    for step in range(6):
        assert_received([rows[step] for rows in of_ranks], expected(case.config, case.inputs(step)), f"step {step}")


def test_producers_of_processes() -> None:
    of_ranks = run_processes(rank_with_a_producer, 3, WAYS[0], 3)
    for step in range(3):
        got = [received[step] for received in of_ranks]
        assert_received(got, expected(CASE.config, CASE.inputs(step)), f"step {step}")


def rank_with_new_weights(group: ew.Group, case: Case) -> Received:
    with ew.MoECommunicator(group, case.config) as comm:
        given = case.inputs()[group.rank]
        out, handle = dispatch(comm, given)
        received = copy_output(out)
        overlap = comm.create_overlap_config("combine", level="block", block_size_m=2)
        assert overlap.block is not None
        producer = Producer(expert_output(case.config, received, local_experts(comm)), overlap.block, group.rank)
        producer.start()
        weights = None if group.rank == 1 else given.weights * np.float32(3)
        return Received(received, comm.combine(producer.rows, handle, weights=weights, overlap=overlap))


@pytest.mark.parametrize("case", WAYS[:2], ids=["reduce", "direct"])
def test_blocks_and_new_weights(case: Case) -> None:
    inputs = case.inputs()
    new = [None if rank == 1 else given.weights * np.float32(3) for rank, given in enumerate(inputs)]
    assert_received(run_threads(rank_with_new_weights, 3, case), expected(case.config, inputs, new))


def rank_whose_producer_stops(group: ew.Group) -> tuple[tuple[int, ...], str]:
    with ew.MoECommunicator(group, CASE.config, timeout_s=0.5) as comm:
        exchange(comm, CASE.inputs()[group.rank])
        out, handle = dispatch(comm, CASE.inputs()[group.rank])
        answer = expert_output(CASE.config, copy_output(out), local_experts(comm))
        overlap = comm.create_overlap_config("combine", level="block", block_size_m=2)
        assert overlap.block is not None
        if group.rank != 1:
            overlap.block.ready_signal[...] = 1
        with pytest.raises(ew.PeerLostError) as caught:
            comm.combine(answer, handle, overlap=overlap)
        return caught.value.ranks, str(caught.value)


def test_a_producer_that_stops_is_told() -> None:
    told = run_threads(rank_whose_producer_stops, 3)
    assert told[1][0] == (1,)
    assert "has waited for timeout_s for a block of ready_signal to be published" in told[1][1]
    assert told[0][0] == told[2][0] == (1,)


def test_operation_level_on_the_cpu() -> None:
    with single() as comm:
        overlap = comm.create_overlap_config("dispatch", num_comm_sms=8)
        assert overlap == ew.OverlapConfig(operation=ew.OperationOverlapConfig(num_comm_sms=8))
        out, handle = comm.dispatch(rows(), ids(), overlap=overlap)
        comm.combine_async(out.tokens, handle, overlap=overlap).wait()
        on_stream = ew.OverlapConfig(operation=ew.OperationOverlapConfig(stream=5))
        after_event = ew.OverlapConfig(operation=ew.OperationOverlapConfig(wait_event=5))
        with pytest.raises(ew.InvalidArgumentError, match="stream = 5: the CPU has no streams"):
            comm.dispatch(rows(), ids(), overlap=on_stream)
        with pytest.raises(ew.InvalidArgumentError, match=r"wait_event = 5: must be None on the CPU"):
            comm.combine(out.tokens, handle, overlap=after_event)
        with pytest.raises(ew.InvalidArgumentError, match=r"stream = 6: must be None: overlap.operation.stream"):
            comm.combine(out.tokens, handle, stream=6, overlap=on_stream)


def test_wrong_configurations_are_refused() -> None:
    operation = ew.OperationOverlapConfig()
    block = ew.BlockOverlapConfig(4, np.zeros((4, 1), np.int32))
    with pytest.raises(ew.InvalidArgumentError, match="overlap = both of operation and block"):
        ew.OverlapConfig(operation=operation, block=block)
    with pytest.raises(ew.InvalidArgumentError, match="overlap = neither of operation and block"):
        ew.OverlapConfig()
    with pytest.raises(ew.InvalidArgumentError, match=r"overlap.block = OperationOverlapConfig object"):
        ew.OverlapConfig(block=operation)  # type: ignore[arg-type]
    with single() as comm:
        with pytest.raises(ew.InvalidArgumentError, match='dispatch has level "op" only'):
            comm.create_overlap_config("dispatch", level="block")
        with pytest.raises(ew.InvalidArgumentError, match="dispatch takes one of the whole operation only"):
            comm.dispatch(rows(), ids(), overlap=ew.OverlapConfig(block=block))
        for wrong in ({"op": "reduce"}, {"op": "combine", "level": "row"}, {"op": "dispatch", "num_comm_sms": 0}):
            with pytest.raises(ew.InvalidArgumentError, match=f"{list(wrong)[-1]} = "):
                comm.create_overlap_config(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ew.HandleError, match="handle = int object"):
            comm.create_overlap_config("combine", handle=3)  # type: ignore[arg-type]
        with pytest.raises(ew.InvalidArgumentError, match="block_size_m = 0: must be >= 1"):
            comm.create_overlap_config("combine", level="block", block_size_m=0)
        with pytest.raises(ew.InvalidArgumentError, match="num_comm_sms = 0: must be None or >= 1"):
            comm.create_overlap_config("combine", level="block", num_comm_sms=0)
        out, handle = comm.dispatch(rows(), ids())
        wrong_signals: list[Any] = [np.zeros((4, 2), np.int32), np.zeros((4, 1), np.int64), None]
        for signal in wrong_signals:
            with pytest.raises(ew.InvalidArgumentError, match="ready_signal = "):
                comm.combine(out.tokens, handle, overlap=ew.OverlapConfig(block=replace(block, ready_signal=signal)))
        with pytest.raises(ew.InvalidArgumentError, match="num_comm_sms = True"):
            comm.combine(out.tokens, handle, overlap=ew.OverlapConfig(block=replace(block, num_comm_sms=True)))
        with pytest.raises(ew.InvalidArgumentError, match="overlap = int object"):
            comm.combine(out.tokens, handle, overlap=1)  # type: ignore[arg-type]
        comm.combine(out.tokens, handle)


def test_a_torch_signal() -> None:
    torch = pytest.importorskip("torch")
    with single() as comm:
        out, handle = comm.dispatch(torch.ones(3, 16, dtype=torch.bfloat16), torch.from_numpy(ids()))
        overlap = comm.create_overlap_config("combine", level="block", block_size_m=2, framework="torch")
        assert overlap.block is not None
        overlap.block.ready_signal.fill_(1)
        assert torch.equal(comm.combine(out.tokens, handle, overlap=overlap), comm.combine(out.tokens, handle))
