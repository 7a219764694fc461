"""Ranks that mpirun starts, for ``--nodes``: the host file, the command line, and what runs on each rank."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from expertwire.bench.child import run_child
from expertwire.errors import BackendError, InvalidArgumentError, UnsupportedError

_TASK = "task.pickle"
_LOOK_S = 30.0


@dataclass(frozen=True)
class Nodes:
    """Where mpirun starts ranks.

    Attributes:
        addresses: of hosts, or their names; the ranks are spread evenly over them, in this order.
        interface: network interface that MPI may use; empty: its own choice.
        mpi_prefix: folder of the MPI installation on all hosts; empty: the mpirun of the PATH.
    """

    addresses: tuple[str, ...]
    interface: str = ""
    mpi_prefix: str = ""

    @staticmethod
    def parse(addresses: str | None, interface: str | None = None, mpi_prefix: str | None = None) -> Nodes | None:
        """Return the nodes of ``--nodes "IP IP" --iface NAME --mpi-prefix FOLDER``. Raises InvalidArgumentError."""
        if addresses is None:
            for option, value in (("--iface", interface), ("--mpi-prefix", mpi_prefix)):
                if value is not None:
                    raise InvalidArgumentError(f"{option} {value}: is for ranks over MPI, and needs --nodes")
            return None
        words = tuple(addresses.replace(",", " ").split())
        if not words:
            raise InvalidArgumentError("--nodes: must be one or more addresses, such as '10.0.0.1 10.0.0.2'")
        for word in words:
            _resolve(word)
        known = [name for _, name in socket.if_nameindex()]
        if interface is not None and interface not in known:
            raise InvalidArgumentError(f"--iface {interface!r}: must be among {', '.join(known)}")
        if mpi_prefix is not None and not Path(mpi_prefix, "bin", "mpirun").is_file():
            raise InvalidArgumentError(f"--mpi-prefix {mpi_prefix}: there is no bin/mpirun")
        return Nodes(words, interface or "", mpi_prefix or "")

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return len(self.addresses)

    @property
    def mpirun(self) -> str:
        """Which program starts the ranks."""
        return str(Path(self.mpi_prefix, "bin", "mpirun")) if self.mpi_prefix else "mpirun"

    def host_file(self, num_ranks: int) -> str:
        """Return a line for each rank; mpirun wants a host that is named twice written like this."""
        share = num_ranks // self.num_nodes
        return "".join(f"{address}\n" * share for address in self.addresses)

    def command(self, num_ranks: int, host_file: Path, program: list[str]) -> list[str]:
        """Return the command line that runs a program, behind options of mpirun if need be, on every rank."""
        options = ["--hostfile", str(host_file), "-np", str(num_ranks), "--bind-to", "none"]
        if self.mpi_prefix:
            options += ["--prefix", self.mpi_prefix]
        if self.interface:
            options += ["--mca", "btl_tcp_if_include", self.interface, "--mca", "oob_tcp_if_include", self.interface]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        return [self.mpirun, *options, *program]

    def plan(self, num_ranks: int) -> str:
        """Return in words what :meth:`run` would do."""
        command = self.command(num_ranks, Path("hosts"), _program(Path("FOLDER")))
        return f"hosts: {' '.join(self.host_file(num_ranks).split())}\n{shlex.join(command)}"

    def check(self, *, threads: bool, elsewhere: bool = False) -> None:
        """Raise what :meth:`run` would, without running anything.

        Args:
            threads: ranks are to be threads.
            elsewhere: addresses of other hosts are fine, and what this host lacks for MPI does not matter then.

        Raises:
            InvalidArgumentError: ranks are to be threads.
            UnsupportedError: an address is of another host; or Open MPI or mpi4py is not there.
        """
        if threads:
            raise InvalidArgumentError("--nodes: ranks over MPI are processes, not --threads")
        others = [address for address in self.addresses if not _is_own(address)]
        if others and elsewhere:
            return
        if others:
            raise UnsupportedError(
                f"--nodes: {others[0]} is another host, and the libraries of this version exchange within one: name "
                "addresses of this host, or use --dry-run to see the mpirun command"
            )
        if find_spec("mpi4py") is None:
            raise UnsupportedError("--nodes needs mpi4py: pip install 'expertwire[mpi]'")
        if shutil.which(self.mpirun) is None:
            raise UnsupportedError("--nodes needs mpirun of Open MPI: apt-get install openmpi-bin, or use --mpi-prefix")
        told = subprocess.run([self.mpirun, "--version"], capture_output=True, text=True, check=False, timeout=_LOOK_S)
        if "Open MPI" not in told.stdout:
            raise UnsupportedError(f"--nodes: {self.mpirun} is not of Open MPI: use --mpi-prefix")

    def run(self, num_ranks: int, target: Callable[..., Any], *args: Any) -> None:
        """Run ``target(group, *args)`` on every rank.

        Raises:
            BackendError: a rank raised, with its text; or mpirun did not start or broke.
        """
        with tempfile.TemporaryDirectory(prefix="expertwire-") as name:
            folder = Path(name)
            (folder / _TASK).write_bytes(pickle.dumps((target, args)))
            done = self.launch(num_ranks, _program(folder), watches_input=True)
            if done.returncode:
                raise BackendError(_reason(folder, done.returncode, done.stderr + done.stdout))

    def launch(
        self, num_ranks: int, program: list[str], limit_s: float | None = None, *, watches_input: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on every rank, and return what became of mpirun.

        See :func:`run_child` for the rest. With ``watches_input``, rank 0 looks at the input.
        """
        with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
            host_file = Path(folder, "hosts")
            host_file.write_text(self.host_file(num_ranks), encoding="utf-8")
            return run_child(self.command(num_ranks, host_file, program), limit_s, watches_input=watches_input)


def _program(folder: Path) -> list[str]:
    return [sys.executable, "-m", "expertwire.bench.nodes", str(folder)]


def _reason(folder: Path, status: int, told: str) -> str:
    """Return what a rank raised, or else the first line of mpirun's own words."""
    raised = sorted(folder.glob("raised.*"))
    if raised:
        return raised[0].read_text(encoding="utf-8")
    lines = [line.strip() for line in told.splitlines() if line.strip("- ")]
    return f"mpirun ended with status {status}: {' '.join(lines[:3]) or 'it said nothing'}"


def _resolve(address: str) -> list[Any]:
    try:
        return socket.getaddrinfo(address, 0, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise InvalidArgumentError(
            f"--nodes {address!r}: cannot be resolved to an IPv4 address ({error.strerror})"
        ) from error


def _is_own(address: str) -> bool:
    """Whether an address is one of this host: nobody can bind to another's."""
    for family, kind, _, _, where in _resolve(address):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def _end_with_the_caller() -> None:
    """End all ranks once whoever started mpirun is gone: then the input, which carries nothing, ends."""
    from mpi4py import MPI

    os.read(0, 1)
    MPI.COMM_WORLD.Abort(1)


def _run_rank(folder: Path) -> None:
    """Do the task of one rank that mpirun has started; whatever it raises ends all ranks."""
    from mpi4py import MPI

    from expertwire.groups import Group

    group = Group.from_mpi(MPI.COMM_WORLD)
    if group.rank == 0:
        threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        target, args = pickle.loads((folder / _TASK).read_bytes())  # noqa: S301 (written by ``run``)
        target(group, *args)
    except BaseException as error:
        text = f"rank {group.rank}: {type(error).__name__}: {' '.join(str(error).split())}"
        (folder / f"raised.{group.rank}").write_text(text, encoding="utf-8")
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
