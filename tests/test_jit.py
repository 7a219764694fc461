"""CUDA kernels compile without a GPU, with the compiler that pip installs, and are kept.

The core reads its environment and loads a compiler once per process, so each case runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from expertwire.nvrtc import find_nvrtc_folders

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
COMPILE = """
import json, sys
from expertwire import _core, errors, nvrtc

nvrtc.use_installed_nvrtc()
try:
    image = _core.compile_source(*sys.argv[1:])
except errors.Error as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
else:
    resources = {name: [r.registers, r.stack_bytes, r.spill_bytes] for name, r in image.resources.items()}
    print(json.dumps({"cubin": image.cubin.hex(), "from_cache": image.from_cache, "resources": resources}))
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compile_source(source: str, architecture: str, **environment: str) -> Mapping[str, Any]:
    told: Mapping[str, Any] = json.loads(run(COMPILE, source, architecture, **environment))
    return told


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def test_second_process_takes_what_the_first_kept(cache: str) -> None:
    first, second = (compile_source(KERNEL, "sm_90a", EXPERTWIRE_CACHE_DIR=cache) for _ in range(2))
    assert bytes.fromhex(first["cubin"]).startswith(b"\x7fELF")
    assert first["resources"].keys() == {"twice"}
    assert (first["from_cache"], second["from_cache"]) == (False, True)
    assert {**first, "from_cache": True} == second
    assert len(list(Path(cache).iterdir())) == 1


def test_errors_of_the_core_arrive(cache: str) -> None:
    empty = 'namespace expertwire::config {}\n#include "dispatch.cuh"'
    broken = compile_source(empty, "sm_90a", EXPERTWIRE_CACHE_DIR=cache)
    assert broken["error"] == "BackendError"
    assert 'has no member "kHiddenSize"' in broken["text"]
    assert compile_source(KERNEL, "hopper")["error"] == "InvalidArgumentError"
    nowhere = compile_source(KERNEL, "sm_90a", EXPERTWIRE_NVRTC_DIR=cache)
    assert nowhere["error"] == "UnsupportedError"
    assert f"in {cache}; pip install 'expertwire[cuda]'" in nowhere["text"]


def test_compilations_are_told_when_asked(cache: str) -> None:
    command = [sys.executable, "-c", COMPILE, KERNEL, "sm_90a"]
    environment = os.environ | {"EXPERTWIRE_LOG": "info", "EXPERTWIRE_CACHE_DIR": cache}
    told = [
        subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment).stderr
        for _ in range(2)
    ]
    assert told[0].startswith("expertwire: kernels compiled for sm_90a with NVRTC ")
    assert told[1] == ""


@pytest.mark.parametrize("below", ["cu13/lib", "cuda_nvrtc/lib"])
def test_wheels_are_found_without_importing_them(below: str, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / below
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").write_text("raise AssertionError('imported')")
    code = "from expertwire.nvrtc import find_nvrtc_folders; print(*find_nvrtc_folders())"
    assert run(code, PYTHONPATH=str(tmp_path)).strip() == ""
    (folder / "libnvrtc.so.13").touch()
    assert run(code, PYTHONPATH=str(tmp_path)).strip() == str(folder)


def test_installed_wheel_is_found() -> None:
    pytest.importorskip("nvidia", reason="needs the nvidia-cuda-nvrtc wheel")
    assert find_nvrtc_folders()
