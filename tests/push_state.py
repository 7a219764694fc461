"""What a state of ``push_model.py`` consists of."""

from __future__ import annotations

from typing import NamedTuple

RUNS, DONE, RAISED, DEAD = range(4)
ENTER, SEND, TAKE, SETTLE, REST, ENDED = range(6)
WAITING = (TAKE, SETTLE, REST)
COUNT, PACKET, ROW = range(3)
NAMES = ("count", "packet", "row")
FIRST = 0  # the block that sends packets
UNSEEN, SEEN, MISSED = range(3)
LOSSES = 1  # a packet is epoch * 2, plus this flag if its sender has losses to tell of


class Block(NamedTuple):
    operation: int = 0
    phase: int = ENTER
    num_sent: int = 0
    seen: tuple[int, ...] = ()  # of each word that is awaited in this phase
    absent: int = 0  # set of ranks
    published: int = -1  # set of ranks whose counts this block has given up; -1: it has not spoken


class Rank(NamedTuple):
    status: int = RUNS
    blocks: tuple[Block, ...] = ()
    lost_in: tuple[int, ...] = ()  # 1 + index of the operation in which each rank was lost, or 0
    is_given_up: bool = False
    uncleared: int = 0  # set of row words that were cleared, which is not yet to be seen
    starts: tuple[int, int] = (0, 0)  # who was lost when the operation before began, and this one
    ended_in: int = 0  # 1 + index of the operation in which a wait has ended the communicator, or 0


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    words: tuple[int, ...]
    notices: tuple[int, ...]  # of (source, reader): a set of ranks
    fault: str = ""
