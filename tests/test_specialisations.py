"""The kernels of every kind of communicator compile for every kind of GPU, and nothing spills.

Of the communicators that the case and workload tables name, the best known shape is compiled in every way, and a subset
of the others in which every two choices that occur together do so at least once: layout, mode, payload, ranks, K, H,
experts, placement, architecture, SMs, and whether ids are checked and lost ranks masked.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cases import ALL_CASES, DIRECT, FP8, RANK_MAJOR, WAYS, Case
from compiling import Wanted
from expertwire.bench.workloads import WORKLOADS
from expertwire.types import PeerLossPolicy, QuantConfig

#: Kernels use nothing that only the architectures with an a have, and are compiled for those without it.
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
COMPILING = Path(__file__).with_name("compiling.py")
ALWAYS = ("deepseek-decode-8", "sm_90a")
#: Of a rank: a whole GPU, where most shapes need kernels for few tokens alone, and a share that needs those for many.
NUM_SMS = (132, 2)
#: Bound of all compilations together, on two cores that nobody else uses; others may use them, too.
ON_IDLE_CORES_S = 180
BOUND_S = 600


@dataclass(frozen=True)
class Specialisation:
    """A communicator of the tables, on an architecture; a careful one checks ids and masks lost ranks."""

    case: Case
    architecture: str
    is_careful: bool
    num_sms: int = NUM_SMS[0]

    def wanted(self) -> Wanted:
        config = self.case.config
        if self.is_careful:
            config = replace(config, validate=True, on_peer_loss=PeerLossPolicy.MASK)
        name = f"{self.case.name} on {self.num_sms} SMs" + (" careful" if self.is_careful else "")
        return Wanted(name, config, self.case.num_ranks, self.architecture, self.num_sms)

    def choices(self) -> tuple[object, ...]:
        """Return what two may differ in, with numbers by range: kernels differ in the same way."""
        case = self.case
        return (
            case.layout,
            case.combine_mode,
            case.quant,
            _range_of(case.num_ranks, 1, 2, 4, 8),
            _range_of(case.num_topk, 1, 4, 8, 22),
            (case.hidden_size % 256 == 0, _range_of(case.hidden_size, 256)),
            (case.experts_per_rank is not None, _range_of(case.num_experts // case.num_ranks, 4, 64)),
            case.placement is not None,
            self.architecture,
            self.is_careful,
            self.num_sms,
        )


def _range_of(number: int, *upper: int) -> int:
    """Return which of the ranges that end with ``upper`` a number lies in."""
    return sum(number > bound for bound in upper)


def named() -> Iterator[Specialisation]:
    """Yield every communicator of the tables with every architecture that can have it."""
    quoted = [
        Case(f"{w.name}-{ranks}", (w.num_tokens,) * ranks, w.num_experts, w.hidden_size, w.num_topk)
        for w, ranks in itertools.product(WORKLOADS.values(), (2, 8))
    ]
    cases = list(ALL_CASES)
    for case, (layout, mode), quant in itertools.product(quoted, WAYS, (QuantConfig(), FP8)):
        name = f"{case.name}-{layout.value}-{mode.value}-{quant.format.value}"
        cases.append(replace(case, name=name, layout=layout, combine_mode=mode, quant=quant))
    for case, architecture, is_careful, num_sms in itertools.product(cases, ARCHITECTURES, (False, True), NUM_SMS):
        if architecture != "sm_80" or case.quant == QuantConfig():
            yield Specialisation(case, architecture, is_careful, num_sms)


def pairs(of: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    return {(i, of[i], j, of[j]) for i, j in itertools.combinations(range(len(of)), 2)}


def pairwise() -> list[Wanted]:
    """Return communicators that show every pair of choices that occurs, each time the one that shows most new ones."""
    everything = {one.choices(): one for one in named()}
    chosen = [
        one
        for one in named()
        if one.case.name.startswith(ALWAYS[0]) and one.architecture == ALWAYS[1] and not one.is_careful
        if one.num_sms == NUM_SMS[0]
    ]
    missing = set().union(*map(pairs, everything)).difference(*(pairs(one.choices()) for one in chosen))
    while missing:
        best = max(everything, key=lambda choices: len(pairs(choices) & missing))
        missing -= pairs(best)
        chosen.append(everything[best])
    return [one.wanted() for one in chosen]


def in_two_phases() -> list[Wanted]:
    """Return two communicators with the kernels of the phases too, also by blocks, as different as they can be."""
    plain = Case("phases-plain", (64,) * 4, 64, 1024, 8)
    careful = replace(plain, name="phases", layout=RANK_MAJOR, combine_mode=DIRECT, quant=FP8)
    # On 16 SMs these need the kernels for many tokens, too.
    wanted = [
        Specialisation(plain, "sm_90a", False, 16).wanted(),
        Specialisation(careful, "sm_100a", True, 16).wanted(),
    ]
    return [replace(one, config=replace(one.config, two_phase=True, block_overlap=True)) for one in wanted]


def by_blocks() -> list[Wanted]:
    """Return communicators that combine by blocks too, of every way and architecture, careful ones among them."""
    chosen = [
        (WAYS[0], 2, "sm_90a", False),
        (WAYS[1], 2, "sm_80", True),
        (WAYS[2], 8, "sm_100a", False),
        (WAYS[3], 2, "sm_90a", False),
        (WAYS[3], 8, "sm_90a", True),
    ]
    wanted = []
    for (layout, mode), ranks, architecture, is_careful in chosen:
        name = f"blocks-{layout.value}-{mode.value}-{ranks}"
        case = Case(name, (128,) * ranks, 64, 7168, 8, layout=layout, combine_mode=mode)
        wanted.append(Specialisation(case, architecture, is_careful).wanted())
    return [replace(one, config=replace(one.config, block_overlap=True)) for one in wanted]


def compile_all(wanted: list[Wanted], folder: Path) -> list[dict[str, Any]]:
    """Compile in other processes, which keep kernels in a folder of their own."""
    file = folder / "wanted"
    file.write_bytes(pickle.dumps(wanted))
    done = subprocess.run(
        [sys.executable, str(COMPILING), str(file)],
        env=os.environ | {"EXPERTWIRE_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(BOUND_S + 20)
def test_no_specialisation_spills(tmp_path: Path) -> None:
    wanted = pairwise() + in_two_phases() + by_blocks()
    assert {one.architecture for one in wanted} == set(ARCHITECTURES)
    results = compile_all(wanted, tmp_path)
    assert len(results) == len(wanted)
    failed = [f"{one['name']} {one['architecture']}: {one['error']}" for one in results if "error" in one]
    assert not failed, "\n".join(failed)
    assert sum(one["cpu_seconds"] for one in results) < 2 * ON_IDLE_CORES_S
    for one in results:
        assert {kernel["kernel"] for kernel in one["kernels"]} == {"dispatch_kernel", "combine_kernel"}
    spilling = [
        f"{one['name']} {one['architecture']} {kernel['kernel']}: {kernel['spill_bytes']} bytes, "
        f"{kernel['registers']} registers"
        for one in results
        for kernel in one["kernels"]
        if kernel["spill_bytes"]
    ]
    assert not spilling, f"{len(spilling)} kernels spill:\n" + "\n".join(sorted(spilling))
