"""What a library must offer to be measured. One file of this folder per library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from expertwire.bench.inputs import Observation, first_difference, reference_observations
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Samples, Settings
from expertwire.groups import Group
from expertwire.reference import RankInput
from expertwire.types import DispatchDataType, DispatchLayout

ALL_LAYOUTS = (DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR)


def refused(problem: Problem, layouts: Sequence[DispatchLayout], dtypes: Sequence[DispatchDataType]) -> str:
    """Return which mode of the problem a library does not do, or an empty string."""
    for value, allowed in ((problem.layout, layouts), (problem.dispatch_dtype, dtypes)):
        if value not in allowed:
            return f"refused: {str(value.value).replace('_', '-')} is not among what this library does here"
    return ""


class Belongings:
    """What this rank's process makes once and uses for many problems, such as a process group of torch."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._closing = ExitStack()

    def once(self, name: str, make: Callable[[], Any], close: Callable[[Any], object] | None = None) -> Any:
        """Return what ``make`` returned when the name was first asked for."""
        if name not in self._made:
            self._made[name] = made = make()
            if close is not None:
                self._closing.callback(close, made)
        return self._made[name]

    def close(self) -> None:
        """Close everything, the newest first."""
        self._made.clear()
        self._closing.close()


@dataclass(frozen=True)
class RankContext:
    """What the adapter of one rank gets.

    Attributes:
        group: the ranks of the run.
        problem: the shape.
        settings: how it is measured.
        own: this rank's input.
        exchange: all-gathers a byte string at set-up, as ``group.all_gather`` does; raises on all ranks if one failed.
        belongings: what outlives the problem.
    """

    group: Group
    problem: Problem
    settings: Settings
    own: RankInput
    exchange: Callable[[bytes], list[bytes]]
    belongings: Belongings

    @property
    def device(self) -> str:
        """Where this rank's arrays lie: ``"cpu"``, or the GPU of this rank."""
        return f"cuda:{self.group.rank}" if self.settings.device == "cuda" else "cpu"


class Adapter(ABC):
    """One library on one rank. Construction and methods are collective: every rank calls them in the same order.

    An adapter's life: construction, ``dispatch``, ``apply_experts``, ``combine``, ``observe``; then pairs of
    ``dispatch`` and ``combine``, which alone are timed and use the first pair's expert outputs again; ``observe``;
    ``close``. On GPUs the two only launch work on torch's current stream.

    Attributes:
        name: what ``--ep-lib`` calls it.
        notes: in one line what is timed, what moves, and what is left out.
        blocking: why its calls wait for the GPU, so that no graph can be captured; empty if they do not.
    """

    name: ClassVar[str]
    notes: ClassVar[str]
    blocking: ClassVar[str] = ""

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings) -> str:
        """Return in one line why this library cannot run the problem here and what to do, or an empty string."""
        del problem, settings
        return ""

    @classmethod
    def expected(cls, problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
        """Return what ``observe`` must return on each rank. Not derived from the library."""
        return reference_observations(problem, inputs)

    @classmethod
    def difference(cls, observed: Observation, expected: Observation) -> str:
        """Return what is wrong with an observation, or an empty string. Bit-exact unless a library overrides it."""
        return first_difference(observed, expected)

    @abstractmethod
    def __init__(self, context: RankContext) -> None: ...

    @abstractmethod
    def dispatch(self) -> None:
        """Send this rank's tokens and receive those for its experts."""

    @abstractmethod
    def apply_experts(self) -> None:
        """Make the input of ``combine`` from what the last ``dispatch`` received."""

    @abstractmethod
    def combine(self) -> None:
        """Return expert outputs to the ranks of their tokens and sum them."""

    @abstractmethod
    def observe(self) -> Observation:
        """Return what the last pair produced on this rank."""

    def forget(self) -> None:  # noqa: B027 (a library whose outputs are new ones has nothing to do)
        """Spoil the outputs, if they are used again, so that ``observe`` sees nothing but what a later pair writes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; also after a failure."""


class Program(ABC):
    """A library that a program of its own measures, on all ranks, after the others: it cannot take turns with them.

    Attributes:
        name: what ``--ep-lib`` calls it.
        notes: in one line what is timed, what moves, and what is left out.
    """

    name: ClassVar[str]
    notes: ClassVar[str]

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> str:
        """Return in one line why this program cannot run the problem here and what to do, or an empty string."""
        del problem, settings, nodes
        return ""

    @classmethod
    @abstractmethod
    def measure(cls, problem: Problem, settings: Settings, nodes: Nodes | None = None) -> Samples:
        """Run the program, which checks results itself. Raises Error if it breaks or a result is wrong."""
