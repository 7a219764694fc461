"""A model of weights that are given to combine, on GPUs (docs/protocol.md), for ``state_explorer.py``. Two ranks.

Weights of a token go to the ranks that have a row of it, into a buffer of three, each of which the next combine clears
without looking. They carry no epoch: a reader takes a word that is there. A kernel has a block that exchanges packets,
and one that stores weights, waits for those of the rows it has, and clears the buffer of the combine before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from state_explorer import Step

PACKETS, WEIGHTS = range(2)  # blocks
NUM_PACKETS, NUM_BUFFERS = 2, 3
NAMES = (("stores its packet", "has seen the packet"), ("stores weights", "takes weights", "clears old weights"))


@dataclass(frozen=True)
class Scenario:
    """What the ranks do.

    Attributes:
        rows: of each operation of a lane in order: None for a dispatch, else whether rank 0 and rank 1 have rows of the
            other one in this combine.
        to_all: the mistake: weights go to every rank, also to one without rows, which does not wait for them.
        num_buffers: of weights.
    """

    rows: tuple[tuple[bool, bool] | None, ...]
    to_all: bool = False
    num_buffers: int = NUM_BUFFERS


class Rank(NamedTuple):
    operation: int = 0
    steps: tuple[int, int] = (0, 0)  # of each block


class State(NamedTuple):
    ranks: tuple[Rank, Rank] = (Rank(), Rank())
    packets: tuple[int, ...] = (0,) * 8  # of (reader, kind, epoch modulo 2)
    weights: tuple[int, ...] = ()  # of (reader, buffer): the combine that they were given to, or 0
    fault: str = ""


def _packet(reader: int, is_combine: bool, epoch: int) -> int:
    return (reader * 2 + is_combine) * NUM_PACKETS + epoch % NUM_PACKETS


class LateWeights:
    """Dispatches and combines with weights of two ranks under a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        kinds = [rows is not None for rows in scenario.rows]
        self.epochs = [1 + kinds[:index].count(kind) for index, kind in enumerate(kinds)]

    def initial(self) -> State:
        return State(weights=(0,) * (2 * self.scenario.num_buffers))

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        for me, rank in enumerate(state.ranks):
            if rank.operation == len(self.scenario.rows):
                continue
            for block in (PACKETS, WEIGHTS):
                if rank.steps[block] < self._num_steps(rank.operation, block):
                    yield from self._step(state, me, block)

    def _num_steps(self, operation: int, block: int) -> int:
        return 0 if block == WEIGHTS and self.scenario.rows[operation] is None else len(NAMES[block])

    def _step(self, state: State, me: int, block: int) -> Iterator[tuple[Step, State]]:
        rank = state.ranks[me]
        step, epoch, rows = rank.steps[block], self.epochs[rank.operation], self.scenario.rows[rank.operation]
        packets, weights, other = list(state.packets), list(state.weights), 1 - me
        fault = ""
        if block == PACKETS:
            if step == 0:
                packets[_packet(other, rows is not None, epoch)] = epoch
            elif packets[_packet(me, rows is not None, epoch)] != epoch:
                return
        elif rows is not None:
            at = me * self.scenario.num_buffers
            if step == 0 and (rows[other] or self.scenario.to_all):
                weights[other * self.scenario.num_buffers + epoch % self.scenario.num_buffers] = epoch
            elif step == 1 and rows[me]:
                found = weights[at + epoch % self.scenario.num_buffers]
                if packets[_packet(me, True, epoch)] != epoch or found == 0:
                    return
                fault = "" if found == epoch else f"rank {me} sums for combine {epoch} with the weights of {found}"
            elif step == 2:
                weights[at + (epoch - 1) % self.scenario.num_buffers] = 0
        after = state._replace(packets=tuple(packets), weights=tuple(weights), fault=fault)
        yield (me, block, step, rank.operation), self._went(after, me, block)

    def _went(self, state: State, me: int, block: int) -> State:
        rank = state.ranks[me]
        steps = (rank.steps[0] + (block == PACKETS), rank.steps[1] + (block == WEIGHTS))
        has_ended = all(steps[each] == self._num_steps(rank.operation, each) for each in (PACKETS, WEIGHTS))
        after = Rank(rank.operation + 1) if has_ended else rank._replace(steps=steps)
        ranks = (after, state.ranks[1]) if me == 0 else (state.ranks[0], after)
        return state._replace(ranks=ranks)

    def fault(self, state: State) -> str:
        return state.fault

    def final_fault(self, state: State) -> str:
        num_operations = len(self.scenario.rows)
        return "" if all(rank.operation == num_operations for rank in state.ranks) else "a rank waits for ever"

    def describe(self, step: Step) -> str:
        me, block, number, operation = step
        kind = "dispatch" if self.scenario.rows[operation] is None else "combine"
        return f"rank {me} {NAMES[block][number]} in {kind} {self.epochs[operation]}"
