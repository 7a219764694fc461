"""``expertwire info``: what this machine offers, which backend would be used, and why another would not."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertwire.env import device_connections
from expertwire.errors import Error
from expertwire.machine import describe_machine, describe_versions

#: Open files a rank may need: sockets, shared memory and process descriptors of 16 peers, and the application's own.
NEEDED_FILES = 256
#: Vector and matrix extensions of x86 and Arm that matter to rows of BF16 and FP8, as Linux calls them.
CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_CU_COMPUTE_MAJOR, _CU_COMPUTE_MINOR = 75, 76
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpus:
    """What the NVIDIA driver says.

    Attributes:
        names: one line a GPU.
        driver_cuda: newest CUDA version of the driver, such as ``"13.0"``; empty without a driver.
        problem: why there are no names; empty if there are some.
    """

    names: list[str] = field(default_factory=list)
    driver_cuda: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    Attributes:
        name: what was looked at.
        value: what was found.
        advice: what to do about it; empty if nothing needs doing.
    """

    name: str
    value: str
    advice: str = ""


@dataclass(frozen=True)
class Info:
    """Everything ``expertwire info`` says.

    Attributes:
        versions: of Python and the packages that take part, as far as they are installed.
        machine: CPU, cores, memory, kernel.
        cpu_features: what the CPU has of :data:`CPU_FEATURES`.
        cpu_isa: instruction set of the row kernels; empty if there are none, for which a fact gives the reason.
        cpu_isas: all that this CPU could use; empty if ``cpu_isa`` is.
        gpus: what the driver says.
        facts: what the CPU backend needs from the system.
        backend: the one that would be used, or ``"none"``.
        backends: name of each backend to ``"usable"`` or why it is not.
    """

    versions: dict[str, str]
    machine: dict[str, Any]
    cpu_features: list[str]
    cpu_isa: str
    cpu_isas: list[str]
    gpus: Gpus
    facts: list[Fact]
    backend: str
    backends: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Returns plain dictionaries, lists and strings."""
        return asdict(self)


def collect() -> Info:
    """Looks at the machine. Imports nothing heavy, starts no process and changes nothing."""
    core = _core()
    needed = [core.fact, _shared_memory(), _descriptor_passing()]  # without the others some comfort is missing
    facts = [*needed, _peer_watch(), _open_files(), _ptrace_scope(), _profiler_ranges(), _hardware_queues()]
    cpu_problem = "; ".join(fact.value for fact in needed if fact.advice)
    gpus = find_gpus()
    cuda_problem = _why_no_cuda() or gpus.problem
    return Info(
        versions=describe_versions(),
        machine=describe_machine(),
        cpu_features=_cpu_features(),
        cpu_isa=core.isa,
        cpu_isas=list(core.isas),
        gpus=gpus,
        facts=facts,
        backend="none" if cpu_problem else "cpu",
        backends={"cpu": cpu_problem or "usable", "cuda": cuda_problem or "usable"},
    )


def find_gpus(library: str = "libcuda.so.1") -> Gpus:
    """Asks the NVIDIA driver for its GPUs. ``library`` is the driver's file name as the loader knows it."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Gpus(problem=f"no NVIDIA driver ({library} cannot be loaded)")
    status = driver.cuInit(0)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    newest = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if status:
        return Gpus(driver_cuda=newest, problem=f"cuInit failed with error {status}")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = [_describe_gpu(driver, ordinal) for ordinal in range(count.value)]
    return Gpus(names, newest, "" if names else "the driver shows no GPU")


def _describe_gpu(driver: ctypes.CDLL, ordinal: int) -> str:
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), _CU_COMPUTE_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _CU_COMPUTE_MINOR, device)
    memory = f"{size.value / 2**30:.0f} GiB"
    return f"{name.value.decode(errors='replace')}, {memory}, compute capability {major.value}.{minor.value}"


@dataclass(frozen=True)
class _Core:
    """What the compiled core says of its row kernels, or why it says nothing, and their instruction sets."""

    fact: Fact
    isa: str = ""
    isas: tuple[str, ...] = ()


def _core() -> _Core:
    name = "row kernels"
    try:
        from expertwire import _core as core
    except ImportError as error:
        return _Core(Fact(name, f"the compiled core cannot be loaded ({error})", "install the package again"))
    try:
        isa, isas = core.cpu_isa(), tuple(core.cpu_isas())
    except Error as error:  # an environment variable has a value that cannot be used
        return _Core(Fact(name, str(error), "give the variable one of these values, or unset it"))
    return _Core(Fact(name, f"{isa} (of {', '.join(isas)})"), isa, isas)


