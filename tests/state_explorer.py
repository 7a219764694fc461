"""Explicit-state model checking: every state that a small concurrent protocol can reach, breadth first.

Breadth first, so that the trace of a broken invariant is a shortest one. A protocol is a few methods over hashable
states (:class:`Model`); ``protocol_model.py`` holds those of expertwire.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Step = tuple[Any, ...]


class Model(Protocol[State]):
    """What :func:`explore` asks of a protocol."""

    def initial(self) -> State: ...

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Every atomic step that some participant can take next, and the state after it."""
        ...

    def fault(self, state: State) -> str:
        """The invariant that this state breaks, or an empty string."""
        ...

    def final_fault(self, state: State) -> str:
        """The same for a state in which no step is left to take."""
        ...

    def describe(self, step: Step) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """Result of :func:`explore`: sizes, and the broken invariant (empty if none) with the steps that lead to it."""

    num_states: int
    num_steps: int
    num_finals: int
    fault: str = ""
    trace: tuple[str, ...] = ()


def explore(model: Model[State], max_states: int = 2_000_000) -> Outcome:
    """Visit all reachable states and stop at the first broken invariant. Raises MemoryError past ``max_states``."""
    collects = gc.isenabled()
    gc.disable()  # tuples of numbers hold no cycles, and looking for some takes most of the time
    try:
        return _explore(model, max_states)
    finally:
        if collects:
            gc.enable()


def _explore(model: Model[State], max_states: int) -> Outcome:
    start = model.initial()
    came_from: dict[State, tuple[State, Step] | None] = {start: None}
    queue = deque([start])
    num_steps = num_finals = 0
    while queue:
        state = queue.popleft()
        fault = model.fault(state)
        stuck = not fault
        if not fault:
            for step, successor in model.successors(state):
                stuck = False
                num_steps += 1
                if successor not in came_from:
                    came_from[successor] = (state, step)
                    queue.append(successor)
            if len(came_from) > max_states:
                raise MemoryError(f"more than {max_states} states")
        if stuck:
            num_finals += 1
            fault = model.final_fault(state)
        if fault:
            return Outcome(len(came_from), num_steps, num_finals, fault, _trace(model, came_from, state))
    return Outcome(len(came_from), num_steps, num_finals)


def _trace(model: Model[State], came_from: dict[State, tuple[State, Step] | None], state: State) -> tuple[str, ...]:
    steps = []
    link = came_from[state]
    while link is not None:
        steps.append(model.describe(link[1]))
        link = came_from[link[0]]
    return tuple(reversed(steps))
