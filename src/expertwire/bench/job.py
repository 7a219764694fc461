"""What the ranks are told, and what they report: through files, so that a rank that dies takes no figures with it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from expertwire.bench.schema import Problem, Settings

#: Starts the text of a failure that is no fault: the library refuses the shape.
REFUSED = "refused: "
#: Starts the text of a failure that is a wrong result.
WRONG = "wrong result: "


class FailedElsewhereError(Exception):
    """A step failed, on whichever rank, and every rank knows: nothing more is to be said about it."""


@dataclass
class RankTimes:
    """What one rank measured of one library.

    Attributes:
        samples: nanoseconds of each timed call, by phase.
        missing: phases that could not be timed, and why.
        failure: what went wrong, on whichever rank; then the samples do not count.
    """

    samples: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Job:
    """One problem for all ranks.

    Attributes:
        problem: the shape.
        settings: how to measure.
        libs: the libraries, in the order of their turns.
        kernels: time the kernels alone; otherwise everything else.
        folder: of the problem's files.
        attempt: counts how often processes broke over the problem.
    """

    problem: Problem
    settings: Settings
    libs: tuple[str, ...]
    kernels: bool
    folder: Path
    attempt: int = 0

    def expected_path(self, lib: str, rank: int) -> Path:
        """Return the file of what ``lib`` must observe on ``rank``."""
        return self.folder / f"{lib}.{rank}.npz"

    @property
    def num_steps(self) -> int:
        """Every library is set up, then all take turns; or each is set up and traced at once."""
        return len(self.libs) * (1 if self.kernels else 1 + len(self.settings.parts()))

    def doing(self, num_steps: int) -> str:
        """Return what follows after so many steps."""
        if num_steps >= self.num_steps:
            return "last check"
        turn, lib = divmod(num_steps, len(self.libs))
        what = "kernels" if self.kernels else f"round {turn}" if turn else "set-up and warm-up"
        return f"{self.libs[lib]}: {what}"

    def lib_in_turn(self) -> str:
        """Return the library that is at work, or was when the ranks ended."""
        return self.libs[self.steps_done() % len(self.libs)]

    def without(self, libs: Collection[str]) -> Job:
        """Return the same job for the other libraries."""
        return replace(self, libs=tuple(lib for lib in self.libs if lib not in libs))

    def again(self) -> Job:
        """Return the same job as if nothing had been done of it."""
        return replace(self, attempt=self.attempt + 1)

    def count_step(self) -> None:
        """Note, on rank 0, that a step is done."""
        with self._steps_path.open("ab") as steps:
            steps.write(b".")

    def steps_done(self) -> int:
        """Return how many steps are done."""
        return self._steps_path.stat().st_size if self._steps_path.exists() else 0

    def write_times(self, rank: int, times: dict[str, RankTimes]) -> None:
        """Leave what a rank measured. A rank that cannot go on leaves the libraries out that it has not measured."""
        path = self._times_path(rank)
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps({lib: asdict(own) for lib, own in times.items()}), encoding="utf-8")
        part.rename(path)

    def read_times(self) -> dict[str, list[RankTimes]]:
        """Return what the ranks have left, for each library that all of them name."""
        paths = [self._times_path(rank) for rank in range(self.problem.num_ranks)]
        ranks = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths]
        return {lib: [RankTimes(**own[lib]) for own in ranks] for lib in self.libs if all(lib in own for own in ranks)}

    @property
    def _steps_path(self) -> Path:
        return self.folder / f"steps.{self._stage}"

    def _times_path(self, rank: int) -> Path:
        return self.folder / f"times.{self._stage}.{rank}"

    @property
    def _stage(self) -> str:
        return f"{'kernels' if self.kernels else 'turns'}.{self.attempt}"


def in_one_line(error: BaseException) -> str:
    """Return an error's kind and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
