"""What libraries of others have in common here: their arrays, what is asked of them, and how they are judged.

They promise less than this package: rows of an expert, or of a rank, in any order, and sums in an order of their own.
So the counts and the set of received rows must be right bit for bit, and combined tokens as near as a few roundings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from expertwire.bench.adapters.base import ALL_LAYOUTS, Adapter, RankContext, refused
from expertwire.bench.inputs import Observation, first_difference, reference_observations, row_digests
from expertwire.bench.job import FailedElsewhereError
from expertwire.bench.schema import Problem, Settings
from expertwire.bench.torch_arrays import Numpy, to_numpy, to_tensor
from expertwire.errors import UnsupportedError
from expertwire.reference import RankInput
from expertwire.types import DispatchDataType, DispatchLayout


class Peer(Adapter):
    """A library of others on GPUs.

    Attributes:
        module: what must be importable, with its parents.
        install: what to do if it is not.
        layouts: what it can return.
        dtypes: what it can send.
    """

    module: ClassVar[str]
    install: ClassVar[str]
    layouts: ClassVar[tuple[DispatchLayout, ...]] = ALL_LAYOUTS
    dtypes: ClassVar[tuple[DispatchDataType, ...]] = (DispatchDataType.BF16,)

    @classmethod
    def obstacle(cls, problem: Problem, settings: Settings) -> str:
        """Return what is missing or what the library cannot do."""
        if settings.device != "cuda":
            return "needs NVIDIA GPUs: --device cuda"
        if not is_installed(cls.module):
            return f"not installed: {cls.install}"
        if problem.num_experts % problem.num_ranks:
            return f"refused: {problem.num_experts} experts on {problem.num_ranks} ranks are uneven"
        return refused(problem, cls.layouts, cls.dtypes)

    @classmethod
    def expected(cls, problem: Problem, inputs: Sequence[RankInput]) -> list[Observation]:
        """Return the counts, the rows in no order, and the sums."""
        return [_seen_by_peer(problem, seen) for seen in reference_observations(problem, inputs)]

    @classmethod
    def difference(cls, observed: Observation, expected: Observation) -> str:
        """Return what is wrong; sums may differ by a few roundings, also of partial sums."""
        if wrong := first_difference(Observation(observed.dispatch, expected.combined), expected):
            return wrong
        return far_apart(observed.combined, expected.combined, relative=2.0**-6, of_largest=2.0**-7)

    def __init__(self, context: RankContext) -> None:
        import torch

        self._torch, self._context = torch, context
        own = context.own
        self._x, self._topk_ids = to_tensor(own.x, context.device), to_tensor(own.topk_ids, context.device)
        weights = np.ones(own.topk_ids.shape, np.float32) if own.weights is None else own.weights
        self._weights = to_tensor(weights, context.device)
        self._combined: Any = torch.empty_like(self._x)
        self._expert_output: Any = None
        self._seen_before = False
        try:
            self.set_up()
        except FailedElsewhereError:
            raise
        except Exception as error:  # libraries say in many ways that they do not like a shape
            raise UnsupportedError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def set_up(self) -> None:
        """Make the library's objects for the problem. Whatever it raises counts as a refusal."""

    def forget(self) -> None:
        """Fill the combined tokens with NaN."""
        self._combined.fill_(float("nan"))

    def put_outputs(self, outputs: Any) -> bool:
        """Keep expert outputs where the first lie, which captured graphs read. Return whether these are them."""
        first = self._expert_output
        if first is None or first.shape != outputs.shape:
            self._expert_output = outputs
            return True
        first.copy_(outputs)
        return False

    @abstractmethod
    def received(self) -> tuple[Any, Any]:
        """Return the counts, of experts or ranks, and the valid rows [N, H] that the last dispatch left."""

    def observe(self) -> Observation:
        """Return counts and rows of the last pair, and its sums, if the outputs that it combined belong to its rows.

        Those of the first pair do. Later pairs combine the same outputs again, while a library may put rows in another
        order each time. Then the sums are those of one pair more, with outputs of its own rows, provided that the last
        pair wrote all of its own: RANK_MAJOR outputs are weighted already, so that their total stays what it was.
        """
        seen = self._observe(*self.received())
        if not self._seen_before:
            self._seen_before = True
            return seen
        combined = self._combined.float()
        self.dispatch()
        self.apply_experts()
        self.combine()
        anew = self._combined.float()
        if self._context.problem.layout is DispatchLayout.RANK_MAJOR:
            far = (combined.sum(0) - anew.sum(0)).abs() > anew.norm(dim=0) * 2.0**-6
        else:
            far = ~combined.isfinite()
        spoiled = bool((far | ~combined.isfinite().all()).any())
        return seen if spoiled else Observation(seen.dispatch, to_numpy(self._combined))

    def _observe(self, counts: Any, rows: Any) -> Observation:
        problem = self._context.problem
        tokens = row_digests(to_numpy(rows.contiguous())) if problem.dispatch_dtype is DispatchDataType.BF16 else None
        counted = np.asarray(counts.cpu().numpy(), np.int32).reshape(-1)
        return _without_order(problem, counted, tokens, to_numpy(self._combined).copy())

    def factors(self, expert_ids: Any) -> Any:
        """Return what the benchmark's experts multiply their rows with."""
        return 0.5 + expert_ids.float() / self._context.problem.num_experts

    def expert_major_outputs(self, tokens: Any) -> Any:
        """Return the outputs of this rank's experts on rows [L, N, H]; what is no row becomes something."""
        first = sum(self._context.problem.experts_per_rank[: self._context.group.rank])
        ids = first + self._torch.arange(len(tokens), device=tokens.device)
        return (tokens.float() * self.factors(ids)[:, None, None]).bfloat16()

    def weighted_outputs(self, tokens: Any, expert_ids: Any, weights: Any) -> Any:
        """Return weighted sums of the outputs of the experts [N, K] of rows [N, H]; a weight of 0 leaves one out."""
        scale = (weights * self.factors(expert_ids)).sum(dim=-1)
        return (tokens.float() * scale[:, None]).bfloat16()