def _why_no_cuda() -> str:
    """Return what the core says against the CUDA backend on this machine; empty if nothing."""
    try:
        from expertwire import _core as core
        from expertwire.nvrtc import use_installed_nvrtc

        use_installed_nvrtc()
        return core.cuda_why_unusable() or ""
    except (ImportError, Error) as error:
        return str(error)


def _profiler_ranges() -> Fact:
    name = "profiler ranges (NVTX)"
    try:
        from expertwire import _core as core

        state = core.nvtx_state()
    except (ImportError, Error) as error:
        return Fact(name, str(error))
    advice = "add the folder of one of these libraries to LD_LIBRARY_PATH"
    return Fact(name, state, "" if state in ("off", "on") else advice)


def _hardware_queues() -> Fact:
    value = device_connections()
    used = f"{value} connections" if value else "as the driver has it (CUDA_DEVICE_MAX_CONNECTIONS is not set)"
    return Fact("GPU hardware queues", f"{used}; several ranks of a process on one GPU need 32")


def _cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return [feature for feature in CPU_FEATURES if feature in flags]


def _shared_memory() -> Fact:
    name = "shared memory (memfd)"
    if not hasattr(os, "memfd_create"):
        return Fact(name, f"not available on {platform.system()}", "use Linux; ranks share memory through memfd_create")
    try:
        os.close(os.memfd_create("expertwire-info"))
    except OSError as error:
        return Fact(name, f"memfd_create is refused: {error.strerror}", "allow memfd_create in the sandbox's filter")
    return Fact(name, "works; /dev/shm is not used")


def _descriptor_passing() -> Fact:
    name = "descriptors over Unix sockets"
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:
        return Fact(name, f"no peer credentials on {platform.system()}", "use Linux")
    try:
        left, right = socket.socketpair(socket.AF_UNIX)
        with left, right:
            left.getsockopt(socket.SOL_SOCKET, credentials, 12)
            socket.send_fds(left, [b"x"], [left.fileno()])
            _, descriptors, _, _ = socket.recv_fds(right, 1, 1)
            for descriptor in descriptors:
                os.close(descriptor)
    except OSError as error:
        return Fact(name, f"refused: {error.strerror}", "allow Unix sockets with SCM_RIGHTS in the sandbox's filter")
    return Fact(name, "works, with peer credentials")


def _peer_watch() -> Fact:
    name = "notice of a dead rank (pidfd)"
    missed = "a dead rank is then noticed by time-out alone; choose a short timeout_s"
    if not hasattr(os, "pidfd_open"):
        return Fact(name, f"not available on {platform.system()}", missed)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Fact(name, f"pidfd_open is refused: {error.strerror}", missed)
    return Fact(name, "works")


def _open_files() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    value = "unlimited" if soft == unlimited else f"{soft} (may be raised to {'any' if hard == unlimited else hard})"
    short = soft != unlimited and soft < NEEDED_FILES
    return Fact("open files", value, f"ulimit -n {NEEDED_FILES} or more before starting ranks" if short else "")


def _ptrace_scope() -> Fact:
    name, unneeded = "ptrace scope", "not needed, descriptors travel over Unix sockets"
    try:
        value = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        return Fact(name, f"no restriction by Yama ({unneeded})")
    return Fact(name, f"{value} ({unneeded})")


def show(info: Info) -> None:
    """Prints the report, and below it what to do about each shortfall."""
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(info):
        table.add_row(name, Text(value))
    console.print(table, highlight=False)
    for fact in info.facts:
        if fact.advice:
            console.print(f"{fact.name}: {fact.advice}", style="yellow", markup=False, highlight=False)


def _lines(info: Info) -> Iterator[tuple[str, str]]:
    machine = info.machine
    yield "versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())
    yield "system", f"{machine['kernel']}, {machine['architecture']}"
    yield "CPU", f"{machine['cpu']}, {machine['usable_cores']} of {machine['logical_cpus']} cores usable"
    yield "CPU features", ", ".join(info.cpu_features) or "none of those looked for"
    yield "memory", f"{machine['memory_gib']} GiB"
    yield "GPUs", "; ".join(info.gpus.names) or info.gpus.problem
    if info.gpus.driver_cuda:
        yield "NVIDIA driver", f"up to CUDA {info.gpus.driver_cuda}"
    for fact in info.facts:
        yield fact.name, fact.value
    for backend, state in info.backends.items():
        yield f"backend {backend}", f"{state}, used by default" if backend == info.backend else state
