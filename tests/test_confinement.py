"""Ranks whose process may do less: too little memory, too few descriptors, no privileges at all."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

import expertwire as ew
from cases import Case
from crew import AT_ONCE_S, Me, crew, maps_segments
from driving import Received, assert_received, exchange, expected
from losses import BASE, VICTIM, communicator

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
NOBODY = 65534


def _own_pages_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


LIMITS = {
    "RLIMIT_FSIZE": lambda: 4096,
    "RLIMIT_AS": lambda: _own_pages_bytes() + 65536,
    "RLIMIT_NOFILE": lambda: len(list(Path("/proc/self/fd").iterdir())) - 1,
}


def _limited(me: Me, case: Case, name: str) -> tuple[str, float, bool, Received]:
    """Construct under a limit that hits one rank, and once more without it."""
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    if me.group.rank == VICTIM:
        resource.setrlimit(kind, (LIMITS[name](), before[1]))
    start = time.monotonic()
    try:
        communicator(me.group, case)
        told = "made"
    except ew.Error as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    resource.setrlimit(kind, before)
    left = maps_segments()
    with communicator(me.group, case) as comm:
        return told, seconds, left, exchange(comm, case.inputs()[comm.rank])


@pytest.mark.parametrize("name", LIMITS)
def test_what_one_rank_cannot_have_is_told_on_all_and_leaves_nothing(name: str) -> None:
    case = replace(BASE, tokens=(3, 0, 2, 1), max_tokens=300, hidden_size=4096)
    with crew(_limited, 4, case, name) as ranks:
        results = [rank.result() for rank in ranks]
    for told, seconds, left, _ in results:
        assert told.startswith("BackendError"), told
        assert f"rank {VICTIM}" in told
        assert seconds < AT_ONCE_S
        assert not left
    assert_received([received for *_, received in results], expected(case.config, case.inputs()), "without the limit")


def _unprivileged(me: Me, case: Case) -> tuple[Received, int]:
    """Drop every capability and become nobody, whom no process of the same user may trace; then make a group."""
    inputs = case.inputs()  # what this imports may lie where nobody else may read
    ew.local_group(1)
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    capabilities = int(_status("CapEff"), 16)
    with communicator(me.another_group("unprivileged"), case) as comm:
        return exchange(comm, inputs[comm.rank]), capabilities


def _status(field: str) -> str:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(field))


def test_no_privileges_are_needed() -> None:
    with crew(_unprivileged, 4, BASE) as ranks:
        results = [rank.result() for rank in ranks]
    assert [capabilities for _, capabilities in results] == [0] * 4
    assert_received([received for received, _ in results], expected(BASE.config, BASE.inputs()))
