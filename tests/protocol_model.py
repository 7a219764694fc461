"""Models of the wire protocol for ``state_explorer.py``: a few ranks and operations, one step for each atomic access.

:class:`PullProtocol` is the protocol of the CPU backend (docs/protocol.md): a rank fills its own buffer, posts the
epoch in its own word, and then reads what the others hold for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from state_explorer import Step


class GiveUp(Enum):
    """When a rank may stop waiting for another."""

    NEVER = auto()  # no time-outs: what remains must not hang by itself
    GONE = auto()  # only for a rank that has died or closed: what pidfd and the closed mark tell
    ANY_TIME = auto()  # also for a rank that is merely slow: time-outs of any length


class Change(Enum):
    """A deliberate error in the protocol. The model has to notice each of them."""

    NONE = auto()
    SINGLE_BUFFER = auto()  # one buffer a kind in place of two
    POST_BEFORE_WRITE = auto()  # the word is posted before the data is complete
    SKIP_SILENT = auto()  # ranks that send nothing are not observed
    CONSTANT_FLAG = auto()  # the word says "1, posted" in place of an epoch
    BLIND_LOST = auto()  # LOST is stored without comparing
    BLIND_POST = auto()  # the epoch is stored without comparing
    LOST_WITHOUT_EPOCH = auto()  # LOST does not say from which epoch on
    NO_RECHECK = auto()  # a rank does not look at its own word once more after it has read
    RECHECK_UNDER_RAISE = auto()  # it does so also where nobody goes on without a lost rank
    EXACT_WAIT = auto()  # only the epoch itself counts as posted, not the one after it
    IGNORE_AHEAD = auto()  # a word further ahead than that is waited for as if it were behind
    SKIP_KNOWN_LOST = auto()  # words of a rank known as lost are left as they are
    TRUST_KNOWN_LOST = auto()  # words of a rank known as lost are read like any other's
    LOST_IS_ABSENT = auto()  # a rank that is lost is absent also from what was sent before it was known to be
    NO_CLOSE = auto()  # a rank that closes leaves no mark for those that wait for it


@dataclass(frozen=True)
class Scenario:
    """What the ranks do and what may befall them.

    Attributes:
        num_ranks: ranks.
        program: operations in order, e.g. ``"D0 E0 C0 D1"``: dispatch, entry of a combine, or combine; and the lane.
            ``"D0<"`` only sends, and ``"D0>"`` receives what was sent last on the lane.
        programs: (rank, program) of ranks that receive in another order. All send in the same.
        mask: policy on loss: go on without the lost ranks, or raise.
        give_up: when a rank may be given up.
        max_deaths: how many ranks may die, each before any of its steps.
        leaves_after: (rank, operations): this rank closes early, after so many operations.
        silent: (operation index, source, reader) triples for which the source holds nothing.
        unheard: such triples of entries that the reader does not wait for: the combine behind it observes all.
        in_turn: peers are observed and read one after another by rank. Otherwise in any order, and any number is
            observed before the first is read: more states, and every implementation is among them.
        num_epochs: epochs run 1 ... num_epochs and start again at 1.
        change: the deliberate error.
    """

    num_ranks: int
    program: str
    programs: tuple[tuple[int, str], ...] = ()
    mask: bool = False
    give_up: GiveUp = GiveUp.ANY_TIME
    max_deaths: int = 0
    leaves_after: tuple[int, int] | None = None
    silent: frozenset[tuple[int, int, int]] = field(default_factory=frozenset)
    unheard: frozenset[tuple[int, int, int]] = field(default_factory=frozenset)
    in_turn: bool = False
    num_epochs: int = 64
    change: Change = Change.NONE


RUNS, DONE, RAISED, DEAD = range(4)
WRITE_FIRST, WRITE_SECOND, POST, GATHER = range(4)
# What a rank knows of another in the operation it is in. It only ever grows, and so do words and phases: no step can be
# repeated, every path ends, and a rank that cannot go on shows as one that waits for ever.
UNSEEN, GIVING_UP, TOLD, POSTED, HALF_READ, READ, ABSENT = range(7)
AHEAD = 7  # a verdict only
LOST = 1  # a word is epoch last posted * 2, plus this flag once its owner has been given up
BARE_LOST = -1  # a word under LOST_WITHOUT_EPOCH


@dataclass(frozen=True)
class _Operation:
    index: int
    name: str
    channel: int  # words and buffers: one for each (kind, lane)
    serial: int  # 1, 2, ... within the channel, what data is marked with
    epoch: int  # the serial number as a word holds it
    previous_epoch: int
    next_epoch: int
    buffer: int


# One rank: (status, place in its program, phase, what it knows of each rank in it, has read wrong data, losses). A loss
# is one more than the operations that had been sent when the rank was lost, and 0 of one that is not.
_Rank = tuple[int, int, int, tuple[int, ...], bool, tuple[int, ...]]
# All: (ranks, words by rank and channel, halves by rank and channel and buffer, participants by operation, fault)
_State = tuple[tuple[_Rank, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], str]


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


class PullProtocol:
    """The CPU backend's protocol under a scenario. Memory is sequentially consistent; docs/protocol.md says more."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.change = scenario.change
        self.operations: list[_Operation] = []
        channels: dict[str, int] = {}
        serials: dict[str, int] = {}
        for name in (part.rstrip("<") for part in scenario.program.split() if not part.endswith(">")):
            channel = channels.setdefault(name, len(channels))
            serial = serials[name] = serials.get(name, 0) + 1
            before, epoch, after = ((serial + shift) % scenario.num_epochs + 1 for shift in (-2, -1, 0))
            buffer = 0 if self.change is Change.SINGLE_BUFFER else epoch % 2
            before = 0 if serial == 1 else before
            index = len(self.operations)
            self.operations.append(_Operation(index, name, channel, serial, epoch, before, after, buffer))
        self.num_channels = len(channels)
        own = dict(scenario.programs)
        self.programs = [self._program(own.get(rank, scenario.program)) for rank in range(scenario.num_ranks)]
        # By rank and place: operations that are still to be received from there on, as bits; how many have been sent.
        self.awaited = [
            [sum(1 << step[0].index for step in program[at:] if step[2]) for at in range(len(program) + 1)]
            for program in self.programs
        ]
        self.num_sent = [
            [sum(step[1] for step in program[: at + 1]) for at in range(len(program))] for program in self.programs
        ]
        self.is_split = "<" in scenario.program
        self.order = (WRITE_FIRST, WRITE_SECOND, POST, GATHER)
        if self.change is Change.POST_BEFORE_WRITE:
            self.order = (POST, WRITE_FIRST, WRITE_SECOND, GATHER)
        self.everyone = (1 << scenario.num_ranks) - 1

    def _program(self, text: str) -> list[tuple[_Operation, bool, bool]]:
        """What a rank does, one after another: (operation, sends it, receives it)."""
        steps: list[tuple[_Operation, bool, bool]] = []
        sent = 0
        for part in text.split():
            if part.endswith(">"):
                last = next(step[0] for step in reversed(steps) if step[1] and step[0].name == part[:-1])
                steps.append((last, False, True))
            else:
                steps.append((self.operations[sent], True, not part.endswith("<")))
                assert self.operations[sent].name == part.rstrip("<"), "ranks send in the same order"
                sent += 1
        return steps

    def initial(self) -> _State:
        ranks = self.scenario.num_ranks
        words = (0,) * (ranks * self.num_channels)
        nobody = (0,) * ranks
        starts = tuple(self._begin(rank, 0, nobody) for rank in range(ranks))
        return starts, words, (0,) * (len(words) * 4), (0,) * len(self.operations), ""

    def _begin(self, me: int, place: int, lost: tuple[int, ...], wrong: bool = False) -> _Rank:
        if place < len(self.programs[me]) and not self.programs[me][place][1]:
            return RUNS, place, self.order.index(GATHER), self._seen_first(me, place, lost), wrong, lost
        return RUNS, place, 0, (), wrong, lost

    def _end(self, status: int, num_completed: int) -> _Rank:
        return status, num_completed, 0, (), False, ()

    def _word(self, rank: int, operation: _Operation) -> int:
        return rank * self.num_channels + operation.channel

    def _half(self, rank: int, operation: _Operation, half: int) -> int:
        return (self._word(rank, operation) * 2 + operation.buffer) * 2 + half

    def _verdict(self, word: int, operation: _Operation) -> int:
        """What a word says of its owner: POSTED, ABSENT, UNSEEN while it is open, or that it went AHEAD without us."""
        if word == BARE_LOST:
            return ABSENT
        posted = word >> 1
        if self.change is Change.CONSTANT_FLAG:
            return ABSENT if word & LOST else POSTED if posted else UNSEEN
        if posted == operation.epoch or (posted == operation.next_epoch and self.change is not Change.EXACT_WAIT):
            return POSTED
        if word & LOST:
            return ABSENT
        waits = posted == operation.previous_epoch or self.change in (Change.EXACT_WAIT, Change.IGNORE_AHEAD)
        return UNSEEN if waits else AHEAD

    def successors(self, state: _State) -> Iterator[tuple[Step, _State]]:
        ranks = state[0]
        num_dead = sum(rank[0] == DEAD for rank in ranks)
        for me, rank in enumerate(ranks):
            if rank[0] != RUNS:
                continue
            if num_dead < self.scenario.max_deaths:
                yield (me, "dies"), self._with_rank(state, me, self._end(DEAD, 0))
            if rank[1] == self._num_operations(me):
                yield (me, "closes"), self._with_rank(state, me, self._end(DONE, rank[1]))
                continue
            operation = self.programs[me][rank[1]][0]
            phase = self.order[rank[2]]
            if phase in (WRITE_FIRST, WRITE_SECOND):
                yield self._write(state, me, operation, phase - WRITE_FIRST)
            elif phase == POST:
                yield self._post(state, me, operation)
            else:
                yield from self._gather(state, me, operation)

    def _num_operations(self, rank: int) -> int:
        leaves = self.scenario.leaves_after
        return leaves[1] if leaves and leaves[0] == rank else len(self.programs[rank])

    def _with_rank(self, state: _State, me: int, rank: _Rank) -> _State:
        return (_replaced(state[0], me, rank), *state[1:])

    def _advanced(self, me: int, rank: _Rank) -> _Rank:
        """The rank in its next phase; entering GATHER it knows nothing of any other rank yet."""
        phase = rank[2] + 1
        if self.order[phase] != GATHER:
            return RUNS, rank[1], phase, (), rank[4], rank[5]
        if not self.programs[me][rank[1]][2]:
            return self._begin(me, rank[1] + 1, rank[5], rank[4])
        return RUNS, rank[1], phase, self._seen_first(me, rank[1], rank[5]), rank[4], rank[5]

    def _seen_first(self, me: int, place: int, lost: tuple[int, ...]) -> tuple[int, ...]:
        index = self.programs[me][place][0].index
        silent = self.scenario.silent if self.change is Change.SKIP_SILENT else frozenset()
        skips_lost = self.change is Change.SKIP_KNOWN_LOST

        def knows(peer: int) -> int:
            if skips_lost and lost[peer]:
                return ABSENT
            link = (index, peer, me)
            skipped = peer == me or link in silent or (link in self.scenario.unheard and not lost[peer])
            return READ if skipped else UNSEEN

        return tuple(knows(peer) for peer in range(self.scenario.num_ranks))

    def _write(self, state: _State, me: int, operation: _Operation, half: int) -> tuple[Step, _State]:
        ranks, words, halves, participants, fault = state
        halves = _replaced(halves, self._half(me, operation, half), operation.serial)
        ranks = _replaced(ranks, me, self._advanced(me, ranks[me]))
        return (me, "writes half", half, operation), (ranks, words, halves, participants, fault)

    def _post(self, state: _State, me: int, operation: _Operation) -> tuple[Step, _State]:
        ranks, words, halves, participants, fault = state
        at = self._word(me, operation)
        constant = self.change is Change.CONSTANT_FLAG
        expected = words[at] & ~LOST if constant else operation.previous_epoch * 2
        if words[at] != expected and self.change is not Change.BLIND_POST:
            return (me, "finds itself lost posting", operation), self._raised(state, me, operation)
        words = _replaced(words, at, 2 if constant else operation.epoch * 2)
        ranks = _replaced(ranks, me, self._advanced(me, ranks[me]))
        return (me, "posts", operation), (ranks, words, halves, participants, fault)

    def _raised(self, state: _State, me: int, operation: _Operation) -> _State:
        return self._with_rank(state, me, self._end(RAISED, operation.index))

    def _gather(self, state: _State, me: int, operation: _Operation) -> Iterator[tuple[Step, _State]]:
        """The next steps towards each peer; when all have been read or are absent, the end of the operation."""
        seen = state[0][me][3]
        for peer, knowledge in enumerate(seen):
            if knowledge in (READ, ABSENT):
                continue
            lost_at = state[0][me][5][peer]
            if knowledge == UNSEEN and lost_at and self.change is not Change.TRUST_KNOWN_LOST:
                counts = lost_at > operation.index + 1 and self.change is not Change.LOST_IS_ABSENT
                yield self._give_up(state, me, peer, operation, then=TOLD if counts else ABSENT)
            elif knowledge in (UNSEEN, TOLD):
                yield from self._observe(state, me, peer, operation)
            elif knowledge == GIVING_UP:
                yield self._give_up(state, me, peer, operation)
            else:
                yield self._read(state, me, peer, operation)
            if self.scenario.in_turn:
                return
        if all(knowledge in (READ, ABSENT) for knowledge in seen):
            yield self._finish(state, me, operation)

    def _learn(self, state: _State, me: int, peer: int, knowledge: int, right: bool = True) -> _State:
        status, index, phase, seen, wrong, lost = state[0][me]
        if knowledge == ABSENT and not lost[peer]:
            lost = _replaced(lost, peer, 1 + self.num_sent[me][index])
        rank = (status, index, phase, _replaced(seen, peer, knowledge), wrong or not right, lost)
        return self._with_rank(state, me, rank)

    def _observe(self, state: _State, me: int, peer: int, operation: _Operation) -> Iterator[tuple[Step, _State]]:
        verdict = self._verdict(state[1][self._word(peer, operation)], operation)
        if verdict == UNSEEN:
            if state[0][me][3][peer] == UNSEEN and self._may_give_up(state, peer):
                yield (me, "gives up on rank", peer, operation), self._learn(state, me, peer, GIVING_UP)
        elif verdict == POSTED:
            empty = (operation.index, peer, me) in self.scenario.silent
            after = self._learn(state, me, peer, READ if empty else POSTED)
            yield (me, "sees the post of rank", peer, operation), after
        elif verdict == AHEAD:
            yield (me, "finds itself lost by", peer, operation), self._raised(state, me, operation)
        elif self.scenario.mask:
            yield (me, "sees as lost rank", peer, operation), self._learn(state, me, peer, ABSENT)
        else:
            yield (me, "raises for rank", peer, operation), self._raised(state, me, operation)

    def _may_give_up(self, state: _State, peer: int) -> bool:
        if self.scenario.give_up is GiveUp.ANY_TIME:
            return True
        status = state[0][peer][0]
        gone = status in (RAISED, DEAD) or (status == DONE and self.change is not Change.NO_CLOSE)
        return gone and self.scenario.give_up is GiveUp.GONE

    def _give_up(
        self, state: _State, me: int, peer: int, operation: _Operation, then: int = TOLD
    ) -> tuple[Step, _State]:
        """Compare-and-swap of the peer's word: from what it held before this operation to the same, but lost."""
        words = state[1]
        at = self._word(peer, operation)
        late = words[at] == (0 if self.change is Change.CONSTANT_FLAG else operation.previous_epoch * 2)
        if late or self.change is Change.BLIND_LOST:
            lost = BARE_LOST if self.change is Change.LOST_WITHOUT_EPOCH else operation.previous_epoch * 2 + LOST
            words = _replaced(words, at, lost)
            then = ABSENT if self.scenario.mask else then
        what = "marks as lost rank" if late else "is too late to mark rank"
        ranks, _, halves, participants, fault = self._learn(state, me, peer, then)
        return (me, what, peer, operation), (ranks, words, halves, participants, fault)

    def _read(self, state: _State, me: int, peer: int, operation: _Operation) -> tuple[Step, _State]:
        half = state[0][me][3][peer] - POSTED
        right = state[2][self._half(peer, operation, half)] == operation.serial
        after = self._learn(state, me, peer, READ if half else HALF_READ, right)
        return (me, "reads half", half, "of rank", peer, operation), after

    def _finish(self, state: _State, me: int, operation: _Operation) -> tuple[Step, _State]:
        ranks, words, halves, participants, fault = state
        _, place, _, seen, wrong, lost = ranks[me]
        rechecks = (
            self.change is not Change.NO_RECHECK if self.scenario.mask else self.change is Change.RECHECK_UNDER_RAISE
        )
        returns = operation.name[0] != "E"  # what was read in an entry shows in the combine behind it
        if returns and rechecks and words[self._word(me, operation)] & LOST:
            return (me, "finds itself lost ending", operation), self._raised(state, me, operation)
        present = sum(1 << peer for peer, knowledge in enumerate(seen) if knowledge == READ)
        if wrong and returns:
            fault = f"rank {me} returns wrong data from {_words(operation)}"
        elif participants[operation.index] not in (0, present) and not any(
            operation.index == unheard[0] for unheard in self.scenario.unheard
        ):
            fault = f"ranks disagree who took part in {_words(operation)}"
        ranks = _replaced(ranks, me, self._begin(me, place + 1, lost, wrong and not returns))
        participants = _replaced(participants, operation.index, present)
        awaited = 0  # those that have completed are compared with those that will
        for rank, of_place in zip(ranks, self.awaited, strict=True):
            awaited |= of_place[rank[1]] if rank[0] == RUNS else 0
        participants = tuple(who if awaited >> index & 1 else 0 for index, who in enumerate(participants))
        return (me, "completes", operation), (ranks, words, halves, participants, fault)

    def fault(self, state: _State) -> str:
        return state[4]

    def final_fault(self, state: _State) -> str:
        """Nobody hangs; nobody is given up without a reason; ``raise`` completes an operation everywhere or nowhere."""
        scenario = self.scenario
        alive = [rank for rank in state[0] if rank[0] != DEAD]
        done = [rank[0] == DONE for rank in alive]
        if any(rank[0] == RUNS for rank in alive):
            return "a rank waits for ever"
        if scenario.mask:
            if len(alive) == scenario.num_ranks and not any(done):
                return "no rank survives"
            if scenario.give_up is not GiveUp.ANY_TIME and not all(done):
                return "a rank that was never late is lost"
        else:
            # Who ends while others have received what it has only sent will never receive that.
            if scenario.leaves_after is None and not self.is_split and len({rank[1] for rank in alive}) > 1:
                return "an operation completed on one live rank and not on another"
            if scenario.give_up is GiveUp.NEVER and not all(done):
                return "a rank raises without a reason"
        return ""

    def describe(self, step: Step) -> str:
        return f"rank {step[0]} " + " ".join(_words(part) for part in step[1:])


def _words(part: Any) -> str:
    if not isinstance(part, _Operation):
        return str(part)
    kind = {"D": "dispatch", "E": "combine entry", "C": "combine"}[part.name[0]]
    return f"{kind} {part.serial} (lane {part.name[1:]})"
