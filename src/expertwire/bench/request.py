"""From options to problems, and from problems to a report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from typing import Any, TypeVar

from rich.console import Console

from expertwire.bench.inputs import check_problem
from expertwire.bench.measure import measure, num_steps, obstacle
from expertwire.bench.progress import shown
from expertwire.bench.routing import is_trace, read_trace
from expertwire.bench.schema import Problem, Report, Run, Settings
from expertwire.bench.workloads import WORKLOADS
from expertwire.errors import InvalidArgumentError
from expertwire.machine import describe_machine, describe_versions
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

_Choice = TypeVar("_Choice", bound=Enum)
_DEFAULT_SHAPE = Problem()
_LAYOUTS = [DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR]


@dataclass(frozen=True)
class Sweep:
    """The shape options as given, each a comma list or None; every combination is one problem."""

    experts: str | None = None
    tokens: str | None = None
    hidden: str | None = None
    topk: str | None = None
    ranks: str | None = None
    layout: str = "expert-major"
    combine_mode: str = "rank-local-reduce"
    dispatch_dtype: str = "bf16"
    routing: str = "uniform"
    workload: str | None = None
    seed: int = 1

    def problems(self) -> list[Problem]:
        """Return all combinations, the last named option turning fastest. Raises InvalidArgumentError."""
        return [
            problem
            for routing in _words(self.routing)
            for problem in self._problems_with_routing(routing, self._shape(routing))
        ]

    def _shape(self, routing: str) -> Problem:
        """Return what options that are left out stand for."""
        if self.workload is not None:
            if self.workload not in WORKLOADS:
                raise InvalidArgumentError(f"--workload {self.workload!r}: must be one of {', '.join(WORKLOADS)}")
            named = WORKLOADS[self.workload]
            return Problem(named.num_experts, named.num_tokens, named.hidden_size, named.num_topk)
        if is_trace(routing):
            trace = read_trace(routing)
            return replace(
                _DEFAULT_SHAPE,
                num_experts=trace.info.num_experts,
                num_topk=trace.topk_ids.shape[2],
                hidden_size=trace.info.hidden_size,
                num_ranks=trace.info.num_ranks,
            )
        return _DEFAULT_SHAPE

    def _problems_with_routing(self, routing: str, shape: Problem) -> list[Problem]:
        axes: dict[str, Sequence[Any]] = {
            "num_experts": _integers("-e", self.experts, shape.num_experts),
            "num_topk": _integers("-k", self.topk, shape.num_topk),
            "hidden_size": _integers("-d", self.hidden, shape.hidden_size),
            "num_ranks": _integers("--ranks", self.ranks, shape.num_ranks),
            "layout": _choices("--layout", self.layout, _LAYOUTS),
            "combine_mode": _choices("--combine-mode", self.combine_mode, list(CombineMode)),
            "dispatch_dtype": _choices("--dispatch-dtype", self.dispatch_dtype, list(DispatchDataType)),
            "num_tokens": _integers("-t", self.tokens, shape.num_tokens),
        }
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return [Problem(routing=routing, seed=self.seed, **chosen) for chosen in combinations]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _integers(option: str, text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    try:
        values = [int(word) for word in _words(text)]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise InvalidArgumentError(f"{option} {text}: must be a whole number of at least 1, or a comma list of them")
    return values


def _choices(option: str, text: str, members: list[_Choice]) -> list[_Choice]:
    """Return the members named by a comma list; hyphens and underscores are alike."""
    by_name = {member.value: member for member in members}
    names = [word.lower().replace("-", "_") for word in _words(text)]
    for name in names:
        if name not in by_name:
            allowed = ", ".join(value.replace("_", "-") for value in by_name)
            raise InvalidArgumentError(f"{option} {text}: must be among {allowed}")
    return [by_name[name] for name in names]


@dataclass(frozen=True)
class Request:
    """One benchmark command."""

    libs: list[str]
    problems: list[Problem]
    settings: Settings
    command: tuple[str, ...]


def run_request(request: Request, errors: Console) -> Report:
    """Measure every problem, and show on ``errors`` where that is.

    Raises:
        InvalidArgumentError: a problem cannot be, or a routing file not be read; nothing has been measured then.
    """
    for problem in request.problems:
        check_problem(problem)
    machine = describe_machine()
    runs: list[Run] = []
    total = sum(num_steps(problem, request.settings, request.libs) for problem in request.problems)
    with shown(errors, total) as listener:
        for number, problem in enumerate(request.problems, 1):
            listener.begin(f"{number} of {len(request.problems)}: {problem.title()}")
            runs.append(measure(problem, request.settings, request.libs, listener.update))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(request.command, date, machine, describe_versions(), request.settings, tuple(runs))


def print_plan(request: Request, console: Console) -> None:
    """Print what would be measured, and measure nothing. Raises what :func:`run_request` would for a wrong problem."""
    settings = request.settings
    kind = "threads" if settings.threads else "processes"
    console.print(f"{settings.warmup} warm-up and {settings.iters} timed pairs, {settings.rounds} rounds, {kind}")
    for problem in request.problems:
        check_problem(problem)
        console.print(problem.title(), markup=False, highlight=False)
        for lib in request.libs:
            state = obstacle(lib, problem, settings) or "would be checked and timed"
            console.print(f"  {lib}: {state}", markup=False, highlight=False)
