"""A model of the push protocol of the CUDA backend (docs/protocol.md) for ``state_explorer.py``.

Every rank owns an inbox that the others store into: for each source and buffer a count and a packet, which carry
epochs, and a row, which is its own flag. A kernel has two blocks with steps of their own: one sends counts and packets,
and ends when it has seen everybody's packet; the other sends rows, and takes and clears those that arrive. Or it has a
single block that does both.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

from protocol_model import GiveUp
from push_scenario import Break, Operation, Scenario, operations_of, words_of
from push_state import (
    COUNT,
    DEAD,
    DONE,
    ENDED,
    ENTER,
    FIRST,
    LOSSES,
    MISSED,
    NAMES,
    PACKET,
    RAISED,
    REST,
    ROW,
    RUNS,
    SEEN,
    SEND,
    SETTLE,
    TAKE,
    UNSEEN,
    WAITING,
    Block,
    Rank,
    State,
)
from state_explorer import Step


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


class PushProtocol:
    """The CUDA backend's protocol under a scenario. What is stored is seen at once, but for the clearing of rows."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.change = scenario, scenario.change
        self.operations = operations_of(scenario)
        self.num_channels = 1 + max(operation.channel for operation in self.operations)
        self.start = (Block(),) * scenario.num_blocks
        self.todo = functools.cache(self._todo)
        self.awaited = functools.cache(self._awaited)

    def initial(self) -> State:
        size = self.scenario.num_ranks
        rank = Rank(blocks=self.start, lost_in=(0,) * size)
        return State((rank,) * size, (0,) * (size * size * self.num_channels * 6), (0,) * size**2)

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        num_dead = sum(rank.status == DEAD for rank in state.ranks)
        for me, rank in enumerate(state.ranks):
            if rank.status != RUNS:
                continue
            if num_dead < self.scenario.max_deaths:
                yield (me, "dies"), self._ended(state, me, DEAD)
            if rank.uncleared:
                yield (me, "has cleared"), self._clear(state, me)
            for which, block in enumerate(rank.blocks):
                yield from self._block_steps(state, me, which, block)

    def _block_steps(self, state: State, me: int, which: int, block: Block) -> Iterator[tuple[Step, State]]:
        if block.phase == ENDED:
            if self.change is Break.NO_DEPENDENCY_WAIT and block.operation < len(self.operations):
                yield self._next_operation(state, me, which)
            return
        operation = self.operations[block.operation]
        if block.phase == ENTER:
            yield self._enter(state, me, which, operation)
        elif block.phase == SEND:
            yield self._send(state, me, which, operation)
        elif block.phase == SETTLE:
            yield from self._settle(state, me, which, operation)
        else:
            yield from self._await(state, me, which, operation)

    # Memory

    def _at(self, reader: int, source: int, operation: Operation, word: int) -> int:
        if word == ROW and self.change is Break.SHARED_SLOTS:
            source = 0
        place = (reader * self.scenario.num_ranks + source) * self.num_channels + operation.channel
        return (place * 2 + operation.buffer) * 3 + word

    def _clear(self, state: State, me: int) -> State:
        words = list(state.words)
        uncleared = state.ranks[me].uncleared
        for at in range(len(words)):
            if uncleared >> at & 1:
                words[at] = 0
        return self._with_rank(state._replace(words=tuple(words)), me, uncleared=0)

    def _store_row(self, state: State, me: int, peer: int, operation: Operation, value: int) -> State:
        if not self._has_row(operation, me, peer) or (me, peer) in self.scenario.cut:
            return state
        return state._replace(words=_replaced(state.words, self._at(peer, me, operation, ROW), value))

    # What a rank and a block become

    def _with_rank(self, state: State, me: int, **changes: Any) -> State:
        return state._replace(ranks=_replaced(state.ranks, me, state.ranks[me]._replace(**changes)))

    def _with_block(self, state: State, me: int, which: int, **changes: Any) -> State:
        blocks = state.ranks[me].blocks
        return self._with_rank(state, me, blocks=_replaced(blocks, which, blocks[which]._replace(**changes)))

    def _ended(self, state: State, me: int, status: int) -> State:
        return self._with_rank(state, me, status=status, blocks=self.start, starts=(0, 0))

    def _lost(self, rank: Rank) -> int:
        return sum(1 << peer for peer, lost_in in enumerate(rank.lost_in) if lost_in)

    def _has_row(self, operation: Operation, source: int, reader: int) -> bool:
        sends = self.scenario.sends
        return sends is None or (operation.index, source, reader) in sends

    def _kinds(self, which: int, operation: Operation) -> tuple[int, ...]:
        """Which words a block sends, and awaits after the counts."""
        of_first = (PACKET, COUNT) if operation.has_counts else (PACKET,)
        if self.scenario.num_blocks == 1:
            return (*of_first, ROW)
        return of_first if which == FIRST else (ROW,)

    def _peers(self, me: int, absent: int) -> list[int]:
        return [peer for peer in range(self.scenario.num_ranks) if peer != me and not absent >> peer & 1]

    def _todo(self, me: int, which: int, operation: Operation, absent: int) -> list[tuple[int, int]]:
        """What a block stores, to whom."""
        kinds = [kind for kind in self._kinds(which, operation) if kind != ROW or not operation.awaits_weights]
        pairs = [(kind, peer) for kind in kinds for peer in self._peers(me, absent)]
        return [(kind, peer) for kind, peer in pairs if kind != ROW or self._has_row(operation, me, peer)]

    def _awaited(self, me: int, which: int, operation: Operation, absent: int, phase: int) -> list[tuple[int, int]]:
        """What a block waits for in a phase, from whom."""
        if phase == TAKE:
            return [(COUNT, peer) for peer in self._peers(me, absent)]
        pairs = [
            (kind, peer) for kind in self._kinds(which, operation) if kind != COUNT for peer in self._peers(me, absent)
        ]
        if self.change is not Break.SKIP_SILENT:
            return [(kind, peer) for kind, peer in pairs if kind != ROW or self._has_row(operation, peer, me)]
        return [(kind, peer) for kind, peer in pairs if self._has_row(operation, peer, me)]

    # Steps

    def _enter(self, state: State, me: int, which: int, operation: Operation) -> tuple[Step, State]:
        rank = state.ranks[me]
        if rank.is_given_up:
            return (me, "finds itself given up entering", operation), self._ended(state, me, RAISED)
        if 0 < rank.ended_in <= operation.index and self.change is not Break.ENDED_SENDS:
            return (me, "has ended before", operation), self._ended(state, me, RAISED)
        before = sum(1 << peer for peer, lost in enumerate(rank.lost_in) if lost not in (0, operation.index + 1))
        before = 0 if self.change is Break.TRUST_LOST else before
        if which == FIRST:
            state = self._with_rank(state, me, starts=(rank.starts[1], before))
        after = self._with_block(state, me, which, phase=SEND, num_sent=0, absent=before)
        return (me, "enters by block", which, operation), after

    def _send(self, state: State, me: int, which: int, operation: Operation) -> tuple[Step, State]:
        """Store the next word to the next rank, packets first."""
        block = state.ranks[me].blocks[which]
        todo = self.todo(me, which, operation, block.absent)
        then = TAKE if operation.has_counts else REST
        if not todo:
            return (me, "sends nothing by block", which, operation), self._waiting(state, me, which, then, operation)
        kind, peer = todo[block.num_sent]
        value = operation.serial if kind == ROW else operation.epoch * 2
        if kind == ROW and 0 < state.ranks[me].ended_in <= operation.index:
            value = -1  # made of rows that have never come
        if kind != ROW and self.change is Break.CONSTANT_PACKET:
            value = 2
        if kind == PACKET and block.absent and self.change is not Break.SILENT_PACKETS:
            value += LOSSES
        if (me, peer) not in self.scenario.cut:
            state = state._replace(words=_replaced(state.words, self._at(peer, me, operation, kind), value))
        after = self._with_block(state, me, which, num_sent=block.num_sent + 1)
        if block.num_sent + 1 == len(todo):
            after = self._waiting(after, me, which, then, operation)
        return (me, "stores", NAMES[kind], "to rank", peer, operation), after

    def _waiting(self, state: State, me: int, which: int, phase: int, operation: Operation) -> State:
        absent = state.ranks[me].blocks[which].absent
        seen = (UNSEEN,) * len(self.awaited(me, which, operation, absent, phase))
        after = self._with_block(state, me, which, phase=phase, seen=seen)
        return after if seen else self._finish_phase(after, me, which, operation)

    def _await(self, state: State, me: int, which: int, operation: Operation) -> Iterator[tuple[Step, State]]:
        """Look for the word of each rank that this phase needs; when there is none left to look for, go on."""
        rank = state.ranks[me]
        block = rank.blocks[which]
        is_blocked = False
        awaited = self.awaited(me, which, operation, block.absent, block.phase)
        for index, (kind, peer) in enumerate(awaited):
            if block.seen[index] != UNSEEN:
                continue
            if is_blocked and self.scenario.in_turn:
                break
            at = self._at(me, peer, operation, kind)
            word = 0 if rank.uncleared >> at & 1 else state.words[at]
            if word if kind == ROW else self._is_here(word, operation):
                yield (me, "sees", NAMES[kind], "of rank", peer, operation), self._see(state, me, which, index, word)
                if self.scenario.in_turn:
                    return
                continue
            is_blocked = True
            if rank.ended_in or (rank.lost_in[peer] and self.scenario.mask):
                after = self._know(state, me, which, index, MISSED)
                if kind == PACKET and operation.awaits_weights and self.change is Break.SUMS_WITHOUT_WEIGHTS:
                    after = self._store_row(after, me, peer, operation, -1)
                yield (me, "goes without rank", peer, operation), after
            elif not rank.is_given_up and self._may_give_up(state, me, peer):  # it looks for that first
                yield self._give_up(state, me, peer, operation)
        if is_blocked:
            yield from self._look_around(state, me, operation)

    def _is_here(self, word: int, operation: Operation) -> bool:
        return word >> 1 == (1 if self.change is Break.CONSTANT_PACKET else operation.epoch)

    def _see(self, state: State, me: int, which: int, index: int, word: int) -> State:
        block = state.ranks[me].blocks[which]
        operation = self.operations[block.operation]
        kind, peer = self.awaited(me, which, operation, block.absent, block.phase)[index]
        if kind == PACKET and operation.awaits_weights:
            state = self._store_row(state, me, peer, operation, operation.serial)
        if kind == PACKET and word & LOSSES:
            state = self._unite(state, me, state.notices[self._notice(peer, me)], operation)
        elif kind == ROW and word != operation.serial and not state.ranks[me].ended_in:
            return state._replace(fault=f"rank {me} takes a wrong row in {words_of(operation)}")
        elif kind == ROW and self.change is not Break.NO_CLEARING:
            uncleared = state.ranks[me].uncleared | 1 << self._at(me, peer, operation, ROW)
            state = self._with_rank(state, me, uncleared=uncleared)
        return self._know(state, me, which, index, SEEN)

    def _know(self, state: State, me: int, which: int, index: int, knowledge: int) -> State:
        """Note what has become of a word, and go on when that was the last one of the phase."""
        block = state.ranks[me].blocks[which]
        seen = _replaced(block.seen, index, knowledge)
        after = self._with_block(state, me, which, seen=seen)
        return after if UNSEEN in seen else self._finish_phase(after, me, which, self.operations[block.operation])

    def _finish_phase(self, state: State, me: int, which: int, operation: Operation) -> State:
        block = state.ranks[me].blocks[which]
        if block.phase == TAKE:
            peers = [peer for _, peer in self.awaited(me, which, operation, block.absent, TAKE)]
            missing = sum(1 << peer for peer, seen in zip(peers, block.seen, strict=True) if seen == MISSED)
            after = self._with_block(state, me, which, published=missing, phase=SETTLE)
            if not missing or self.change is Break.NO_SETTLING:
                after = self._with_block(after, me, which, absent=block.absent | missing)
                after = self._waiting(after, me, which, REST, operation)
            return after
        after = self._with_block(state, me, which, phase=ENDED)
        if (
            all(other.phase == ENDED for other in after.ranks[me].blocks)
            and self.change is not Break.NO_DEPENDENCY_WAIT
        ):
            if self.change is not Break.UNPERFORMED_CLEARING:
                after = self._clear(after, me)
            after = self._completed(after, me, operation)
        return after

    def _settle(self, state: State, me: int, which: int, operation: Operation) -> Iterator[tuple[Step, State]]:
        """With counts missing: hear what the other blocks say, each of which speaks once."""
        blocks = state.ranks[me].blocks
        if any(block.published < 0 for block in blocks):
            yield from self._look_around(state, me, operation)
            return
        agreed = functools.reduce(operator.and_, (block.published for block in blocks))
        after = self._with_block(state, me, which, absent=blocks[which].absent | agreed)
        yield (me, "settles by block", which, operation), self._waiting(after, me, which, REST, operation)

    def _completed(self, state: State, me: int, operation: Operation) -> State:
        rank = state.ranks[me]
        if operation.has_counts and len({block.absent for block in rank.blocks}) > 1 and not rank.ended_in:
            return state._replace(fault=f"blocks of rank {me} disagree who takes part in {words_of(operation)}")
        lost = self._lost(rank)
        for peer, other in enumerate(state.ranks):
            if other.status != RUNS or lost >> peer & 1:
                continue
            ahead = other.blocks[FIRST].operation - operation.index
            known = other.starts[1] if ahead == 0 else other.starts[0]
            if ahead == 1 and other.blocks[FIRST].phase == ENTER:
                known = other.starts[1]
            if known & ~lost & ~(1 << me) and not rank.ended_in:
                return state._replace(fault=f"rank {me} has not heard of a loss at the end of {words_of(operation)}")
        for which in range(self.scenario.num_blocks):
            _, state = self._next_operation(state, me, which)
        return state

    def _next_operation(self, state: State, me: int, which: int) -> tuple[Step, State]:
        index = state.ranks[me].blocks[which].operation + 1
        said = state.ranks[me].blocks[which].published if self.change is Break.UNDATED_WORD else -1
        if index < len(self.operations):
            return (me, "goes on by block", which), self._with_block(
                state, me, which, operation=index, phase=ENTER, seen=(), num_sent=0, published=said
            )
        state = self._with_block(state, me, which, phase=ENDED, operation=index)
        done = all(block.operation == len(self.operations) for block in state.ranks[me].blocks)
        status = RAISED if state.ranks[me].ended_in else DONE
        return (me, "is done by block", which), self._ended(state, me, status) if done else state

    # Losses

    def _notice(self, source: int, reader: int) -> int:
        return source * self.scenario.num_ranks + reader

    def _may_give_up(self, state: State, me: int, peer: int) -> bool:
        other = state.ranks[peer]
        if other.status in (RAISED, DEAD, DONE):
            return self.scenario.give_up is not GiveUp.NEVER
        if (peer, me) in self.scenario.cut:
            return True
        if any(block.phase in WAITING for block in other.blocks):
            knows_no_beats = not self.scenario.mask or self.change is Break.NO_BEATS
            return knows_no_beats and self.scenario.give_up is GiveUp.ANY_TIME
        is_late = self.scenario.late is None or peer in self.scenario.late
        return self.scenario.give_up is GiveUp.ANY_TIME and is_late

    def _give_up(self, state: State, me: int, peer: int, operation: Operation) -> tuple[Step, State]:
        if not self.scenario.mask:
            return (me, "gives up all for rank", peer, operation), self._with_rank(
                state, me, ended_in=operation.index + 1
            )
        return (me, "gives up rank", peer, operation), self._unite(state, me, 1 << peer, operation)

    def _unite(self, state: State, me: int, named: int, operation: Operation) -> State:
        """Lose the ranks of a set, and tell all that remain."""
        rank = state.ranks[me]
        lost_in = tuple(
            operation.index + 1 if named >> peer & 1 and not lost and peer != me else lost
            for peer, lost in enumerate(rank.lost_in)
        )
        if lost_in == rank.lost_in:
            return state
        state = self._with_rank(state, me, lost_in=lost_in)
        lost = self._lost(state.ranks[me])
        notices = list(state.notices)
        for peer in range(self.scenario.num_ranks):
            if (me, peer) in self.scenario.cut:
                continue
            if not lost >> peer & 1:
                notices[self._notice(me, peer)] = lost
            elif self.change is not Break.NO_VERDICT:
                state = self._with_rank(state, peer, is_given_up=True)
        return state._replace(notices=tuple(notices))

    def _look_around(self, state: State, me: int, operation: Operation) -> Iterator[tuple[Step, State]]:
        """What a rank that waits does now and then: is it given up, and whom have others lost?"""
        rank = state.ranks[me]
        if rank.is_given_up:
            yield (me, "finds itself given up in", operation), self._ended(state, me, RAISED)
        for peer in range(self.scenario.num_ranks):
            said = 0 if rank.lost_in[peer] else state.notices[self._notice(peer, me)]
            after = self._unite(state, me, said, operation)
            if after is not state:
                yield (me, "hears of losses from rank", peer, operation), after

    # Verdicts

    def fault(self, state: State) -> str:
        return state.fault

    def final_fault(self, state: State) -> str:
        scenario = self.scenario
        ranks = state.ranks
        done = [me for me, rank in enumerate(ranks) if rank.status == DONE]
        if any(rank.status == RUNS for rank in ranks):
            return "a rank waits for ever"
        apart = [(one, other) for one in done for other in done if ranks[one].lost_in[other]]
        if not scenario.cut and any((other, one) in apart for one, other in apart):
            return "two ranks go on without each other"
        if scenario.give_up is GiveUp.NEVER and len(done) < len(ranks):
            return "a rank raises without a reason"
        if scenario.mask:
            alive = [me for me, rank in enumerate(ranks) if rank.status != DEAD]
            late = frozenset[int]() if scenario.give_up is not GiveUp.ANY_TIME else scenario.late
            if late is not None and not scenario.cut and {*alive} - late - {*done}:
                return "a rank that was never late is lost"
            if len(alive) == len(ranks) and not done:
                return "no rank survives"
        return ""

    def describe(self, step: Step) -> str:
        return f"rank {step[0]} " + " ".join(words_of(part) for part in step[1:])
