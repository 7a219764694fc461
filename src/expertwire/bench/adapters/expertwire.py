"""``expertwire``: the Python MoECommunicator of this package, with NumPy arrays."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.inputs import Observation, expert_outputs, observe_dispatch
from expertwire.communicator import MoECommunicator
from expertwire.reference import BF16


class Expertwire(Adapter):
    """This package."""

    name = "expertwire"

    notes = "Python call included, NumPy arrays; expert outputs lie in an array of the caller, the result goes to out="

    def __init__(self, context: RankContext) -> None:
        config = context.problem.config(context.settings.timeout_s)
        self._context = context
        self._comm = MoECommunicator(context.group, **{f.name: getattr(config, f.name) for f in fields(config)})
        self._combined = np.zeros((context.problem.num_tokens, context.problem.hidden_size), BF16)

    def dispatch(self) -> None:
        """Dispatch into the communicator's own buffer."""
        own = self._context.own
        self._received, self._handle = self._comm.dispatch(own.x, own.topk_ids, own.weights)

    def apply_experts(self) -> None:
        """Fill an array of the caller."""
        self._expert_output = expert_outputs(self._context.problem, self._context.group.rank, self._received)

    def combine(self) -> None:
        """Combine into an array that is used again."""
        self._comm.combine(self._expert_output, self._handle, out=self._combined)

    def observe(self) -> Observation:
        """Return everything that the layout promises."""
        return Observation(observe_dispatch(self._received), self._combined)

    def close(self) -> None:
        """Close the communicator."""
        self._comm.close()
