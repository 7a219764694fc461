"""Reports made of seeded samples, and the command that reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from expertwire import cli
from expertwire.bench.schema import PHASES, LibResult, Problem, Report, Run, Settings, Status
from expertwire.bench.summary import summarize, with_ratios

SETTINGS = Settings(iters=50, rounds=5)
MACHINE = {"cpu": "a cpu", "usable_cores": 2, "kernel": "Linux 6.1", "load_average_1min": 0.1}
CPU_PHASES = PHASES[:3]


def measured(lib: str, median_us: float, phases: Iterable[str] = CPU_PHASES, noise: float = 0.001) -> LibResult:
    """A result of 2 ranks whose pairs take about ``median_us`` and whose other phases take half of that."""
    rng = np.random.default_rng(len(lib))
    samples = {}
    for phase in phases:
        share = 1.0 if phase.startswith("pair") else 0.5
        times = 1000 * share * median_us * (1 + noise * rng.standard_normal((2, SETTINGS.iters)))
        samples[phase] = np.maximum(times, 1).astype(np.int64)
    return LibResult(lib, Status.OK, notes="<notes>", samples=samples, phases=summarize(samples, SETTINGS, 1e6))


def report(
    runs: Iterable[tuple[Problem, list[LibResult]]],
    machine: Mapping[str, object] = MACHINE,
    versions: Mapping[str, str] = {"python": "3.11.7"},
) -> Report:
    done = tuple(Run(problem, 1e6, with_ratios(results)) for problem, results in runs)
    return Report(("expertwire", "bench"), "2026-01-01T00:00:00+00:00", dict(machine), dict(versions), SETTINGS, done)


def simple(ours_us: float = 20.0, noise: float = 0.001) -> Report:
    """Two libraries on one problem."""
    return report([(Problem(), [measured("expertwire", ours_us, noise=noise), measured("floor", 10.0)])])


def save(one: Report, path: Path) -> Path:
    path.write_text(json.dumps(one.to_json()), encoding="utf-8")
    return path


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Return the exit status of ``expertwire bench ...`` in this process."""
    monkeypatch.setattr(sys, "argv", ["expertwire", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)
