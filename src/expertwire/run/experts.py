"""From a dispatch output to the expert outputs that ``combine`` takes, for both layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertwire.reference import dequantize
from expertwire.run.model import BF16, Model
from expertwire.types import CombineMode, DispatchLayout, DispatchOutput, MoECommunicatorConfig


@dataclass(frozen=True)
class ExpertShare:
    """The experts of one rank and the form in which its communicator hands rows over.

    Attributes:
        model: holds at least these experts.
        experts: global ids, contiguous.
        config: layout, combine mode and payload format of the communicator.
    """

    model: Model
    experts: range
    config: MoECommunicatorConfig

    def run(self, layer: int, output: DispatchOutput, result: npt.NDArray[Any]) -> None:
        """Runs the experts over the rows the rank received and writes what its ``combine`` takes.

        Args:
            layer: which layer's experts.
            output: what the rank received.
            result: bfloat16; EXPERT_MAJOR [L, R*M, H]; RANK_MAJOR [R*M, H], or [R*M, K, H] with DIRECT_SEND. Only
                the rows that belong to received tokens are written.
        """
        if output.layout.kind is DispatchLayout.EXPERT_MAJOR:
            self._run_expert_major(layer, output, result)
        elif self.config.combine_mode is CombineMode.DIRECT_SEND:
            self._run_slots(layer, output, result, weighted=True)
        else:
            self._run_rank_major(layer, output, result)

    def _run_expert_major(self, layer: int, output: DispatchOutput, result: npt.NDArray[Any]) -> None:
        for local, count in enumerate(_list(output.layout.num_tokens_per_expert)):
            if count:
                rows = _rows(output, (local, slice(count)))
                result[local, :count] = self.model.run_expert(layer, self.experts[local], rows)

    def _run_slots(self, layer: int, output: DispatchOutput, result: npt.NDArray[Any], weighted: bool) -> None:
        """Fills ``result`` [R*M, K, H] with the output of each chosen slot, times its weight if ``weighted``.

        The rows of an expert are gathered in (source rank, token) order: it sees the matrix EXPERT_MAJOR would give.
        """
        ids, weights = _array(output.topk_ids), _array(output.weights)
        valid = _valid_rows(output)
        for expert in self.experts:
            picked, slot = np.nonzero(ids[valid] == expert)
            row = valid[picked]
            if row.size:
                computed = self.model.run_expert(layer, expert, _rows(output, (row,)))
                if weighted:
                    # An expert's output is BF16 whatever the layout; the weighted row is rounded once more.
                    computed = computed.astype(BF16).astype(np.float32) * weights[row, slot][:, None]
                result[row, slot] = computed

    def _run_rank_major(self, layer: int, output: DispatchOutput, result: npt.NDArray[Any]) -> None:
        """Sums each row's local experts in ascending k, as RANK_LOCAL_REDUCE of EXPERT_MAJOR does: the same bits."""
        ids, weights = _array(output.topk_ids), _array(output.weights)
        slots = np.empty((*ids.shape, self.config.hidden_size), BF16)
        self._run_slots(layer, output, slots, weighted=False)
        total = np.zeros((len(ids), self.config.hidden_size), np.float32)
        valid = _valid_rows(output)
        for slot in range(ids.shape[1]):
            rows = valid[(ids[valid, slot] >= self.experts.start) & (ids[valid, slot] < self.experts.stop)]
            total[rows] += weights[rows, slot][:, None] * slots[rows, slot].astype(np.float32)
        result[valid] = total[valid]


def _valid_rows(output: DispatchOutput) -> npt.NDArray[np.intp]:
    """Returns the indices of received rows of a RANK_MAJOR output, ascending."""
    counts = _list(output.layout.num_tokens_per_rank)
    stride = len(output.tokens) // len(counts)
    return np.concatenate([rank * stride + np.arange(count) for rank, count in enumerate(counts)])


def _rows(output: DispatchOutput, where: tuple[Any, ...]) -> npt.NDArray[Any]:
    """Returns rows of the output: bfloat16 as received, FP8 times its scales in float32."""
    tokens, quant = _array(output.tokens), output.quant
    if quant is None or quant.block_scales is None:
        rows: npt.NDArray[Any] = tokens[where]
        return rows
    return dequantize(tokens[where], _array(quant.block_scales)[where], quant)


def _array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values)


def _list(counts: Any) -> list[int]:
    return [int(count) for count in counts]
