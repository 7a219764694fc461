"""Benchmark programs that others ship and a user has built: run under mpirun, and their own summary taken over."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import numpy as np

from expertwire.bench.adapters.base import ALL_LAYOUTS, Program, refused
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Samples, Settings
from expertwire.errors import Error
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

_LIMIT_S = 600.0
_HERE = Nodes(("localhost",))
#: What a program calls an operation in a line such as "Dispatch (BF16): avg=12.3 us, min=...", and what it is here.
_LINES = {"Dispatch": "dispatch-launch", "Combine": "combine-launch", "Total": "pair-launch"}


class Prebuilt(Program):
    """A program that takes the shape, makes inputs of its own and prints averages.

    Attributes:
        option: which names it.
        layouts: what it returns.
        dtypes: what it is told to send.
    """

    option: ClassVar[str]
    layouts: ClassVar[tuple[DispatchLayout, ...]] = ALL_LAYOUTS
    dtypes: ClassVar[tuple[DispatchDataType, ...]] = (DispatchDataType.BF16,)

    @classmethod
    def path(cls, settings: Settings) -> str:
        """Return where the program lies; empty if nobody said so."""
        raise NotImplementedError

    @classmethod
    def command(cls, problem: Problem, settings: Settings) -> list[str]:
        """Return the command line, behind that of mpirun."""
        shape = {"-t": problem.num_tokens, "-d": problem.hidden_size, "-k": problem.num_topk, "-e": problem.num_experts}
        counts = {"-w": settings.warmup, "-i": settings.iters}
        words = [str(word) for pair in (shape | counts).items() for word in pair]
        return [cls.path(settings), "-a", "ll", *words]

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> str:
        """Return what is missing or what the program cannot be told."""
        path = cls.path(settings)
        if settings.device != "cuda":
            return "needs NVIDIA GPUs: --device cuda"
        if not path:
            return f"not installed: build it and name it with {cls.option}"
        obstacles = {
            f"{cls.option} {path}: is no program": not (Path(path).is_file() and os.access(path, os.X_OK)),
            "needs mpirun: apt-get install openmpi-bin": shutil.which((nodes or _HERE).mpirun) is None,
            "does not time kernels alone here": not settings.host_rows,
            "refused: makes uniform routing of its own": problem.routing != "uniform",
        }
        return next((why for why, stands in obstacles.items() if stands), refused(problem, cls.layouts, cls.dtypes))

    @classmethod
    def measure(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> Samples:
        """Run the program and return its averages, each as the only sample."""
        variables = ["-x", f"LD_LIBRARY_PATH={settings.nccl_lib_path}"] if settings.nccl_lib_path else []
        program = [*variables, *cls.command(problem, settings)]
        try:
            done = (nodes or _HERE).launch(problem.num_ranks, program, _LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Error(f"{cls.name} was not done after {_LIMIT_S:.0f} s") from None
        samples = parse_summary(done.stdout)
        if done.returncode or not samples:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise Error(f"{cls.name} ended with status {done.returncode}: {said[-1]}")
        return samples


def parse_summary(text: str) -> Samples:
    """Return the averages of a program's summary as nanoseconds; empty if there is none."""
    samples = {}
    for name, phase in _LINES.items():
        if found := re.search(rf"^\s*{name} \([^)]*\):\s+avg=([\d.]+)\s*us", text, re.MULTILINE):
            samples[phase] = np.array([[round(float(found[1]) * 1e3)]], np.int64)
    return samples


class NcclEpBench(Prebuilt):
    """``ep_bench`` of NCCL EP."""

    name = "nccl-ep-bench"
    option = "--nccl-ep-bench"
    notes = "ep_bench of NCCL EP: inputs and method of its own, not checked here; its averages, not in turns"

    @classmethod
    def path(cls, settings: Settings) -> str:
        """Return ``--nccl-ep-bench``."""
        return settings.nccl_ep_bench

    @classmethod
    def command(cls, problem: Problem, settings: Settings) -> list[str]:
        """Return the command line with the layout."""
        layout = "rm" if problem.layout is DispatchLayout.RANK_MAJOR else "em"
        return [*super().command(problem, settings), "-L", layout]


class MscclppCppBench(Prebuilt):
    """``mscclpp_ep_bench`` of MSCCL++."""

    name = "mscclpp-cpp-bench"
    option = "--mscclpp-cpp-bench"
    layouts = (DispatchLayout.EXPERT_MAJOR,)
    dtypes = (DispatchDataType.BF16, DispatchDataType.FP8_E4M3)
    notes = "mscclpp_ep_bench: inputs and method of its own, not checked here; its averages, not in turns"

    @classmethod
    def path(cls, settings: Settings) -> str:
        """Return ``--mscclpp-cpp-bench``."""
        return settings.mscclpp_cpp_bench

    @classmethod
    def command(cls, problem: Problem, settings: Settings) -> list[str]:
        """Return the command line with payload and combine mode."""
        dtype = "fp8_e4m3" if problem.dispatch_dtype is DispatchDataType.FP8_E4M3 else "bf16"
        mode = "direct_send" if problem.combine_mode is CombineMode.DIRECT_SEND else "rank_local_reduce"
        return [*super().command(problem, settings), "--dispatch-dtype", dtype, "--combine-mode", mode]
