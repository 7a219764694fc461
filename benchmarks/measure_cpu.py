"""Measure what the CPU backend is held to, and write it as JSON.

``python benchmarks/measure_cpu.py`` takes a few minutes; nothing else should use the machine meanwhile. If something
did before the start, the output says so. It writes all runs as ``expertwire bench --json`` does, and the bars that are
made from them, or from measurements that no library shares. ``render_tables.py`` makes the tables from both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tables import busy_before

import expertwire
from expertwire.bench.adapters.floor import sent_tokens
from expertwire.bench.inputs import rank_input
from expertwire.bench.measure import measure
from expertwire.bench.routing import make_routing
from expertwire.bench.schema import Problem, Report, Run, Settings
from expertwire.groups import Group
from expertwire.machine import describe_machine, describe_versions
from expertwire.types import CombineMode, DispatchLayout, MoEMemoryBytes

RUNS = Path(__file__).parent / "results" / "cpu.json"
BARS = Path(__file__).parent / "cpu_bars.json"
RANK_MAJOR = Problem(layout=DispatchLayout.RANK_MAJOR)
EXPERT_MAJOR = Problem(layout=DispatchLayout.EXPERT_MAJOR, combine_mode=CombineMode.RANK_LOCAL_REDUCE)
TINY = Problem(num_experts=8, num_tokens=1, hidden_size=8, num_topk=2, num_ranks=1)
#: Ranks of the run that has more ranks than cores.
MANY_RANKS = 8
#: Seconds that the others wait for a rank that comes late, and how often.
LATE_S, LATE_TIMES = 1.0, 3


@dataclass(frozen=True)
class Bar:
    """One figure and the bound it is held against. ``spread`` is the largest of what it was made from."""

    name: str
    what: str
    unit: str
    measured: float
    bar: float
    at_most: bool = True
    spread: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields and whether the bound is kept."""
        met = self.measured <= self.bar if self.at_most else self.measured >= self.bar
        return {**self.__dict__, "met": met}


def pair_us(run: Run, lib: str = "expertwire") -> float:
    """Return the median of the slowest rank's pair, microseconds."""
    result = run.result(lib)
    if not result.phases:
        raise SystemExit(f"{lib} on {run.problem.title()}: {result.reason}")
    return result.phases["pair"].median_us


def pair_spread(*measured: tuple[Run, str]) -> float:
    """Return the largest spread of the pairs of some libraries: (largest - smallest) / median over their rounds."""
    return max(run.result(lib).phases["pair"].spread for run, lib in measured)


def written_rows(problem: Problem) -> int:
    """Return the rows that dispatch writes on all ranks: from token to rank, and for EXPERT_MAJOR into expert order."""
    routings = [make_routing(problem, rank).topk_ids for rank in range(problem.num_ranks)]
    crossing = sum(len(tokens) for topk_ids in routings for tokens in sent_tokens(problem, topk_ids))
    placed = sum(int((topk_ids >= 0).sum()) for topk_ids in routings)
    return crossing + (placed if problem.layout is DispatchLayout.EXPERT_MAJOR else 0)


def compare_libraries(settings: Settings) -> tuple[list[Bar], list[Run]]:
    """Hold both layouts against the floor and torch-a2a in one run each."""
    libs = ["expertwire", "floor", "torch-a2a"]
    rank_major, expert_major = (measure(problem, settings, libs) for problem in (RANK_MAJOR, EXPERT_MAJOR))
    to_floor = pair_us(rank_major) / pair_us(rank_major, "floor")
    to_torch = pair_us(expert_major, "torch-a2a") / pair_us(expert_major)
    of_floor = pair_spread((rank_major, "expertwire"), (rank_major, "floor"))
    of_torch = pair_spread((expert_major, "expertwire"), (expert_major, "torch-a2a"))
    said = "torch-a2a over EXPERT_MAJOR pair, 2 ranks"
    bars = [
        Bar("rank_major_to_floor", "RANK_MAJOR pair over floor, 2 ranks", "x", to_floor, 2.0, spread=of_floor),
        Bar("torch_to_expert_major", said, "x", to_torch, 4.0, at_most=False, spread=of_torch),
    ]
    return bars, [rank_major, expert_major]


