"""Buffers and lifetimes: which memory comes out of a communicator, how long it lasts, and what is left behind."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from bits import assert_same_bits
from cases import Case
from driving import assert_received, exchange, expected, run_threads
from test_communicator import BF16, ids, rows, single


def test_buffers_are_those_of_the_lanes_in_turn() -> None:
    with single(max_in_flight=2) as comm:
        buffers = []
        for lane in (0, 1, 0):
            before = comm.get_dispatch_output_buffer()
            out, handle = comm.dispatch(rows(), ids())
            assert handle.lane == lane
            assert out.tokens is before
            assert comm.get_combine_input_buffer() is out.combine_input_buffer
            buffers.append(out.tokens)
        assert buffers[0] is buffers[2]
        assert not np.shares_memory(buffers[0], buffers[1])


def test_output_buffer_receives_the_tokens() -> None:
    with single() as comm:
        own = np.zeros((4, 3, 16), BF16)
        lane = comm.get_dispatch_output_buffer()
        lane[...] = 7
        out, handle = comm.dispatch(rows(), ids(), output_buffer=own)
        assert out.tokens is own
        assert_same_bits(own[0, :2], rows()[[0, 2]], "rows of expert 0")
        assert (lane == 7).all()
        assert out.layout.num_tokens_per_expert.tolist() == [2, 1, 1, 1]
        comm.combine(own, handle)
        own, _ = comm.dispatch(rows(), ids(), output_buffer=lane)
        assert own.tokens is lane


def test_outputs_outlive_the_communicator() -> None:
    comm = single(max_tokens_per_rank=300, hidden_size=1024)
    out, _ = comm.dispatch(rows(3, 1024), ids())
    tokens, counts = out.tokens, out.layout.num_tokens_per_expert
    comm.close()
    del out, comm
    gc.collect()
    assert counts.tolist() == [2, 1, 1, 1]
    assert_same_bits(tokens[0, :2], rows(3, 1024)[[0, 2]], "rows of expert 0")
    tokens[...] = 0


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * 4096


def test_memory_goes_with_the_last_array() -> None:
    comm = single(max_tokens_per_rank=4096, hidden_size=4096, num_experts=16)
    with_it = mapped_bytes()
    outputs = comm.memory_bytes().outputs
    assert outputs > 2**30
    counts = comm.dispatch(rows(1, 4096), ids(1))[0].layout.num_tokens_per_expert
    comm.close()
    del comm
    gc.collect()
    assert counts.sum() == 2
    del counts
    gc.collect()
    assert mapped_bytes() < with_it - outputs // 2


def test_nothing_is_left_open_by_many_communicators() -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    single().close()
    before = num_open()
    for _ in range(50):
        with single() as comm:
            comm.dispatch(rows(), ids())
    gc.collect()
    assert num_open() <= before


def test_several_communicators_share_a_group() -> None:
    cases = [Case(f"share-{hidden_size}", (2, 3), 4, hidden_size, 2, max_tokens=3) for hidden_size in (8, 24)]
    steps = [(case, step) for step in range(3) for case in cases]

    def rank_of(group: ew.Group) -> list[Any]:
        comms = {case: ew.MoECommunicator(group, case.config) for case in cases}
        results = [exchange(comms[case], case.inputs(step)[group.rank]) for case, step in steps]
        for comm in comms.values():
            comm.close()
        return results

    of_ranks = run_threads(rank_of, 2)
    for idx, (case, step) in enumerate(steps):
        got = [results[idx] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"{case.name} step {step}")


def test_a_communicator_is_not_pickled() -> None:
    with single() as comm, pytest.raises(TypeError):
        pickle.dumps(comm)


WAITING_AT_THE_END = """
import threading, time
import ml_dtypes, numpy as np
import expertwire as ew

def rank(group):
    comm = ew.MoECommunicator(group, num_experts=2, hidden_size=8, num_topk=1, max_tokens_per_rank=2, timeout_s=0.4)
    if group.rank == 0:
        comm.dispatch(np.zeros((1, 8), ml_dtypes.bfloat16), np.zeros((1, 1), np.int32))

for group in ew.local_group(2):
    threading.Thread(target=rank, args=(group,), daemon=True).start()
time.sleep(0.3)
"""


def test_the_interpreter_may_end_while_a_daemon_thread_waits() -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", WAITING_AT_THE_END], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
