"""``expertwire-cpp``: the C++ MoERuntime, timed by a program without Python that the package brings along."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from expertwire.bench.adapters.base import Program
from expertwire.bench.child import run_child
from expertwire.bench.inputs import rank_input
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Samples, Settings
from expertwire.errors import Error
from expertwire.nvrtc import find_nvrtc_folders

#: Where the package has its program.
PROGRAM = Path(__file__).parents[2] / "bin" / "expertwire-bench"
#: The program may take this much longer than the longest wait for a rank: inputs, checks, a compiler, many pairs.
_GRACE_S = 900.0


class ExpertwireCpp(Program):
    """The program is given the inputs of all libraries, checks them against a reference of its own, and times them."""

    name = "expertwire-cpp"
    notes = "C++ calls, no Python in the process, ranks are threads; not in turns with the others"

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> str:
        """Return why there are no figures."""
        del problem
        if nodes is not None:
            return "its ranks are threads of one process, without MPI: leave --nodes out"
        if not PROGRAM.is_file():
            return f"not installed: this package was built without its program {PROGRAM.name}"
        return "" if settings.host_rows else "does not time kernels alone"

    @classmethod
    def measure(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> Samples:
        """Run the program and return its samples. Raises Error with what it said if it failed."""
        del nodes
        with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
            write_inputs(problem, Path(folder))
            result = Path(folder) / "result.json"
            limit = settings.timeout_s + _GRACE_S
            try:
                done = run_child(command(problem, settings, folder, result), limit)
            except subprocess.TimeoutExpired:
                raise Error(f"{PROGRAM.name} was not done after {limit:.0f} s") from None
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
                raise Error(said[-1])
            stored = json.loads(result.read_text(encoding="utf-8"))
        samples = stored["runs"][0]["results"][0]["samples"]
        return {phase: np.array(times, np.int64) for phase, times in samples.items()}


def write_inputs(problem: Problem, folder: Path) -> None:
    """Write what the ranks bring as the program reads it: raw elements, a file for each array of each rank."""
    for rank in range(problem.num_ranks):
        own = rank_input(problem, rank)
        weights = np.ones(own.topk_ids.shape, np.float32) if own.weights is None else own.weights
        for name, array in (("x", own.x), ("topk_ids", own.topk_ids.astype(np.int64)), ("weights", weights)):
            (folder / f"{rank}.{name}").write_bytes(np.ascontiguousarray(array).tobytes())


def command(problem: Problem, settings: Settings, folder: str, result: Path) -> list[str]:
    """Return the command line that measures ``problem`` with the inputs in ``folder``."""
    options: dict[str, object] = {
        "-e": problem.num_experts,
        "-t": problem.num_tokens,
        "-d": problem.hidden_size,
        "-k": problem.num_topk,
        "--ranks": problem.num_ranks,
        "--layout": problem.layout.value,
        "--combine-mode": problem.combine_mode.value,
        "--dispatch-dtype": problem.dispatch_dtype.value,
        "--inputs": folder,
        "-w": settings.warmup,
        "-i": settings.iters,
        "--rounds": settings.rounds,
        "--timeout": settings.timeout_s,
        "--json": result,
    }
    flags = ["--validate"] if settings.validate else []
    if settings.device == "cuda":
        options["--backend"] = "cuda"
        if settings.cuda_graph:
            options["--iters-per-graph"] = settings.iters_per_graph
        else:
            flags.append("--no-cuda-graph")
        if problem.num_blocks:
            options["--num-blocks"] = ",".join(map(str, problem.num_blocks))
        if folders := find_nvrtc_folders():
            options["--nvrtc-dir"] = folders[0]
    return [str(PROGRAM), *(str(word) for option in options.items() for word in option), *flags]
