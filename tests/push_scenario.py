"""What may befall ranks that push, and the deliberate errors, for ``push_model.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from protocol_model import GiveUp


class Break(Enum):
    """A deliberate error in the protocol. The model has to notice each of them."""

    NONE = auto()
    SINGLE_BUFFER = auto()  # one buffer a kind in place of two
    CONSTANT_PACKET = auto()  # packets say "1, here" in place of an epoch
    CAPTURED_EPOCH = auto()  # epochs come from the host, so that a replayed graph has its old ones again
    UNPERFORMED_CLEARING = auto()  # a kernel begins before the clearing by the one before has been performed
    SKIP_SILENT = auto()  # packets of ranks that send no rows are not looked at
    NO_CLEARING = auto()  # rows are left where they were read
    NO_DEPENDENCY_WAIT = auto()  # a block begins before the other blocks of the kernel before have ended
    NO_SETTLING = auto()  # each block decides for itself who is absent
    NO_BEATS = auto()  # a rank that waits for others looks like one that does not come
    NO_VERDICT = auto()  # a rank that was given up is not told
    SILENT_PACKETS = auto()  # packets do not say that there are losses to tell of
    TRUST_LOST = auto()  # a lost rank's words are read like any other's
    UNDATED_WORD = auto()  # what a block says of counts does not say in which operation
    SHARED_SLOTS = auto()  # rows of different sources arrive in one place
    ENDED_SENDS = auto()  # kernels that follow one that has ended the communicator store all the same
    SUMS_WITHOUT_WEIGHTS = auto()  # a rank whose wait for weights has expired sums without them


@dataclass(frozen=True)
class Scenario:
    """What the ranks do and what may befall them.

    Attributes:
        num_ranks: ranks.
        program: operations in order, e.g. ``"D0 C0 D1"``: dispatch or combine, and the lane; W stands for a combine
            whose rows are sums with weights that come from their reader, beside its packet.
        mask: policy on loss: go on without the lost ranks, or raise.
        give_up: when a rank may be given up; at any time means unless it says that it waits.
        max_deaths: how many ranks may die, each before any of its steps.
        late: ranks that may be given up although they live; None: all of them.
        cut: (source, reader) pairs between whom nothing that is stored arrives.
        num_blocks: of a kernel: 2, or 1.
        in_turn: words are stored and awaited one rank after another. Otherwise they are awaited in any order.
        sends: (operation index, source, reader) triples with a row; None: all of them.
        change: the deliberate error.
    """

    num_ranks: int
    program: str
    mask: bool = False
    give_up: GiveUp = GiveUp.NEVER
    max_deaths: int = 0
    late: frozenset[int] | None = None
    cut: frozenset[tuple[int, int]] = frozenset()
    num_blocks: int = 2
    in_turn: bool = False
    sends: frozenset[tuple[int, int, int]] | None = None
    change: Break = Break.NONE


@dataclass(frozen=True)
class Operation:
    index: int
    name: str
    channel: int  # words for each (kind, lane)
    serial: int  # 1, 2, ... within the channel, what rows are marked with
    epoch: int
    buffer: int

    @property
    def has_counts(self) -> bool:
        return self.name[0] == "D"

    @property
    def awaits_weights(self) -> bool:
        return self.name[0] == "W"


def operations_of(scenario: Scenario) -> list[Operation]:
    """Return the operations of a program, each with its place in its channel."""
    operations: list[Operation] = []
    channels: dict[str, int] = {}
    serials: dict[str, int] = {}
    for index, name in enumerate(scenario.program.split()):
        channel = channels.setdefault(name, len(channels))
        serial = serials[name] = serials.get(name, 0) + 1
        epoch = 1 if scenario.change is Break.CAPTURED_EPOCH else serial
        buffer = 0 if scenario.change is Break.SINGLE_BUFFER else epoch % 2
        operations.append(Operation(index, name, channel, serial, epoch, buffer))
    return operations


def words_of(part: Any) -> str:
    if not isinstance(part, Operation):
        return str(part)
    kind = {"D": "dispatch", "C": "combine", "W": "combine with weights"}[part.name[0]]
    return f"{kind} {part.serial} (lane {part.name[1:]})"
