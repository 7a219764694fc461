"""Groups with real threads and processes: every source of ranks, and everything that goes wrong at set-up."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew
from expertwire import _core, env
from launching import finish, mpirun, plain_environment, start, start_together, torchrun
from losses import GRACE_S


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def replace(**variables: object) -> None:
        wanted = plain_environment(**variables)
        for name in os.environ.keys() - wanted.keys():
            monkeypatch.delenv(name)
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)
        env.launcher.cache_clear()
        env.rendezvous.cache_clear()

    monkeypatch.setattr(env, "launcher", functools.cache(env.launcher.__wrapped__))
    monkeypatch.setattr(env, "rendezvous", functools.cache(env.rendezvous.__wrapped__))
    return replace


EXCHANGE = """
import expertwire as ew
for call in range(3):
    group = ew.Group.from_env(timeout_s=30)
    print(group.rank, group.size, group.device, group.all_gather(bytes([group.rank]) * call))
"""
EXCHANGED = [[b"", b"", b""], [b"\0", b"\1", b"\2"], [b"\0\0", b"\1\1", b"\2\2"]]


def exchanged(rank: int) -> str:
    return "\n".join(f"{rank} 3 cpu {gathered}" for gathered in EXCHANGED)


@pytest.mark.parametrize(
    "variables",
    [
        lambda rank: {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": 29512},
        lambda rank: {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 3,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 3,
            "PMIX_NAMESPACE": f"test-{os.getpid()}",
        },
        lambda rank: {"PMI_RANK": rank, "PMI_SIZE": 3, "EXPERTWIRE_RENDEZVOUS": f"test-{os.getpid()}" + "x" * 100},
        lambda rank: {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": 3,
            "SLURM_JOB_ID": os.getpid(),
            "SLURM_STEP_ID": 0,
            "SLURM_STEP_NUM_NODES": 1,
        },
    ],
    ids=["torchrun", "mpirun", "hydra", "srun"],
)
def test_from_env_meets_several_times(variables: Callable[[int], dict[str, object]]) -> None:
    outputs = finish([start(EXCHANGE, plain_environment(**variables(rank))) for rank in range(3)])
    assert outputs == [exchanged(rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, r"RANK and WORLD_SIZE .* OMPI_COMM_WORLD_RANK .* PMI_RANK .* SLURM_STEP_ID"),
        ({"RANK": 0}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": 2}, "RANK is not set"),
        ({"RANK": 2, "WORLD_SIZE": 2, "MASTER_PORT": 1}, "RANK = 2: must be below the number of ranks, 2"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK = 'one': must be a whole number of at least 0"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        ({"PMI_RANK": 0}, "PMI_SIZE is not set"),
        ({"SLURM_STEP_ID": 0, "SLURM_NTASKS": 2}, "SLURM_PROCID is not set"),
    ],
)
def test_from_env_says_what_it_looked_for(
    set_environment: Callable[..., None], variables: dict[str, object], text: str
) -> None:
    set_environment(**variables)
    with pytest.raises(ew.InvalidArgumentError, match=text):
        ew.Group.from_env()


def test_from_env_can_be_repeated_after_an_error(set_environment: Callable[..., None]) -> None:
    set_environment(RANK=0)
    with pytest.raises(ew.InvalidArgumentError):
        ew.Group.from_env()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="29500")
    assert ew.Group.from_env().size == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1},
        {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "PMIX_NAMESPACE": "a"},
        {"PMI_RANK": 0, "PMI_SIZE": 4, "MPI_LOCALNRANKS": 2},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": 2},
    ],
)
def test_from_env_knows_one_host(set_environment: Callable[..., None], variables: dict[str, object]) -> None:
    set_environment(**variables)
    with pytest.raises(ew.UnsupportedError, match=r"several hosts.*from_torch or Group.from_mpi"):
        ew.Group.from_env()


def test_the_innermost_launcher_wins(set_environment: Callable[..., None]) -> None:
    slurm = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0}
    hydra = {"PMI_RANK": 1, "PMI_SIZE": 2}
    set_environment(**slurm)
    assert env.launcher().name == "srun"
    set_environment(**slurm, **hydra)
    assert env.launcher().name == "hydra"
    set_environment(**slurm, PMI_RANK=0, PMI_SIZE=1)
    assert env.launcher().name == "srun"  # its PMI
    set_environment(**slurm, **hydra, RANK=0, WORLD_SIZE=1)
    assert env.launcher().name == "torchrun"


ONE_ERROR = """
import expertwire as ew, time
ew.Group
print("ready", flush=True)
input()
start = time.monotonic()
try:
    group = ew.Group.from_env(timeout_s={timeout_s})
    {then}