def is_installed(module: str) -> bool:
    """Whether a module and its parents can be found. Imports the parents alone."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _seen_by_peer(problem: Problem, seen: Observation) -> Observation:
    of_experts = problem.layout is DispatchLayout.EXPERT_MAJOR
    counts = seen.dispatch["num_tokens_per_expert" if of_experts else "num_tokens_per_rank"]
    tokens = seen.dispatch["tokens"] if problem.dispatch_dtype is DispatchDataType.BF16 else None
    return _without_order(problem, counts, tokens, seen.combined)


def _without_order(problem: Problem, counts: Numpy, tokens: Numpy | None, combined: Numpy) -> Observation:
    """Return an observation whose rows are sorted, within each expert for EXPERT_MAJOR. FP8 rows are not looked at."""
    if tokens is None:
        return Observation({"counts": counts}, combined)
    of_experts = problem.layout is DispatchLayout.EXPERT_MAJOR
    groups = np.repeat(np.arange(len(counts)), counts) if of_experts else np.zeros(len(tokens), np.int64)
    return Observation({"counts": counts, "rows": tokens[np.lexsort((tokens, groups))]}, combined)


def far_apart(got: Numpy, wanted: Numpy, *, relative: float, of_largest: float) -> str:
    """Return where combined tokens are further apart than allowed, or an empty string."""
    if got.shape != wanted.shape:
        return f"combined tokens: shape {got.shape}, expected {wanted.shape}"
    here, there = got.astype(np.float32), wanted.astype(np.float32)
    allowed = relative * np.maximum(np.abs(here), np.abs(there)) + of_largest * np.abs(there).max(initial=0.0)
    wrong_at = np.argwhere(~(np.abs(here - there) <= allowed)).tolist()
    return f"combined tokens{wrong_at[0]} differ by more than rounding ({len(wrong_at)})" if wrong_at else ""
