"""What the figures were measured on: machine and versions, for the JSON."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, Any]:
    """Return the CPU model, cores, memory, kernel and load. No host name, no user, no path."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "usable_cores": usable_cores(),
        "logical_cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {_kernel_release()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part, as far as they are installed."""
    found = {package: _version(package) for package in ("expertwire", "numpy", "ml_dtypes", "torch")}
    return {"python": sys.version.split()[0], **{package: version for package, version in found.items() if version}}


def _kernel_release() -> str:
    """Return major.minor.patch; what distributions and hosts append says nothing about speed."""
    found = re.match(r"\d+(\.\d+){0,2}", platform.release())
    return found[0] if found else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