except ew.Error as error:
    print(type(error).__name__, getattr(error, "ranks", ()), error)
assert time.monotonic() - start < {at_most}
"""


def failing(then: str = "", timeout_s: float = 30.0, at_most: float = 10.0) -> str:
    return ONE_ERROR.format(then=then, timeout_s=timeout_s, at_most=at_most)


def test_missing_ranks_are_named(request: pytest.FixtureRequest) -> None:
    job = f"{request.node.name}-{os.getpid()}"
    code = failing(timeout_s=1.0, at_most=1.0 + GRACE_S)
    outputs = finish(start_together(code, [torchrun(rank, 4, job) for rank in (0, 1)]))
    for output in outputs:
        assert output.startswith("PeerLostError (2, 3) ranks 2, 3 did not arrive within 1 s at rendezvous key ")
        assert job in output


@pytest.mark.parametrize("ranks", [(0, 1, 0), (0, 1, 1)])
def test_two_jobs_with_one_key_fail(request: pytest.FixtureRequest, ranks: tuple[int, ...]) -> None:
    job = f"{request.node.name}-{os.getpid()}"
    # Three ranks make the group, so that it cannot be complete before the second job comes.
    outputs = finish(start_together(failing(), [torchrun(rank, 3, job) for rank in ranks]))
    for output in outputs:
        assert output.startswith("InvalidArgumentError () rank = ")
        assert "two jobs at a time need different keys" in output


def test_jobs_of_different_size_with_one_key_fail(request: pytest.FixtureRequest) -> None:
    job = f"{request.node.name}-{os.getpid()}"
    outputs = finish(start_together(failing(), [torchrun(rank, 3 + (rank == 2), job) for rank in range(3)]))
    for output in outputs:
        assert output.startswith("InvalidArgumentError () size = 4 (process ")


@pytest.mark.parametrize("victim", [0, 1])
def test_death_at_set_up_is_told_at_once(request: pytest.FixtureRequest, victim: int) -> None:
    job = f"{request.node.name}-{os.getpid()}"
    die = (
        "group.barrier(); import os, signal; group.rank == {} and os.kill(os.getpid(), signal.SIGKILL); group.barrier()"
    )
    processes = start_together(failing(die.format(victim)), [torchrun(rank, 3, job) for rank in range(3)])
    dead = processes.pop(victim)
    for output in finish(processes):
        assert output.startswith(f"PeerLostError ({victim},) rank {victim} (process {dead.pid}) exited or closed")
    dead.communicate(timeout=60)
    assert dead.returncode == -signal.SIGKILL


def test_local_group() -> None:
    groups = ew.local_group(5, timeout_s=30.0)

    def run(group: ew.Group) -> list[bytes]:
        group.barrier()
        return group.all_gather(b"x" * group.rank)

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(run, groups)) == [[b"x" * rank for rank in range(5)]] * 5
    assert [(group.rank, group.size, group.device) for group in groups] == [(rank, 5, "cpu") for rank in range(5)]


def test_local_group_bounds_its_waits() -> None:
    group, *_others = ew.local_group(3, timeout_s=0.1)
    with pytest.raises(ew.PeerLostError, match=r"ranks 1, 2 did not take part in set-up within 0\.1 s") as caught:
        group.barrier()
    assert (caught.value.ranks, caught.value.operation) == ((1, 2), "construct")


def test_arguments_out_of_range() -> None:
    for size in (0, -1, 1025, 2**31 - 1):
        with pytest.raises(ew.InvalidArgumentError, match=f"size = {size}: must be between 1 and 1024"):
            ew.local_group(size)
    with pytest.raises(ew.InvalidArgumentError, match="timeout_s = 0"):
        ew.local_group(1, timeout_s=0.0)


def test_errors_of_a_python_bootstrap_pass_through_the_core() -> None:
    def gather(mine: bytes) -> Any:
        answers = {b"raise": ZeroDivisionError("no way"), b"few": [b""], b"text": ["", b""], b"none": None}
        if isinstance(answers[mine], Exception):
            raise answers[mine]
        return answers[mine]

    group = ew.Group(_core.make_callable_bootstrap(1, 2, gather), device="cuda:1")
    assert (group.rank, group.size, group.device) == (1, 2, "cuda:1")
    with pytest.raises(ZeroDivisionError, match="no way"):
        group.all_gather(b"raise")
    with pytest.raises(
        ew.InvalidArgumentError, match="returned 1 entries: must be one bytes object for each of 2 ranks"
    ):
        group.all_gather(b"few")
    with pytest.raises(ew.InvalidArgumentError, match="no bytes object"):
        group.all_gather(b"text")
    with pytest.raises(TypeError):
        group.all_gather(b"none")


def test_fork_after_import_is_harmless() -> None:
    code = """
