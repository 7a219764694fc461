"""The GPUs of this machine as the driver sees them; no context is made on any."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from expertwire.bench.gpu_module import Driver
from expertwire.errors import BackendError

_NAME_BYTES = 256
_VERSION_BYTES = 96


@dataclass(frozen=True)
class Gpus:
    """What a benchmark on GPUs needs.

    Attributes:
        names: of the GPUs.
        driver: version of the driver.
        cuda: newest CUDA of the driver.
        problem: why nothing can be measured on GPUs here, and what to do; empty if it can.
    """

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""

    def describe(self) -> dict[str, Any]:
        """Return what belongs to the description of the machine."""
        return {"gpus": list(self.names), "driver": self.driver, "cuda": self.cuda}


def find_gpus() -> Gpus:
    """Look for GPUs, and for a torch that can use them."""
    try:
        driver = Driver()
        driver.call("cuInit", 0)
        names = _names(driver)
    except BackendError as error:
        return Gpus(problem=str(error))
    version = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    problem = "the driver shows no GPU" if not names else _problem_of_torch()
    return Gpus(names, _driver_version(), cuda, problem)


def _names(driver: Driver) -> tuple[str, ...]:
    count = ctypes.c_int()
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        driver.call("cuDeviceGetName", name, _NAME_BYTES, device)
        names.append(name.value.decode(errors="replace"))
    return tuple(names)


def _driver_version() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, _VERSION_BYTES):
        return ""
    nvml.nvmlShutdown()
    return text.value.decode(errors="replace")


def _problem_of_torch() -> str:
    """Return what is wrong with the installed torch, which takes seconds to import: its version file says enough."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "needs torch for arrays on GPUs: pip install torch"
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    without_cuda = re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE)
    return "the installed torch has no CUDA: pip install a build of torch that has" if without_cuda else ""
