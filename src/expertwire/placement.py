"""Placements: which logical expert each physical one holds.

A placement is a table [E]: entry p is the logical expert that physical expert p holds, or -1 for none. Physical experts
lie contiguous by rank, as ``experts_per_rank`` says. No table puts two experts into one place, so that different ids of
a token stay different experts. Which of several copies a rank sends its tokens to says ``docs/placement.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertwire.config import parse_int, parse_ints
from expertwire.errors import InvalidArgumentError


def place_experts(expert_to_rank: Sequence[int | Sequence[int]], experts_per_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the placement that puts logical experts on the ranks that a table names.

    Args:
        expert_to_rank: [G]: the rank of each logical expert, or the ranks, of which each holds a copy; a rank that is
            named twice holds two.
        experts_per_rank: [R]: physical experts of each rank. A rank's are filled in ascending order with its logical
            experts, ascending; what is left over holds none.

    Raises:
        InvalidArgumentError: a rank that does not exist, an expert without a rank, or more experts on a rank than it
            has room for.
    """
    room = parse_ints(experts_per_rank, "experts_per_rank", "one count for each rank")
    of_rank: list[list[int]] = [[] for _ in room]
    for expert, ranks in enumerate(expert_to_rank):
        named = list(ranks) if isinstance(ranks, Sequence) else [ranks]
        if not named:
            raise InvalidArgumentError(f"expert_to_rank[{expert}] = []: must be a rank, or one rank or more")
        for rank in named:
            if not 0 <= parse_int(rank, f"expert_to_rank[{expert}]") < len(room):
                raise InvalidArgumentError(
                    f"expert_to_rank[{expert}] = {ranks!r}: ranks must lie between 0 and {len(room) - 1}"
                )
            of_rank[rank].append(expert)
    for rank, (experts, most) in enumerate(zip(of_rank, room, strict=True)):
        if len(experts) > most:
            raise InvalidArgumentError(
                f"expert_to_rank puts {len(experts)} experts on rank {rank}: its room in experts_per_rank is {most}"
            )
    return tuple(e for experts, most in zip(of_rank, room, strict=True) for e in (experts + [-1] * most)[:most])
