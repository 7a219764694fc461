"""``expertwire`` on GPUs: the Python MoECommunicator of this package, with torch tensors."""

from __future__ import annotations

from typing import Any

from expertwire.bench.adapters.base import Adapter, RankContext
from expertwire.bench.inputs import Observation, expert_outputs, observe_dispatch
from expertwire.bench.torch_arrays import output_to_host, to_numpy, to_tensor, valid_rows
from expertwire.communicator import MoECommunicator
from expertwire.types import DispatchLayout


class ExpertwireOnGpu(Adapter):
    """This package."""

    name = "expertwire"
    notes = "torch tensors; expert outputs lie in the communicator's buffer, the result goes to out="

    def __init__(self, context: RankContext, **fields: Any) -> None:
        import torch

        problem, own = context.problem, context.own
        config = problem.config(context.settings.timeout_s, context.device)
        self._context = context
        self._x, self._topk_ids = to_tensor(own.x, context.device), to_tensor(own.topk_ids, context.device)
        self._weights = None if own.weights is None else to_tensor(own.weights, context.device)
        self._combined: Any = torch.empty_like(self._x)
        self._comm = MoECommunicator(context.group, config, **fields)
        torch.cuda.synchronize()
        context.exchange(b"made")  # loading kernels has stopped the GPU: from here on ranks may wait for each other

    def dispatch(self) -> None:
        """Dispatch into the communicator's own buffer."""
        self._received, self._handle = self._comm.dispatch(self._x, self._topk_ids, self._weights)

    def apply_experts(self) -> None:
        """Work the outputs out on the host and copy them to the buffer that combine reads."""
        received = output_to_host(self._received)
        outputs = expert_outputs(self._context.problem, self._context.group.rank, received)
        self._expert_output = self._comm.get_combine_input_buffer("torch")
        if received.layout.kind is not DispatchLayout.EXPERT_MAJOR:
            self._expert_output.copy_(to_tensor(outputs, self._context.device))
            return
        valid = valid_rows(received)
        where = tuple(to_tensor(part, self._context.device) for part in valid)
        self._expert_output[where] = to_tensor(outputs[valid], self._context.device)

    def combine(self) -> None:
        """Combine into a tensor that is used again."""
        self._comm.combine(self._expert_output, self._handle, out=self._combined)

    def observe(self) -> Observation:
        """Return everything that the layout promises."""
        import torch

        torch.cuda.synchronize()
        self._comm.check()
        return Observation(observe_dispatch(output_to_host(self._received)), to_numpy(self._combined))

    def forget(self) -> None:
        """Fill the combined tokens with NaN and the received ones with zeros."""
        import torch

        self._combined.fill_(float("nan"))
        self._received.tokens.view(torch.uint8).zero_()

    def close(self) -> None:
        """Close the communicator."""
        self._comm.close()
