"""torch tensors, on the CPU and on CUDA, as arrays of a communicator. Operators of torch: ``interop/torch.py``."""

from __future__ import annotations

from dataclasses import replace

import torch

from expertwire.interop.arrays import ITEM_BYTES, ArrayAdapter, ArrayFacts, check, num_bytes
from expertwire.types import Array, DispatchOutput

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WANTED = {name: (dtype, ITEM_BYTES[name]) for name, dtype in DTYPES.items()}


class TorchAdapter(ArrayAdapter):
    """``torch.Tensor`` and its subclasses. Calls are outside autograd: outputs never require gradients."""

    framework = "torch"
    plain_type = torch.Tensor

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._device = torch.device(device)

    def shape(self, array: Array) -> tuple[int, ...]:
        """Sizes; a ``torch.Size`` is a tuple."""
        shape: tuple[int, ...] = array.shape
        return shape

    def dtype(self, array: Array) -> str:
        """Name of the dtype without ``torch.``."""
        return _NAMES.get(array.dtype) or str(array.dtype).removeprefix("torch.")

    def address(self, array: Array, name: str, dtype: str, shape: tuple[int, ...], writable: bool = False) -> int:
        """See ArrayAdapter."""
        wanted, item_bytes = _WANTED[dtype]
        good = array.dtype is wanted and array.shape == shape and array.device == self._device
        good = good and array.is_contiguous() and not array.is_neg()
        address: int = array.data_ptr() if good else 1
        if address % item_bytes:
            facts = self._facts(array)
            check(facts, name, dtype, shape, writable, self.device)
            address = facts.address
        return address

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Array:
        """A new tensor. Its memory belongs to the stream, so that nothing earlier on another one still uses it."""
        if stream is None:
            return torch.empty(shape, dtype=DTYPES[dtype], device=self._device)
        # ExternalStream of the default stream, 0, would be another one.
        of = (
            torch.cuda.ExternalStream(stream, device=self._device)
            if stream
            else torch.cuda.default_stream(self._device)
        )
        with torch.cuda.stream(of):
            return torch.empty(shape, dtype=DTYPES[dtype], device=self._device)

    def over(self, memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """A tensor over ``memory``. Neither way in knows bfloat16 or FP8, hence the one through bytes."""
        if num_bytes(shape, dtype) == 0:
            return self.empty(shape, dtype)
        on_cpu = self.device == "cpu"
        with torch.inference_mode(False), torch.no_grad():  # it is kept, whatever mode the first call runs in
            of_bytes = torch.from_numpy(memory) if on_cpu else torch.as_tensor(memory, device=self._device)
            return of_bytes.view(DTYPES[dtype]).view(shape)

    def renew(self, output: DispatchOutput) -> DispatchOutput:
        """New tensors over the same memory: what autograd notes of one dispatch's stays out of the next one's.

        Where gradients are off, as in serving, the same ones: nothing can be noted, and making them takes time.
        """
        quant, weights, rows = output.quant, output.weights, output.combine_input_buffer
        scales = None if quant is None else quant.block_scales
        is_marked = output.tokens.requires_grad or (rows is not None and rows.requires_grad)
        is_marked = is_marked or (weights is not None and weights.requires_grad)
        if not (torch.is_grad_enabled() or is_marked or (scales is not None and scales.requires_grad)):
            return output
        if quant is not None and scales is not None:
            quant = replace(quant, block_scales=scales.detach())
        return DispatchOutput(  # integers have no part in autograd
            output.tokens.detach(),
            quant,
            output.layout,
            output.topk_ids,
            weights if weights is None else weights.detach(),
            output.source_token,
            rows if rows is None else rows.detach(),
        )

    def current_stream(self) -> int:
        """See ArrayAdapter. The public ``torch.cuda.current_stream`` makes an object first, which takes longer."""
        address: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return address

    def _facts(self, array: Array) -> ArrayFacts:
        strided = array.layout is torch.strided
        device = str(array.device)
        return ArrayFacts(
            dtype=self.dtype(array),
            shape=tuple(array.shape),
            device=device,
            contiguous=strided and array.is_contiguous() and not array.is_neg(),
            writable=True,
            address=array.data_ptr() if strided and device == self.device else 0,
        )
