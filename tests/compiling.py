"""Compiles the kernels of many communicators side by side, into the cache, without a GPU.

    python tests/compiling.py WANTED [PROCESSES]

WANTED is a pickled list of :class:`Wanted`; a line of JSON is printed for each, as it is done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertwire as ew
from expertwire.precompile import precompile


@dataclass(frozen=True)
class Wanted:
    """A communicator on GPUs of one architecture.

    Attributes:
        name: what to call it.
        config: its configuration.
        num_ranks: R.
        architecture: such as ``"sm_90"``.
        num_sms: of a GPU, those that each rank has to itself; 0 compiles what any GPU may need.
    """

    name: str
    config: ew.MoECommunicatorConfig
    num_ranks: int
    architecture: str
    num_sms: int = 0


def compile_one(wanted: Wanted) -> dict[str, Any]:
    """Return what became of one: an error, or what each kernel takes of a thread."""
    started = time.process_time()
    told: dict[str, Any] = {"name": wanted.name, "architecture": wanted.architecture}
    try:
        images = precompile(wanted.config, wanted.num_ranks, wanted.architecture, wanted.num_sms)
    except ew.Error as error:
        return told | {"error": f"{type(error).__name__}: {error}"}
    kernels = [
        {"kernel": name, "registers": of.registers, "stack_bytes": of.stack_bytes, "spill_bytes": of.spill_bytes}
        for image in images
        for name, of in image.resources.items()
    ]
    num_compiled = sum(not image.from_cache for image in images)
    return told | {"kernels": kernels, "num_compiled": num_compiled, "cpu_seconds": time.process_time() - started}


def main(file: Path, num_processes: int) -> None:
    """Compiles everything that a file asks for."""
    wanted = pickle.loads(file.read_bytes())  # noqa: S301 (made by these tests)
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("forkserver")) as pool:
        for done in as_completed([pool.submit(compile_one, one) for one in wanted]):
            print(json.dumps(done.result()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else len(os.sched_getaffinity(0)))
