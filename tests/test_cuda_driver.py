"""What the core makes of an NVIDIA driver, or of none. The driver is a stand-in, so no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import num_cuda_devices
from expertwire import _core

DRIVER_CC = Path(__file__).resolve().parent.parent / "cpp" / "backend" / "cuda" / "driver.cc"
#: What the stand-in answers: its CUDA version, the result of cuInit, GPUs, and their major compute capability.
ANSWERS = {
    "cuDriverGetVersion": "int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}",
    "cuInit": "int cuInit(unsigned flags) {{ return {init}; }}",
    "cuDeviceGetCount": "int cuDeviceGetCount(int* count) {{ *count = {devices}; return 0; }}",
    "cuDeviceGet": "int cuDeviceGet(int* device, int ordinal) {{ *device = ordinal; return 0; }}",
    "cuDeviceGetAttribute": "int cuDeviceGetAttribute(int* value, int, int) {{ *value = {major}; return 0; }}",
    "cuGetErrorName": 'int cuGetErrorName(int, const char** name) {{ *name = "CUDA_ERROR_NAME"; return 0; }}',
    "cuGetErrorString": 'int cuGetErrorString(int, const char** text) {{ *text = "its text"; return 0; }}',
}
DEFAULTS = {"version": 13000, "init": 0, "devices": 1, "major": 9}


def build_driver(folder: Path, left_out: str = "", **answers: int) -> Path:
    """Builds ``libcuda.so.1`` with every entry point that the core looks up, but ``left_out``."""
    names = re.findall(r'symbols\.find\(d\.\w+, "(\w+)"\)', DRIVER_CC.read_text(encoding="utf-8"))
    assert len(names) > 40
    functions = [ANSWERS.get(name, f"int {name}() {{{{ return 0; }}}}") for name in names if name != left_out]
    source = folder / "driver.cc"
    source.write_text('extern "C" {\n' + "\n".join(functions).format(**DEFAULTS | answers) + "\n}\n", encoding="utf-8")
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run(
        [*compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True, timeout=60
    )
    return folder


def ask(code: str, driver: Path, **environment: str) -> str:
    """Prints the value of an expression over ``_core`` in a process with that driver."""
    surroundings = os.environ | {"LD_LIBRARY_PATH": str(driver)} | environment
    command = [sys.executable, "-c", f"from expertwire import _core, nvrtc; print({code})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (
            {"version": 11080},
            "the NVIDIA driver is too old: it offers CUDA 11.8; install one that offers 12.0 or newer",
        ),
        ({"left_out": "cuLaunchKernelEx"}, "offers 12.0 or newer (cuLaunchKernelEx is missing)"),
        ({"init": 100}, "the NVIDIA driver shows no GPU to this process; look at CUDA_VISIBLE_DEVICES"),
        ({"devices": 0}, "the NVIDIA driver shows no GPU to this process"),
        ({"init": 999}, "cannot be initialised: cuInit: CUDA_ERROR_NAME: its text"),
        ({"major": 7}, "no GPU here has compute capability 8.0 or newer"),
    ],
)
def test_shortfalls_are_named(answers: dict[str, int], why: str, tmp_path: Path) -> None:
    assert why in ask("_core.cuda_why_unusable()", build_driver(tmp_path, **answers))


def test_compiler_is_no_newer_than_the_driver(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code = "_core.cuda_why_unusable()"
    old = ask(code, build_driver(tmp_path, version=12080), EXPERTWIRE_NVRTC_DIR=str(empty))
    assert "looked for libnvrtc.so.12 in" in old
    assert "pip install nvidia-cuda-nvrtc-cu12" in old
    new = ask(code, build_driver(tmp_path), EXPERTWIRE_NVRTC_DIR=str(empty))
    assert "looked for libnvrtc.so.13 and .12 in" in new
    assert "pip install 'expertwire[cuda]'" in new


def test_nothing_is_wrong_with_driver_and_compiler(tmp_path: Path) -> None:
    pytest.importorskip("nvidia", reason="needs the nvidia-cuda-nvrtc wheel")
    assert ask("nvrtc.use_installed_nvrtc(), _core.cuda_why_unusable()", build_driver(tmp_path)) == "None None"


def test_this_machine() -> None:
    why = _core.cuda_why_unusable()
    if num_cuda_devices() == 0:
        assert why
    else:
        assert why is None or "compute capability" in why or "NVRTC" in why
