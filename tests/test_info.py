"""``expertwire info``: what it finds here, and what it says about shortfalls."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import subprocess
import sys
from typing import Any

import pytest

import expertwire
from expertwire.info import NEEDED_FILES, Fact, Info, collect, find_gpus
from expertwire.machine import describe_machine


def expertwire_info(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from expertwire.cli import main; main()", "info", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fact(info: Info, name: str) -> Fact:
    return next(one for one in info.facts if one.name.startswith(name))


def refuse(*_arguments: object) -> int:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_json_holds_what_is_collected() -> None:
    done = expertwire_info("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads(json.dumps(collect().as_json())) | {"machine": told["machine"]}
    assert told["backend"] == "cpu"
    assert told["cpu_isa"] in told["cpu_isas"]
    assert told["backends"]["cuda"] == "usable" or "driver" in told["backends"]["cuda"]


def test_text_names_backends_and_versions() -> None:
    done = expertwire_info()
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "backend cpu usable, used by default" in words
    assert "backend cuda" in words
    assert f"python {sys.version.split()[0]}" in words


def test_hardware_queues_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert fact(collect(), "GPU hardware queues").value.startswith("32 connections; ")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert "is not set" in fact(collect(), "GPU hardware queues").value


@pytest.mark.parametrize("isa", ["avx512", "neon", "bogus"])
def test_row_kernels_that_cannot_be_used_are_said(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    if isa in collect().cpu_isas:
        pytest.skip(f"this processor has {isa}")
    monkeypatch.setenv("EXPERTWIRE_CPU_ISA", isa)
    done = expertwire_info()
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "row kernels EXPERTWIRE_CPU_ISA = " in words
    assert "row kernels: give the variable one of these values, or unset it" in words
    assert "backend cpu EXPERTWIRE_CPU_ISA = " in words
    told = json.loads(expertwire_info("--json").stdout)
    assert (told["backend"], told["cpu_isa"], told["cpu_isas"]) == ("none", "", [])


@pytest.mark.parametrize(
    ("release", "told"), [("6.18.44-fc-v657", "6.18.44"), ("6.1.0-13-amd64", "6.1.0"), ("5.15", "5.15")]
)
def test_kernel_is_told_without_what_a_host_appends(monkeypatch: pytest.MonkeyPatch, release: str, told: str) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert describe_machine()["kernel"] == f"{platform.system()} {told}"


@pytest.mark.parametrize("start", [["-m", "expertwire"], ["-c", "from expertwire.cli import main; main()"]])
def test_version_is_told(start: list[str]) -> None:
    command = [sys.executable, *start, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"expertwire {expertwire.__version__}\n")


def test_no_shared_memory_means_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    info = collect()
    assert info.backend == "none"
    assert "memfd_create is refused: Operation not permitted" in info.backends["cpu"]
    assert fact(info, "shared memory").advice


def test_no_pidfd_is_advice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", refuse)
    info = collect()
    assert info.backend == "cpu"
    assert "timeout_s" in fact(info, "notice of a dead rank").advice


@pytest.mark.parametrize(("soft", "advised"), [(NEEDED_FILES - 1, True), (NEEDED_FILES, False), (-1, False)])
def test_few_open_files_are_advised_against(monkeypatch: pytest.MonkeyPatch, soft: int, advised: bool) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, -1))
    assert bool(fact(collect(), "open files").advice) is advised


def test_missing_core_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "expertwire._core", None)
    monkeypatch.delattr(expertwire, "_core", raising=False)
    info = collect()
    assert (info.backend, info.cpu_isa, info.cpu_isas) == ("none", "", [])
    assert "the compiled core cannot be loaded" in info.backends["cpu"]


def test_no_driver_is_said() -> None:
    gpus = find_gpus("libno-such-driver.so.1")
    assert gpus.names == []
    assert "libno-such-driver.so.1 cannot be loaded" in gpus.problem


class Driver:
    """Answers like libcuda.so.1 on a machine with ``count`` GPUs."""

    def __init__(self, count: int, status: int = 0) -> None:
        self._count, self._status = count, status

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return self._status

    def __getattr__(self, name: str) -> Any:
        answers = {"cuDriverGetVersion": 13020, "cuDeviceGetCount": self._count, "cuDeviceTotalMem_v2": 141 * 2**30}

        def answer(target: Any, *rest: Any) -> int:
            if name == "cuDeviceGetName":
                target.value = b"NVIDIA Test"
            elif name == "cuDeviceGetAttribute":
                target._obj.value = {75: 9, 76: 0}[rest[0]]
            else:
                target._obj.value = answers.get(name, 0)
            return 0

        return answer


@pytest.mark.parametrize(
    ("driver", "names", "problem"),
    [
        (Driver(2), ["NVIDIA Test, 141 GiB, compute capability 9.0"] * 2, ""),
        (Driver(0), [], "the driver shows no GPU"),
        (Driver(1, status=999), [], "cuInit failed with error 999"),
    ],
)
def test_driver_is_asked(monkeypatch: pytest.MonkeyPatch, driver: Driver, names: list[str], problem: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    gpus = find_gpus()
    assert (gpus.names, gpus.problem, gpus.driver_cuda) == (names, problem, "13.2")
