"""What the processes of a job run: one rank of the model, or the reference over some of the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from expertwire import reference
from expertwire.lanes import lane_shapes
from expertwire.run.board import CHECKS, RANKS, Board, Difference, LayerRecord, Numpy, open_board
from expertwire.run.experts import ExpertShare
from expertwire.run.model import BF16, Model, Routing
from expertwire.run.plan import JobConfig, Schedule

if TYPE_CHECKING:
    from expertwire.groups import Group


@dataclass(frozen=True)
class RankSummary:
    """One rank's account.

    Attributes:
        seconds: from the first to the last step.
        bytes_sent: payload, scales and metadata to other ranks.
        bytes_received: from other ranks.
    """

    seconds: float
    bytes_sent: int
    bytes_received: int


def run_rank(group: Group, folder: Path, config: JobConfig) -> RankSummary:
    """Runs one rank's share of the text through all layers and writes its results to the board."""
    from expertwire import MoECommunicator

    board = open_board(folder)
    schedule = config.schedule(len(board.token_ids))
    settings = config.communicator()
    model = Model(config.model, config.experts(group.rank), config.max_rows)
    share = ExpertShare(model, config.experts(group.rank), settings)
    with MoECommunicator(group, settings) as communicator:

        def exchange(step: int, layer: int, normed: Numpy, routing: Routing) -> Numpy:
            marks = [time.perf_counter()]
            output, handle = communicator.dispatch(normed, routing.topk_ids, routing.weights)
            marks.append(time.perf_counter())
            expert_output = np.asarray(output.combine_input_buffer)
            share.run(layer, output, expert_output)
            marks.append(time.perf_counter())
            combined: Numpy = communicator.combine(expert_output, handle)
            marks.append(time.perf_counter())
            board.seconds[:, group.rank, step, layer] = np.diff(marks)
            return combined

        start = time.perf_counter()
        for step in range(schedule.num_steps):
            tokens = schedule.tokens(group.rank, step)
            states = model.embed(board.token_ids, tokens)
            for layer in range(config.model.num_layers):
                normed = model.normalize(states)
                routing = model.route(layer, normed)
                states = _add(states, exchange(step, layer, normed, routing))
                board.write(layer, tokens, LayerRecord(routing.topk_ids, routing.weights, states))
            board.done[RANKS, group.rank] += tokens.stop - tokens.start
        seconds = time.perf_counter() - start
        stats = communicator.stats()
        return RankSummary(seconds, stats.bytes_sent, stats.bytes_received)


def check_steps(group: Group, folder: Path, config: JobConfig) -> Difference | None:
    """Repeats every ``group.size``-th step with the reference; returns the first difference, if any.

    Steps do not depend on each other, so several processes share them. Within a step one process plays all ranks.
    """
    board = open_board(folder)
    schedule = config.schedule(len(board.token_ids))
    checker = ReferenceModel(config)
    for step in range(group.rank, schedule.num_steps, group.size):
        difference = checker.check_step(board, step, schedule)
        if difference is not None:
            return difference
        tokens = [schedule.tokens(rank, step) for rank in range(config.num_ranks)]
        board.done[CHECKS, group.rank] += sum(own.stop - own.start for own in tokens)
    return None


class ReferenceModel:
    """All ranks of the model in one process, with the reference in place of the communicator."""

    def __init__(self, config: JobConfig) -> None:
        self._model = Model(config.model, range(config.model.num_experts), config.max_rows)
        self._settings = config.communicator()
        self._shares = [
            ExpertShare(self._model, config.experts(rank), self._settings) for rank in range(config.num_ranks)
        ]
        shape = lane_shapes(self._settings, config.num_ranks, len(config.experts(0))).expert_output
        self._results = [np.zeros(shape, BF16) for _ in self._shares]

    def check_step(self, board: Board, step: int, schedule: Schedule) -> Difference | None:
        """Runs one step and holds routing and states of every layer against the board."""
        shares = [schedule.tokens(rank, step) for rank in range(schedule.num_ranks)]
        for layer, records in enumerate(self.run_step(board.token_ids, shares)):
            for tokens, record in zip(shares, records, strict=True):
                difference = board.difference(step, layer, tokens, record)
                if difference is not None:
                    return difference
        return None

    def run_step(self, token_ids: npt.NDArray[np.int32], shares: Sequence[slice]) -> Iterator[list[LayerRecord]]:
        """Yields after each layer what each rank did with its share of the text."""
        states = [self._model.embed(token_ids, tokens) for tokens in shares]
        for layer in range(self._model.config.num_layers):
            normed = [self._model.normalize(own) for own in states]
            routings = [self._model.route(layer, own) for own in normed]
            combined = self._exchange(layer, normed, routings)
            states = [_add(own, added) for own, added in zip(states, combined, strict=True)]
            yield [LayerRecord(r.topk_ids, r.weights, own) for r, own in zip(routings, states, strict=True)]

    def _exchange(self, layer: int, normed: list[Numpy], routings: list[Routing]) -> list[Numpy]:
        inputs = [
            reference.RankInput(rows, routing.topk_ids, routing.weights)
            for rows, routing in zip(normed, routings, strict=True)
        ]
        outputs = reference.dispatch(self._settings, inputs)
        for share, output, result in zip(self._shares, outputs, self._results, strict=True):
            share.run(layer, output, result)
        return reference.combine(self._settings, inputs, self._results)


def _add(states: Numpy, combined: Numpy) -> Numpy:
    """Returns the sum of two bfloat16 [T, H], computed in float32 and rounded once."""
    return (states.astype(np.float32) + combined.astype(np.float32)).astype(BF16)