def compare_rank_counts(settings: Settings) -> tuple[list[Bar], list[Run]]:
    """Hold 8 ranks against 2 ranks whose tokens are as many as it takes to write the same bytes."""
    bars, runs = [], []
    for problem in (RANK_MAJOR, EXPERT_MAJOR):
        many = replace(problem, num_ranks=MANY_RANKS)
        few = replace(problem, num_tokens=round(problem.num_tokens * written_rows(many) / written_rows(problem)))
        turns = [measure(turn, settings, ["expertwire"]) for turn in (many, few) * 2]
        ratio = median(map(pair_us, turns[0::2])) / median(map(pair_us, turns[1::2]))
        layout = many.layout.name
        what = f"{layout} pair, {MANY_RANKS} ranks over 2 ranks of T {few.num_tokens}, the same total bytes"
        spread = pair_spread(*((turn, "expertwire") for turn in turns))
        bars.append(Bar(f"many_ranks_{layout.lower()}", what, "x", ratio, 1.5, spread=spread))
        runs += turns
    return bars, runs


def waiting_share(group: Group) -> float:
    """Return the share of a core that this rank uses while rank 0 is late; 0 on rank 0 itself."""
    own = rank_input(replace(RANK_MAJOR, num_ranks=group.size), group.rank)
    config = replace(RANK_MAJOR, num_ranks=group.size).config()
    shares = []
    with expertwire.MoECommunicator(group, config) as comm:
        comm.dispatch(own.x, own.topk_ids, own.weights)
        for _ in range(LATE_TIMES):
            group.all_gather(b"")
            if group.rank == 0:
                time.sleep(LATE_S)
            wall, used = time.perf_counter(), time.process_time()
            comm.dispatch(own.x, own.topk_ids, own.weights)
            shares.append((time.process_time() - used) / (time.perf_counter() - wall))
    return median(shares) if group.rank else 0.0


def memory_of_rank(group: Group) -> MoEMemoryBytes:
    """Return the memory of one of 8 ranks."""
    with expertwire.MoECommunicator(group, replace(RANK_MAJOR, num_ranks=group.size).config()) as comm:
        return comm.memory_bytes()


def measure_costs() -> tuple[list[Bar], list[Run]]:
    """Measure what waiting, calling and memory cost."""
    bars = []
    for ranks in (2, MANY_RANKS):
        share = 100 * max(expertwire.spawn(waiting_share, ranks))
        bars.append(
            Bar(f"waiting_{ranks}", f"core used by a rank that waits {LATE_S:g} s, {ranks} ranks", "%", share, 5.0)
        )
    calls = measure(TINY, Settings(warmup=2000, iters=1000, threads=True), ["expertwire"])
    spread = pair_spread((calls, "expertwire"))
    bars.append(Bar("python_call", "dispatch + combine, T 1, H 8, one rank", "us", pair_us(calls), 30.0, spread=spread))
    with ThreadPoolExecutor(MANY_RANKS) as pool:
        held = list(pool.map(memory_of_rank, expertwire.local_group(MANY_RANKS)))
    shared = max(memory.shared for memory in held) / 2**20
    bars.append(
        Bar("shared_memory", f"shared memory of a rank, {MANY_RANKS} ranks, M 128, H 7168", "MiB", shared, 64.0)
    )
    return bars, [calls]


def main() -> None:
    """Measure everything, print each figure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=100)
    options = parser.parse_args()
    machine, settings = describe_machine(), Settings(iters=options.iters)
    if busy := busy_before(machine):
        print(f"WARNING: {busy}: figures say little", file=sys.stderr, flush=True)
    bars: list[Bar] = []
    runs: list[Run] = []
    for part in (lambda: compare_libraries(settings), lambda: compare_rank_counts(settings), measure_costs):
        part_bars, part_runs = part()
        bars += part_bars
        runs += part_runs
        for bar in part_bars:
            print(f"{bar.what}: {bar.measured:.3g} {bar.unit} (bar {bar.bar:g}, spread {bar.spread:.0%})", flush=True)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = ("python", "benchmarks/measure_cpu.py", "--iters", str(options.iters))
    report = Report(command, date, machine, describe_versions(), settings, tuple(runs))
    RUNS.write_text(json.dumps(report.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")
    BARS.write_text(json.dumps([bar.to_json() for bar in bars], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
