"""A communicator over the groups that launchers make, by the launchers themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launching import mpirun, plain_environment

EXCHANGE = """
import sys
import ml_dtypes, numpy as np, expertwire as ew

def make_group(source):
    if source == "mpi":
        from mpi4py import MPI
        return ew.Group.from_mpi(MPI.COMM_WORLD)
    if source == "torch":
        import torch.distributed as dist
        dist.init_process_group("gloo")
        return ew.Group.from_torch()
    return ew.Group.from_env(timeout_s=30)

for source in sys.argv[1:]:
    group = make_group(source)
    shape = dict(num_experts=4, hidden_size=16, num_topk=2, max_tokens_per_rank=3)
    with ew.MoECommunicator(group, **shape, timeout_s=30) as comm:
        x = np.full((2, 16), 1 + group.rank, ml_dtypes.bfloat16)
        out, handle = comm.dispatch(x, np.array([[0, 3], [1, 2]]))
        assert out.layout.num_tokens_per_expert.tolist() == [2, 2]
        assert (comm.combine(out.tokens, handle) == 2 * x).all()
    sys.stdout.write(f"{source} {group.rank} of {group.size} has passed\\n")  # in one piece: ranks share the pipe
if "torch" in sys.argv:
    import torch.distributed as dist
    dist.destroy_process_group()
"""


def launch(tmp_path: Path, launcher: list[str], *sources: str) -> None:
    """Run two ranks that make a group of each source and exchange tokens over it."""
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE, encoding="utf-8")
    command = [*launcher, script, *sources]
    run = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    told = [line for line in run.stdout.splitlines() if line]
    assert sorted(told) == sorted(f"{source} {rank} of 2 has passed" for source in sources for rank in (0, 1))


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch(tmp_path, torchrun, "torch", "env")


def test_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    launch(tmp_path, [*mpirun(2), sys.executable], "mpi", "env")
