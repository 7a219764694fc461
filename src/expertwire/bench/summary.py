"""From samples to figures: the slowest rank of each iteration, its distribution, and ratios between libraries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertwire.bench.schema import PHASES, LibResult, PhaseSummary, Samples, Settings


def summarize(samples: Samples, settings: Settings, bytes_per_rank: float) -> dict[str, PhaseSummary]:
    """Return the figures of each phase that has samples, in the order of PHASES, without ratios."""
    num_bytes = {phase: bytes_per_rank * _transfers(phase) for phase in PHASES}
    return {phase: _summarize(samples[phase], settings, num_bytes[phase]) for phase in PHASES if phase in samples}


def _transfers(phase: str) -> int:
    """Return how often the payload crosses in a phase; calls that nobody waits for move nothing, GEMMs neither."""
    return 0 if phase.endswith("-host") or phase.startswith("batches") else 2 if phase.startswith("pair") else 1


def hidden_us(phases: dict[str, PhaseSummary]) -> dict[str, float]:
    """Return what the overlapped orders of work save over the sequential one, by phase."""
    if "batches-sequential" not in phases:
        return {}
    sequential = phases["batches-sequential"].median_us
    overlapped = ("batches-two-streams", "batches-two-phases")
    return {phase: sequential - phases[phase].median_us for phase in overlapped if phase in phases}


def _summarize(samples: NDArray[np.int64], settings: Settings, num_bytes: float) -> PhaseSummary:
    slowest = samples.max(axis=0) / 1e3
    fastest = samples.min(axis=0) / 1e3
    median = float(np.median(slowest))
    round_medians = [float(np.median(part)) for part in np.array_split(slowest, min(settings.rounds, slowest.size))]
    return PhaseSummary(
        min_us=float(slowest.min()),
        median_us=median,
        p99_us=float(np.percentile(slowest, 99, method="inverted_cdf")),
        max_us=float(slowest.max()),
        fastest_rank_us=float(np.median(fastest)),
        gb_per_s=num_bytes / median / 1e3 if median else 0.0,
        spread=(max(round_medians) - min(round_medians)) / median if median else 0.0,
    )


def with_ratios(results: list[LibResult]) -> tuple[LibResult, ...]:
    """Return the results with, for each phase, the ratio of medians to every other measured library."""
    measured = [result for result in results if result.phases]
    return tuple(replace(result, phases=_phases_with_ratios(result, measured)) for result in results)


def _phases_with_ratios(result: LibResult, measured: list[LibResult]) -> dict[str, PhaseSummary]:
    phases = {}
    for phase, summary in result.phases.items():
        others = {
            other.lib: other.phases[phase].median_us
            for other in measured
            if other.lib != result.lib and phase in other.phases
        }
        ratios = {lib: summary.median_us / median for lib, median in others.items() if median}
        phases[phase] = replace(summary, ratio_to=ratios)
    return phases
