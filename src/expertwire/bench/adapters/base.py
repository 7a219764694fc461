"""What a library must offer to be measured. One file of this folder per library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from expertwire.bench.inputs import Observation, first_difference, reference_observations
from expertwire.bench.schema import Problem, Settings
from expertwire.groups import Group
from expertwire.reference import RankInput


@dataclass(frozen=True)
class RankContext:
    """What the adapter of one rank gets.

    Attributes:
        group: the ranks of the run.
        problem: the shape.
        settings: how it is measured.
        own: this rank's input.
        exchange: all-gathers a byte string at set-up, as ``group.all_gather`` does; raises on all ranks if one failed.
    """

    group: Group
    problem: Problem
    settings: Settings
    own: RankInput
    exchange: Callable[[bytes], list[bytes]]


class Adapter(ABC):
    """One library on one rank. Construction and methods are collective: every rank calls them in the same order.

    An adapter's life: construction, ``dispatch``, ``apply_experts``, ``combine``, ``observe``; then pairs of
    ``dispatch`` and ``combine``, which alone are timed and use the first pair's expert outputs again; ``observe``;
    ``close``.

    Attributes:
        name: what ``--ep-lib`` calls it.
        notes: in one line what is timed, what moves, and what is left out.
    """

    name: ClassVar[str]
    notes: ClassVar[str]

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

    @abstractmethod
    def close(self) -> None:
        """Release everything; also after a failure."""
