"""What the environment says about groups. The only module of the package, besides the C++ core's own, that reads it.

==========================  =====================================================================================
``EXPERTWIRE_RENDEZVOUS``   replaces the rendezvous key that :meth:`Group.from_env` derives from the launcher
torchrun                    ``RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT TORCHELASTIC_RUN_ID
                            TORCHELASTIC_RESTART_COUNT``
Open MPI                    ``OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE PMIX_NAMESPACE
                            OMPI_MCA_ess_base_jobid``
MPICH and its kin (hydra)   ``PMI_RANK PMI_SIZE MPI_LOCALNRANKS``
srun                        ``SLURM_PROCID SLURM_JOB_ID SLURM_STEP_ID SLURM_STEP_NUM_TASKS`` (or ``SLURM_NTASKS``)
                            ``SLURM_STEP_NUM_NODES``
==========================  =====================================================================================
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expertwire.errors import InvalidArgumentError


@dataclass(frozen=True)
class Launcher:
    """What a launcher told this process.

    Attributes:
        name: ``"torchrun"``, ``"mpirun"``, ``"hydra"`` or ``"srun"``.
        rank: this process in the whole job.
        size: processes of the whole job.
        several_hosts: whether they run on more than one host.
        job: tells this job from others of this user that run on this host at the same time; ``None`` if nothing does.
    """

    name: str
    rank: int
    size: int
    several_hosts: bool
    job: str | None


def device_connections() -> str:
    """``CUDA_DEVICE_MAX_CONNECTIONS``, which the CUDA driver reads when it starts; empty if it is not set."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")


@functools.cache
def rendezvous() -> str | None:
    """``EXPERTWIRE_RENDEZVOUS``, or ``None``. Read once."""
    return os.environ.get("EXPERTWIRE_RENDEZVOUS") or None


@functools.cache
def launcher() -> Launcher:
    """Return what the launcher said. Read once it is there; an error is not remembered.

    The innermost launcher wins: torchrun under mpirun or srun, and mpirun under srun, are themselves started by the
    other, and set their variables anew.

    Raises:
        InvalidArgumentError: no launcher's variables are set, or some are missing or no numbers.
    """
    variables = os.environ
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    if "OMPI_COMM_WORLD_RANK" in variables:
        return _open_mpi(variables)
    if "SLURM_STEP_ID" in variables and variables.get("PMI_RANK") == variables.get("SLURM_PROCID"):
        return _srun(variables)
    if "PMI_RANK" in variables:
        return _hydra(variables)
    if "SLURM_STEP_ID" in variables:
        return _srun(variables)
    raise InvalidArgumentError(
        "Group.from_env found no launcher: looked for RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK (Open MPI), "
        "PMI_RANK (MPICH) and SLURM_STEP_ID (srun). Start the program with one of them, or use expertwire.spawn"
    )


def _torchrun(variables: Mapping[str, str]) -> Launcher:
    size = _number(variables, "WORLD_SIZE", 1)
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    parts = [f"{name}={variables[name]}" for name in names if name in variables]
    return Launcher(
        name="torchrun",
        rank=_rank(variables, "RANK", size),
        size=size,
        several_hosts="LOCAL_WORLD_SIZE" in variables and _number(variables, "LOCAL_WORLD_SIZE", 1) != size,
        job=",".join(parts) or None,
    )


def _open_mpi(variables: Mapping[str, str]) -> Launcher:
    size = _number(variables, "OMPI_COMM_WORLD_SIZE", 1)
    return Launcher(
        name="mpirun",
        rank=_rank(variables, "OMPI_COMM_WORLD_RANK", size),
        size=size,
        several_hosts=_number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", 1) != size,
        job=variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid"),
    )


def _hydra(variables: Mapping[str, str]) -> Launcher:
    size = _number(variables, "PMI_SIZE", 1)
    return Launcher(
        name="hydra",
        rank=_rank(variables, "PMI_RANK", size),
        size=size,
        several_hosts="MPI_LOCALNRANKS" in variables and _number(variables, "MPI_LOCALNRANKS", 1) != size,
        job=_starter_of_process_group(),
    )


def _srun(variables: Mapping[str, str]) -> Launcher:
    size = _number(variables, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS", 1)
    return Launcher(
        name="srun",
        rank=_rank(variables, "SLURM_PROCID", size),
        size=size,
        several_hosts=variables.get("SLURM_STEP_NUM_NODES", "1") != "1",
        job=f"{_number(variables, 'SLURM_JOB_ID', 0)}.{variables['SLURM_STEP_ID']}",
    )


def _starter_of_process_group() -> str | None:
    """The hydra proxy, which sets no job id, but starts every rank as the leader of a process group of its own.

    Going through the leader finds it also from below a shell script that the proxy started.
    """
    try:
        status = Path(f"/proc/{os.getpgid(0)}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # "pid (name) state ppid ...", and the name may hold anything.
    return "proxy=" + status.rpartition(")")[2].split()[1]


def _number(variables: Mapping[str, str], name: str, least: int) -> int:
    text = variables.get(name)
    if text is None:
        raise InvalidArgumentError(f"Group.from_env: {name} is not set, though the launcher's other variables are")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidArgumentError(f"Group.from_env: {name} = {text!r}: must be a whole number of at least {least}")
    return value


def _rank(variables: Mapping[str, str], name: str, size: int) -> int:
    rank = _number(variables, name, 0)
    if rank >= size:
        raise InvalidArgumentError(f"Group.from_env: {name} = {rank}: must be below the number of ranks, {size}")
    return rank
