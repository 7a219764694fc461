"""Groups: who takes part in a communicator, and where the ranks come from.

A group is used when a communicator is set up, and not afterwards. It knows its rank and size and all-gathers small byte
strings.

**The rendezvous of** :meth:`Group.from_env`. Ranks are processes of one host and one user. They meet at an abstract
Unix socket, so that nothing lies in the file system, under the key

``<launcher>:<job>:<n>``

where ``<job>`` is the launcher's job: torchrun ``TORCHELASTIC_RUN_ID``, ``TORCHELASTIC_RESTART_COUNT`` and
``MASTER_PORT``; Open MPI ``PMIX_NAMESPACE``; MPICH the process that started the ranks; srun
``SLURM_JOB_ID.SLURM_STEP_ID``. ``EXPERTWIRE_RENDEZVOUS``, if set, takes its place. ``<n>`` counts the calls of
``from_env`` in this process: every rank makes the same ones in the same order. The user is part of the socket's
name, and processes of other users are refused. Two jobs with one key are noticed, and fail.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from expertwire import _core, env
from expertwire.errors import InvalidArgumentError, UnsupportedError
from expertwire.processes import run_processes

if TYPE_CHECKING:
    import mpi4py.MPI
    import torch.distributed

Result = TypeVar("Result")

#: Bound of every wait of a group, seconds. Long, since ranks may load a model before they meet.
DEFAULT_TIMEOUT_S = 300.0

_from_env_calls = itertools.count()


class Group:
    """One rank's end of a group.

    All methods that say "collective" are called by every rank, in the same order, from one thread of a rank at a time.

    Args:
        bootstrap: the C++ core's end of the group; the class methods make it.
        device: where communicators of this group live unless they say otherwise: ``"cpu"``, ``"cuda:3"``, or ``"cuda"``
            for the device that is torch's or CuPy's current one when a communicator is made; ``None``: ``"cpu"``.
    """

    def __init__(self, bootstrap: _core.Bootstrap, *, device: str | None = None) -> None:
        self._bootstrap = bootstrap
        self._device = device if device is not None else "cpu"

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._bootstrap.rank

    @property
    def size(self) -> int:
        """R, the number of ranks."""
        return self._bootstrap.size

    @property
    def device(self) -> str:
        """Where communicators of this group live unless they say otherwise."""
        return self._device

    @property
    def bootstrap(self) -> _core.Bootstrap:
        """The C++ core's end of the group."""
        return self._bootstrap

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Collective. Contribute one byte string, of any length, and return those of all ranks by rank.

        Raises:
            PeerLostError: a rank did not take part in time, or has gone. The group is of no more use then.
        """
        return self._bootstrap.all_gather(mine)

    def barrier(self) -> None:
        """Collective. Return once every rank has called.

        Raises:
            PeerLostError: as in :meth:`all_gather`.
        """
        self._bootstrap.barrier()

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, device={self.device!r})"

    @classmethod
    def from_env(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S, device: str | None = None) -> Group:
        """Collective. The processes that torchrun, mpirun or srun started on this host.

        Nothing but this package is needed. May be called several times, equally often by every rank.

        Args:
            timeout_s: bound of every wait of the group, seconds.
            device: see :class:`Group`.

        Raises:
            InvalidArgumentError: the launcher's variables are missing or make no sense (the text names them); or
                another job uses the same rendezvous key.
            UnsupportedError: the ranks run on several hosts.
            PeerLostError: a rank did not arrive in time (the text names it), or died.
        """
        launcher = env.launcher()
        if launcher.several_hosts:
            raise UnsupportedError(
                f"Group.from_env: the {launcher.size} ranks of this {launcher.name} job run on several hosts, and "
                "from_env knows one: use Group.from_torch or Group.from_mpi"
            )
        job = env.rendezvous() or launcher.job
        if job is None:
            raise InvalidArgumentError(
                f"Group.from_env: nothing tells this {launcher.name} job from others on this host: set MASTER_PORT or "
                "TORCHELASTIC_RUN_ID (torchrun), PMIX_NAMESPACE (Open MPI) or EXPERTWIRE_RENDEZVOUS, equal on all ranks"
            )
        if not timeout_s > 0:  # before a number of the rendezvous is used up: the corrected call must meet its peers
            raise InvalidArgumentError(f"timeout_s = {timeout_s}: must be greater than 0")
        key = f"{launcher.name}:{job}:{next(_from_env_calls)}"
        return cls(_core.make_host_bootstrap(launcher.rank, launcher.size, key, timeout_s), device=device)

    @classmethod
    def from_torch(
        cls, process_group: torch.distributed.ProcessGroup | None = None, *, device: str | None = None
    ) -> Group:
        """The ranks of a torch.distributed process group, on one host or several.

        Args:
            process_group: ``None``: the default group. Its own time-out bounds the waits.
            device: see :class:`Group`.

        Raises:
            UnsupportedError: torch is not installed, or was built without torch.distributed.
            InvalidArgumentError: torch.distributed is not initialised, or this process is not in ``process_group``.
        """
        try:
            from torch import distributed
        except ImportError as error:
            raise UnsupportedError(
                "Group.from_torch needs torch, which is not installed: pip install 'expertwire[torch]'"
            ) from error
        if not distributed.is_available():
            raise UnsupportedError("Group.from_torch: this build of torch has no torch.distributed")
        if not distributed.is_initialized():
            raise InvalidArgumentError(
                "Group.from_torch: torch.distributed is not initialised: call its init_process_group first"
            )
        rank, size = distributed.get_rank(process_group), distributed.get_world_size(process_group)
        if rank < 0:
            raise InvalidArgumentError("process_group: this process is not one of its ranks")

        def all_gather(mine: bytes) -> list[bytes]:
            gathered: list[Any] = [None] * size
            distributed.all_gather_object(gathered, mine, group=process_group)
            return gathered

        return cls(_core.make_callable_bootstrap(rank, size, all_gather), device=device)

    @classmethod
    def from_mpi(cls, comm: mpi4py.MPI.Intracomm, *, device: str | None = None) -> Group:
        """The ranks of an mpi4py communicator, on one host or several.

        MPI bounds no waits: what becomes of the others when a rank dies is up to its launcher.

        Args:
            comm: an intracommunicator, such as ``MPI.COMM_WORLD``.
            device: see :class:`Group`.

        Raises:
            UnsupportedError: mpi4py is not installed.
            InvalidArgumentError: ``comm`` is no intracommunicator of mpi4py.
        """
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise UnsupportedError(
                "Group.from_mpi needs mpi4py and an MPI library, which are not installed: pip install 'expertwire[mpi]'"
            ) from error
        if not isinstance(comm, MPI.Intracomm):
            raise InvalidArgumentError(f"comm = {comm!r}: must be an mpi4py.MPI.Intracomm, such as MPI.COMM_WORLD")
        return cls(_core.make_callable_bootstrap(comm.Get_rank(), comm.Get_size(), comm.allgather), device=device)


def local_group(
    n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, device: str | Sequence[str] | None = None
) -> list[Group]:
    """Make n groups for n threads of this process; thread i takes the i-th.

    On CUDA the ranks may share a GPU, each with a stream of its own and a part of the multiprocessors (``num_blocks``).
    Their kernels wait for each other, so that all must run at once: start the process with
    ``CUDA_DEVICE_MAX_CONNECTIONS=32``, or streams share hardware queues.

    Args:
        n: R, at least 1.
        timeout_s: bound of every wait of the groups, seconds.
        device: see :class:`Group`; one for all ranks, or one for each.

    Raises:
        InvalidArgumentError: ``n`` or ``timeout_s`` is out of range, or there are not as many devices as ranks.
    """
    bootstraps = _core.make_local_bootstraps(n, timeout_s)
    devices = [device] * n if device is None or isinstance(device, str) else list(device)
    if len(devices) != n:
        raise InvalidArgumentError(f"device = {device!r}: must be one device, or one for each of the {n} ranks")
    return [Group(bootstrap, device=where) for bootstrap, where in zip(bootstraps, devices, strict=True)]


def spawn(fn: Callable[..., Result], n: int, *args: object, timeout_s: float | None = None) -> list[Result]:
    """Run ``fn(group, *args)`` in n new processes of this host and return the results by rank.

    One fresh interpreter starts, imports the module of ``fn``, and forks the n ranks off: threads and state of the
    calling process play no part, and sixteen ranks start hardly later than one. As with :mod:`multiprocessing`, a
    script that calls this needs an ``if __name__ == "__main__":`` guard, ``fn`` must be importable by name, and ``fn``,
    ``args`` and results must be picklable. Module-level code should start no threads. NumPy's global random generator
    starts alike in all ranks unless ``fn`` seeds it.

    When a rank fails, the others get a few seconds to end by themselves, and are killed then. No process is left
    behind, neither then nor when the caller is interrupted or killed.

    Args:
        fn: what a rank does.
        n: R, at least 1.
        args: passed to every rank.
        timeout_s: bound of the whole call, seconds; ``None``: as long as the ranks take.

    Raises:
        InvalidArgumentError: an argument is out of range or not picklable.
        PeerLostError: a rank was killed by a signal or exited before it returned (the text says which and how), or
            ``timeout_s`` has passed; ``operation`` is ``"spawn"``.
        Exception: whatever ``fn`` raised, on the first rank that failed of its own accord; its traceback there is in
            ``__cause__``.
    """
    preload = ("expertwire.communicator", getattr(fn, "__module__", None) or "__main__")
    key = f"spawn:{uuid.uuid4().hex}"
    return run_processes(_run_in_group, n, (n, key, fn, args), preload=preload, timeout_s=timeout_s)


def _run_in_group(rank: int, n: int, key: str, fn: Callable[..., Result], args: tuple[object, ...]) -> Result:
    return fn(Group(_core.make_host_bootstrap(rank, n, key, DEFAULT_TIMEOUT_S)), *args)
