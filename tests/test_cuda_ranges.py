"""Ranges for a profiler: which operations a library of NVTX hears of, from a small one that writes them down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LIBRARY = """
#include <cstdio>
#include <cstdlib>

static int write_down(const char* line) {
  std::FILE* file = std::fopen(std::getenv("RANGES_FILE"), "a");
  std::fprintf(file, "%s\\n", line);
  return std::fclose(file);
}
extern "C" int nvtxRangePushA(const char* name) { return write_down(name); }
extern "C" int nvtxRangePop() { return write_down("."); }
"""

CALLS = """
import torch, expertwire as ew

x = torch.ones((2, 64), dtype=torch.bfloat16, device="cuda")
ids = torch.tensor([[0], [1]], device="cuda")
config = ew.MoECommunicatorConfig(num_experts=2, hidden_size=64, num_topk=1, max_tokens_per_rank=2, two_phase=True)
with ew.MoECommunicator(ew.local_group(1)[0], config, device="cuda:0") as comm:
    out, handle = comm.dispatch(x, ids)
    assert comm.combine(out.tokens, handle).equal(x)
    out, handle = comm.dispatch_async(x, ids).wait()
    assert comm.combine_async(out.tokens, handle).wait().equal(x)
    try:
        comm.dispatch(x[:, :32], ids)  # refused before it begins
    except ew.InvalidArgumentError:
        pass
"""

RANGES = ["dispatch", "combine", "dispatch send", "dispatch receive", "combine send", "combine receive"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library, under the name that is looked for first."""
    folder = tmp_path_factory.mktemp("nvtx")
    source = folder / "ranges.cc"
    source.write_text(LIBRARY, encoding="ascii")
    library = folder / "libnvtx3interop.so.1"
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    return folder


@pytest.mark.parametrize("asked", ["0", "1"])
def test_each_operation_is_a_range_if_asked_for(folder: Path, asked: str) -> None:
    ranges = folder / f"ranges-{asked}"
    paths = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"EXPERTWIRE_NVTX": asked, "LD_LIBRARY_PATH": paths, "RANGES_FILE": str(ranges)}
    subprocess.run([sys.executable, "-c", CALLS], env=env, check=True, timeout=60)
    lines = ranges.read_text(encoding="ascii").splitlines() if ranges.exists() else []
    assert lines == ([line for name in RANGES for line in (f"expertwire {name}", ".")] if asked == "1" else [])
