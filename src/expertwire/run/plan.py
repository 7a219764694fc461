"""What one job does: its sizes, its checks, and which rank works on which tokens in which step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from expertwire.errors import InvalidArgumentError, UnsupportedError
from expertwire.run.model import ModelConfig
from expertwire.types import (
    MAX_TOPK,
    SCALE_BLOCK,
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    MoECommunicatorConfig,
    QuantConfig,
)

_Choice = TypeVar("_Choice", bound=Enum)


def choice(option: str, text: str, kind: type[_Choice]) -> _Choice:
    """Returns the member whose value is ``text``; hyphens and underscores are alike."""
    by_name = {str(member.value): member for member in kind}
    name = text.lower().replace("-", "_")
    if name not in by_name:
        allowed = ", ".join(value.replace("_", "-") for value in by_name)
        raise InvalidArgumentError(f"{option} {text!r}: must be one of {allowed}")
    return by_name[name]


@dataclass(frozen=True)
class JobConfig:
    """Everything the processes of a job must agree on.

    Attributes:
        model: sizes of the layers.
        num_ranks: R processes.
        max_tokens_per_rank: M, most tokens of a rank in one step.
        layout: of the dispatch output.
        combine_mode: where expert outputs are summed.
        dispatch_dtype: payload format.
        timeout_s: bound of every wait for a rank, seconds.
    """

    model: ModelConfig
    num_ranks: int
    max_tokens_per_rank: int
    layout: DispatchLayout
    combine_mode: CombineMode
    dispatch_dtype: DispatchDataType
    timeout_s: float

    def experts(self, rank: int) -> range:
        """Returns the global ids of a rank's experts."""
        count = self.model.num_experts // self.num_ranks
        return range(rank * count, (rank + 1) * count)

    @property
    def max_rows(self) -> int:
        """Most rows an expert receives in one step."""
        return self.num_ranks * self.max_tokens_per_rank

    def schedule(self, num_tokens: int) -> Schedule:
        """Returns who works on which tokens of a text of ``num_tokens``."""
        return Schedule(num_tokens, self.num_ranks, self.max_tokens_per_rank)

    def communicator(self) -> MoECommunicatorConfig:
        """Returns the configuration of the communicator of each rank."""
        return MoECommunicatorConfig(
            num_experts=self.model.num_experts,
            hidden_size=self.model.hidden_size,
            num_topk=self.model.num_topk,
            max_tokens_per_rank=self.max_tokens_per_rank,
            output_layout=self.layout,
            combine_mode=self.combine_mode,
            quant=QuantConfig(format=self.dispatch_dtype),
            device="cpu",
            timeout_s=self.timeout_s,
        )

    def check(self) -> None:
        """Raises InvalidArgumentError or UnsupportedError naming the first option that does not fit."""
        model = self.model
        positive = {
            "--ranks": self.num_ranks,
            "--experts": model.num_experts,
            "--topk": model.num_topk,
            "--hidden": model.hidden_size,
            "--intermediate": model.intermediate_size,
            "--layers": model.num_layers,
            "--vocabulary": model.vocabulary_size,
            "--max-tokens-per-rank": self.max_tokens_per_rank,
        }
        for option, value in positive.items():
            if value < 1:
                raise InvalidArgumentError(f"{option} = {value}: must be at least 1")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise InvalidArgumentError(f"--timeout = {self.timeout_s}: must be a positive number of seconds")
        if model.seed < 0:
            raise InvalidArgumentError(f"--seed = {model.seed}: must not be negative")
        if model.num_experts % self.num_ranks:
            raise InvalidArgumentError(
                f"--experts = {model.num_experts}: must be a multiple of --ranks = {self.num_ranks}"
            )
        most = min(model.num_experts, MAX_TOPK)
        if model.num_topk > most:
            raise InvalidArgumentError(
                f"--topk = {model.num_topk}: must be between 1 and min(--experts, {MAX_TOPK}) = {most}"
            )
        if self.layout is DispatchLayout.TOKEN_MAJOR:
            raise UnsupportedError("--layout token-major: belongs to the throughput mode, which this version lacks")
        unit = 8 if self.dispatch_dtype is DispatchDataType.BF16 else SCALE_BLOCK
        if model.hidden_size % unit:
            raise InvalidArgumentError(
                f"--hidden = {model.hidden_size}: must be a multiple of {unit} for --dispatch-dtype "
                f"{self.dispatch_dtype.value}"
            )


@dataclass(frozen=True)
class Schedule:
    """Contiguous shares of the tokens, one a rank, worked off in steps of at most M tokens.

    Attributes:
        num_tokens: of the whole text.
        num_ranks: R.
        max_tokens_per_rank: M.
    """

    num_tokens: int
    num_ranks: int
    max_tokens_per_rank: int

    @property
    def rank_offsets(self) -> list[int]:
        """First token of each rank and the end of the last, R + 1 numbers. Shares differ by at most one token."""
        return [rank * self.num_tokens // self.num_ranks for rank in range(self.num_ranks + 1)]

    @property
    def num_steps(self) -> int:
        """Steps every rank takes part in; a rank may have no token left in the last one."""
        return math.ceil(math.ceil(self.num_tokens / self.num_ranks) / self.max_tokens_per_rank)

    def tokens(self, rank: int, step: int) -> slice:
        """Returns the tokens of ``rank`` in ``step`` as a range of the whole text, possibly empty."""
        start, end = self.rank_offsets[rank : rank + 2]
        first = min(start + step * self.max_tokens_per_rank, end)
        return slice(first, min(first + self.max_tokens_per_rank, end))
