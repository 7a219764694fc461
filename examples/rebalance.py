"""Spreads hot experts over more ranks, by what the ranks have counted: ``python examples/rebalance.py``.

Eight logical experts on four ranks with twelve places, so that four experts can have a copy. Tokens prefer some experts
by far. After a few steps the ranks gather their totals, agree on a placement that evens them out, load the weights of
the experts that they are to hold, and go on, with the same communicator. To be read and copied: policies differ, and
this one is the simplest that helps.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import expertwire as ew

NUM_LOGICAL, HIDDEN_SIZE, NUM_TOPK, NUM_TOKENS, NUM_STEPS = 8, 64, 2, 128, 5
EXPERTS_PER_RANK = (3, 3, 3, 3)
START = ew.place_experts([0, 0, 1, 1, 2, 2, 3, 3], EXPERTS_PER_RANK)  # two experts on each rank, a place left over
POPULARITY = np.array([12, 6, 3, 3, 2, 2, 1, 1]) / 30


def balanced(loads: list[int]) -> list[list[int]]:
    """Return the ranks of each logical expert, [G] lists, for what each was asked to do so far.

    The places that are left over go, one after the other, to the expert whose copies have most to do; then the copies,
    the busiest first, to the rank that has least to do, has room, and does not hold that expert.
    """
    num_copies = [1] * len(loads)
    for _ in range(sum(EXPERTS_PER_RANK) - len(loads)):
        can_grow = [expert for expert in range(len(loads)) if num_copies[expert] < len(EXPERTS_PER_RANK)]
        num_copies[max(can_grow, key=lambda expert: loads[expert] / num_copies[expert])] += 1
    ranks: list[list[int]] = [[] for _ in loads]
    load_of_rank, room = [0.0] * len(EXPERTS_PER_RANK), list(EXPERTS_PER_RANK)
    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert] / num_copies[expert]):
        for _ in range(num_copies[expert]):
            free = [rank for rank in range(len(room)) if room[rank] and rank not in ranks[expert]]
            rank = min(free or [rank for rank in range(len(room)) if room[rank]], key=load_of_rank.__getitem__)
            ranks[expert].append(rank)
            load_of_rank[rank] += loads[expert] / num_copies[expert]
            room[rank] -= 1
    return ranks


class Experts:
    """The experts that one rank holds: here a factor each, which in earnest would be copied from another rank."""

    def __init__(self, comm: ew.MoECommunicator) -> None:
        self.comm = comm
        self.load()

    def load(self) -> None:
        """Take the weights of what the communicator's placement says."""
        first, placement = self.comm.first_local_expert, np.array(self.comm.config.placement)
        held = placement[first : first + self.comm.num_local_experts]
        self.factors = (1.0 + held).astype(np.float32)[:, None, None]

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """[L, R*M, H] to the same."""
        return (tokens.astype(np.float32) * self.factors).astype(ml_dtypes.bfloat16)


def loads_of_ranks(group: ew.Group, comm: ew.MoECommunicator, before: np.ndarray) -> np.ndarray:
    """Collective. What every physical expert has received since ``before``, [E]."""
    mine = np.array(comm.stats().expert_tokens, np.int64)
    return np.concatenate([np.frombuffer(one, np.int64) for one in group.all_gather(mine.tobytes())]) - before


def rank_main(group: ew.Group) -> tuple[list[float], bool]:
    """Return the load of the busiest rank over the mean, before and after, and whether every result was right."""
    comm = ew.MoECommunicator(
        group,
        num_experts=sum(EXPERTS_PER_RANK),
        experts_per_rank=EXPERTS_PER_RANK,
        placement=START,
        hidden_size=HIDDEN_SIZE,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=NUM_TOKENS,
    )
    experts, rng = Experts(comm), np.random.default_rng(group.rank)
    total, imbalances, is_right = np.zeros(comm.config.num_experts, np.int64), [], True
    for _ in range(2):
        for _ in range(NUM_STEPS):
            x = rng.integers(-8, 8, (NUM_TOKENS, HIDDEN_SIZE)).astype(ml_dtypes.bfloat16)
            choices = [rng.choice(NUM_LOGICAL, NUM_TOPK, replace=False, p=POPULARITY) for _ in range(NUM_TOKENS)]
            topk_ids = np.stack(choices)
            out, handle = comm.dispatch(x, topk_ids)
            y = comm.combine(experts(out.tokens), handle)
            is_right &= bool((y == x * (topk_ids + 1).sum(1, keepdims=True).astype(np.float32)).all())
        loads = loads_of_ranks(group, comm, total)
        total = total + loads
        of_ranks = loads.reshape(len(EXPERTS_PER_RANK), -1).sum(1)  # as many places on every rank
        imbalances.append(float(of_ranks.max() / of_ranks.mean()))
        of_logical = np.zeros(NUM_LOGICAL, np.int64)
        placement = np.array(comm.config.placement)
        np.add.at(of_logical, placement[placement >= 0], loads[placement >= 0])
        comm.update_placement(ew.place_experts(balanced(of_logical.tolist()), EXPERTS_PER_RANK))
        experts.load()
    comm.close()
    return imbalances, is_right


if __name__ == "__main__":
    results = ew.spawn(rank_main, len(EXPERTS_PER_RANK))
    (before, after), _ = results[0]
    print(f"rows of the busiest rank over the mean: {before:.2f}, rebalanced {after:.2f}")
    print("every result was right" if all(right for _, right in results) else "results were wrong")