import os, expertwire as ew
groups = ew.local_group(1)
child = os.fork()
assert ew.local_group(1)[0].all_gather(b"a") == [b"a"]
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert groups[0].all_gather(b"b") == [b"b"]
"""
    finish([start(code, plain_environment())])


# Importing torch takes seconds: once, and then three processes.
TORCH = """
import os, sys, expertwire as ew, torch.distributed as dist
rank = 0 if os.fork() else 1 if os.fork() else 2
try:
    ew.Group.from_torch()
except ew.InvalidArgumentError as error:
    assert "not initialised" in str(error)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
group = ew.Group.from_torch()
assert (group.rank, group.size) == (rank, 3)
assert group.all_gather(b"x" * rank) == [b"", b"x", b"xx"]
group.barrier()
pair = dist.new_group([0, 2])
try:
    part = ew.Group.from_torch(pair)
except ew.InvalidArgumentError as error:
    assert rank == 1 and "not one of its ranks" in str(error)
else:
    assert part.all_gather(bytes([rank])) == [bytes([0]), bytes([2])] and part.size == 2
dist.barrier()
dist.destroy_process_group()
os.write(1, b"rank %d has passed\\n" % rank)
if rank < 2:
    os.wait()
"""


def test_from_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", TORCH, tmp_path / "store"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert sorted(run.stdout.splitlines()) == [f"rank {rank} has passed" for rank in range(3)], run.stderr


@pytest.mark.parametrize(("module", "make"), [("torch", "from_torch"), ("mpi4py", "from_mpi")])
def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch, module: str, make: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ew.UnsupportedError, match=f"Group.{make} needs {module}"):
        getattr(ew.Group, make)(None)


MPI = """
import expertwire as ew
from mpi4py import MPI
group = ew.Group.from_mpi(MPI.COMM_WORLD)
assert group.all_gather(b"x" * group.rank) == [b"", b"x", b"xx"]
group.barrier()
try:
    ew.Group.from_mpi(3)
except ew.InvalidArgumentError as error:
    assert "comm = 3" in str(error)
twice = [ew.Group.from_env(timeout_s=30) for _ in range(2)]
assert [(one.rank, one.size) for one in twice] == [(group.rank, 3)] * 2
"""


def test_mpirun() -> None:
    """from_mpi and, under a real launcher, from_env."""
    pytest.importorskip("mpi4py")
    command = [*mpirun(3), sys.executable, "-c", MPI]
    run = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
