"""expertwire.spawn with real processes: results, failures, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import expertwire as ew


class PickyError(Exception):
    """An error whose constructor keeps it from being pickled as it is."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def share(group: ew.Group, *args: object) -> tuple[int, list[bytes], tuple[object, ...]]:
    return os.getpid(), group.all_gather(str(group.rank).encode()), args


def test_spawn_returns_results_by_rank() -> None:
    results = ew.spawn(share, 5, "a", [1, 2])
    assert len({pid for pid, _, _ in results} | {os.getpid()}) == 6
    assert [result[1:] for result in results] == [([b"0", b"1", b"2", b"3", b"4"], ("a", [1, 2]))] * 5


def large(group: ew.Group) -> np.ndarray:
    return np.full(5_000_000, group.rank)


def test_spawn_returns_large_results() -> None:
    results = ew.spawn(large, 3)
    assert [(len(result), result.min(), result.max()) for result in results] == [(5_000_000, i, i) for i in range(3)]


def test_spawn_with_threads_in_the_caller() -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            assert [len(results) for results in pool.map(lambda n: ew.spawn(share, n), (2, 3))] == [2, 3]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def fail_on_rank_1(group: ew.Group, how: str) -> None:
    if group.rank == 1:
        if how == "value":
            raise ValueError("rank one is out of sorts")
        if how == "refusal":
            raise PickyError("no", "way")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "status":
            os._exit(7)
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
    group.barrier()  # raises PeerLostError, which is not what the caller should hear of


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("value", ValueError, "rank one is out of sorts"),
        ("refusal", ew.Error, "PickyError: no way"),
        ("interrupt", ew.Error, "rank 1 raised KeyboardInterrupt"),
    ],
)
def test_spawn_raises_the_first_failure(how: str, kind: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        ew.spawn(fail_on_rank_1, 3, how)
    assert time.monotonic() - start < 20
    assert "rank 1:\nTraceback" in str(caught.value.__cause__)
    assert "in fail_on_rank_1" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("signal", "rank 1 was killed by SIGSEGV before it returned"),
        ("status", "rank 1 exited with status 7 before it returned"),
        ("exit", "rank 1 exited with status 3 before it returned"),
    ],
)
def test_spawn_says_how_a_rank_ended(how: str, text: str) -> None:
    with pytest.raises(ew.PeerLostError, match=text) as caught:
        ew.spawn(fail_on_rank_1, 3, how)
    assert (caught.value.ranks, caught.value.operation) == ((1,), "spawn")


def die_after_return(group: ew.Group) -> None:
    if group.rank == 0:
        import atexit
        from multiprocessing import util

        util.Finalize(None, os._exit, args=(9,), exitpriority=1)
        atexit.register(os._exit, 9)


def test_spawn_does_not_hide_a_crash_at_exit() -> None:
    with pytest.raises(ew.PeerLostError, match="rank 0 exited with status 9 after it returned"):
        ew.spawn(die_after_return, 2)


def note_and_sleep(group: ew.Group, folder: Path, failing_rank: int) -> None:
    (folder / str(group.rank)).write_text(str(os.getpid()))
    group.barrier()
    if group.rank == failing_rank:
        raise ValueError("enough")
    time.sleep(600)


def pids_in(folder: Path, count: int) -> list[int]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        texts = [path.read_text() for path in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "processes are left behind"
        time.sleep(0.02)


def test_spawn_kills_the_rest_after_a_failure(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="enough"):
        ew.spawn(note_and_sleep, 3, tmp_path, 1)
    assert time.monotonic() - start < 30
    assert not any(is_running(pid) for pid in pids_in(tmp_path, 3))


def test_spawn_gives_up_in_time(tmp_path: Path) -> None:
    with pytest.raises(ew.PeerLostError, match="ranks 0, 1 did not return within 3 s") as caught:
        ew.spawn(note_and_sleep, 2, tmp_path, -1, timeout_s=3)
    assert caught.value.ranks == (0, 1)
    assert not any(is_running(pid) for pid in pids_in(tmp_path, 2))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_spawn_leaves_nothing_behind_when_the_caller_ends(tmp_path: Path, how: signal.Signals) -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}\nimport test_spawn, pathlib, expertwire as ew\n"
    code += f"ew.spawn(test_spawn.note_and_sleep, 3, pathlib.Path({str(tmp_path)!r}), -1)"
    caller = subprocess.Popen([sys.executable, "-c", code], text=True, stderr=subprocess.PIPE)
    pids = pids_in(tmp_path, 3)
    caller.send_signal(how)
    _, errors = caller.communicate(timeout=30)
    assert caller.returncode != 0
    assert how is signal.SIGKILL or errors.rstrip().endswith("KeyboardInterrupt")
    assert_all_end(pids)


def kill_parent(group: ew.Group, folder: Path) -> None:
    (folder / str(group.rank)).write_text(str(os.getpid()))
    group.barrier()
    if group.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_spawn_survives_the_death_of_its_leader(tmp_path: Path) -> None:
    with pytest.raises(ew.BackendError, match="the process that starts the ranks ended early"):
        ew.spawn(kill_parent, 2, tmp_path)
    assert_all_end(pids_in(tmp_path, 2))


def unpicklable_result(group: ew.Group) -> object:
    return lambda: group


def test_spawn_needs_picklable_things() -> None:
    with pytest.raises(ew.InvalidArgumentError, match="fn and args must be picklable, and fn importable by name"):
        ew.spawn(lambda group: group.rank, 2)
    with pytest.raises(ew.Error, match="a result of type function is not picklable"):
        ew.spawn(unpicklable_result, 2)


def test_spawn_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import expertwire as ew\n"
        "def double(group, value):\n"
        "    return value * (group.rank + 1)\n"
        "if __name__ == '__main__':\n"
        "    print(ew.spawn(double, 3, 7))\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "[7, 14, 21]\n"
    assert run.stderr == ""


def test_spawn_arguments_out_of_range() -> None:
    with pytest.raises(ew.InvalidArgumentError, match="n = 0: must be at least 1"):
        ew.spawn(share, 0)
    with pytest.raises(ew.InvalidArgumentError, match="timeout_s = -1"):
        ew.spawn(share, 1, timeout_s=-1)
