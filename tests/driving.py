"""Drives cases through the public API: the expert of the tests, one rank's part, and ranks as threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

import expertwire as ew
from bits import assert_dispatch_equal, assert_memory_order, assert_same_bits, valid_rows
from cases import Case
from expertwire import reference
from expertwire.reference import BF16, RankInput
from expertwire.types import CombineMode, DispatchLayout, DispatchLayoutInfo, DispatchOutput, MoECommunicatorConfig

POISON_BYTE = 0x3F  # plausible in every format: about 0.75 in BF16, 1.9 in FP8


@dataclass(frozen=True)
class Received:
    """Copies of what one rank got from one dispatch and the combine of the experts' answers."""

    dispatched: DispatchOutput
    combined: np.ndarray


_GAINS = np.array([1.0, 2.0**26, -(2.0**26), 0.75, -1.25], np.float32)


def gain(experts: Any, hidden_size: int) -> np.ndarray:
    """Return what experts multiply their rows with, float32 [..., H].

    Answers of different experts cancel in some columns, so that the order of a sum, the rounding of its products and
    that of its partial sums show in the result.
    """
    return np.asarray(_GAINS[(3 * np.asarray(experts)[..., None] + np.arange(hidden_size)) % len(_GAINS)])


def expert_output(
    config: MoECommunicatorConfig, received: DispatchOutput, experts: range, fill: float = 0.75
) -> np.ndarray:
    """Return what the experts of one rank answer. Rows beyond the counts hold ``fill``, a plausible value."""
    shape = list(received.tokens.shape)
    expert_major = config.output_layout is DispatchLayout.EXPERT_MAJOR
    if not expert_major and config.combine_mode is CombineMode.DIRECT_SEND:
        shape.insert(1, config.num_topk)
    output = np.full(shape, fill, BF16)
    with np.errstate(all="ignore"):
        for where in valid_rows(received):
            rows = float_rows(received, where)
            if expert_major:
                output[where] = (rows * gain(experts[where[0]], config.hidden_size)).astype(BF16)  # type: ignore[index]
            else:
                output[where] = _rank_major_answer(config, received, where, rows)
    return output


def float_rows(received: DispatchOutput, where: tuple[int | slice, ...]) -> np.ndarray:
    """Return received rows as float32 [..., H], dequantised where need be."""
    if received.quant is None:
        return received.tokens[where].astype(np.float32)
    assert received.quant.block_scales is not None
    return reference.dequantize(received.tokens[where], received.quant.block_scales[where], received.quant)


def _rank_major_answer(
    config: MoECommunicatorConfig, received: DispatchOutput, where: tuple[int | slice, ...], rows: np.ndarray
) -> np.ndarray:
    assert received.topk_ids is not None
    assert received.weights is not None
    ids, weights = received.topk_ids[where], received.weights[where]
    answers = weights[..., None] * (rows[:, None, :] * gain(ids, config.hidden_size))
    answers[ids == config.invalid_token_expert_id] = 0
    if config.combine_mode is CombineMode.DIRECT_SEND:
        return answers.astype(BF16)
    total = np.zeros_like(rows)
    for k in range(config.num_topk):
        total = total + answers[:, k]
    return total.astype(BF16)


def local_experts(comm: ew.MoECommunicator) -> range:
    return range(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)


def poison(array: np.ndarray) -> np.ndarray:
    array.view(np.uint8)[...] = POISON_BYTE
    return array


def copy_output(out: DispatchOutput, copy: Callable[[Any], np.ndarray] = np.array) -> DispatchOutput:
    """Copy a dispatch output, which the communicator overwrites. ``copy`` makes NumPy arrays of its arrays."""

    def copied(array: Any) -> Any:
        return None if array is None else copy(array)

    info = {f.name: copied(getattr(out.layout, f.name)) for f in fields(DispatchLayoutInfo) if f.name != "kind"}
    quant = None if out.quant is None else replace(out.quant, block_scales=copied(out.quant.block_scales))
    arrays = {name: copied(getattr(out, name)) for name in ("tokens", "topk_ids", "weights", "source_token")}
    return DispatchOutput(quant=quant, layout=DispatchLayoutInfo(out.layout.kind, **info), **arrays)


def dispatch(comm: ew.MoECommunicator, given: RankInput) -> tuple[DispatchOutput, Any]:
    """Dispatch into a poisoned buffer."""
    poison(comm.get_dispatch_output_buffer())
    quant = None if given.block_scales is None else ew.QuantConfig(block_scales=given.block_scales)
    out, handle = comm.dispatch(given.x, given.topk_ids, given.weights, quant=quant)
    assert_memory_order(out)
    return out, handle


def exchange(
    comm: ew.MoECommunicator, given: RankInput, new_weights: np.ndarray | None = None, fill: float = 0.75
) -> Received:
    """Dispatch, let the experts answer, and combine."""
    config = comm.config
    out, handle = dispatch(comm, given)
    received = copy_output(out)
    answer = expert_output(config, received, local_experts(comm), fill)
    result = poison(np.empty((len(given.x), config.hidden_size), BF16))
    combined = comm.combine(answer, handle, weights=new_weights, out=result)
    assert combined is result
    return Received(received, combined)


def expected(config: MoECommunicatorConfig, inputs: Sequence[RankInput], new_weights: Any = None) -> list[Received]:
    """Return what the reference says each rank gets."""
    outputs = reference.dispatch(config, inputs)
    ranks = reference.experts_of_ranks(config, len(inputs))
    answers = [expert_output(config, out, experts) for out, experts in zip(outputs, ranks, strict=True)]
    combined = reference.combine(config, inputs, answers, new_weights)
    return [Received(out, y) for out, y in zip(outputs, combined, strict=True)]


def assert_received(got: Sequence[Received], want: Sequence[Received], what: str = "") -> None:
    assert len(got) == len(want)
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_dispatch_equal(ours.dispatched, theirs.dispatched, f"{what} dispatch on rank {rank}")
        assert_same_bits(ours.combined, theirs.combined, f"{what} combine on rank {rank}")


def run_threads(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run fn(group, *args) in one thread per rank and return the results; raise the first failure by rank."""
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(fn, group, *args) for group in ew.local_group(num_ranks)]
    return [future.result() for future in futures]


def run_processes(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run fn(group, *args) in one process per rank and return the results."""
    return list(ew.spawn(fn, num_ranks, *args))


def rank_of_case(group: ew.Group, case: Case, num_steps: int) -> list[Received]:
    """Be one rank of a case."""
    with ew.MoECommunicator(group, case.config) as comm:
        return steps_of_case(comm, case, num_steps, exchange)


def steps_of_case(
    comm: ew.MoECommunicator, case: Case, num_steps: int, exchange: Callable[..., Received]
) -> list[Received]:
    """Do exchanges that leave their rows in every buffer, then ``num_steps`` of the case itself."""
    config, rank = comm.config, comm.rank
    full = replace(case, ids="uniform", tokens=(config.max_tokens_per_rank,) * comm.num_ranks, values="normal")
    for step in range(-config.max_in_flight, 0):
        exchange(comm, full.inputs(step)[rank])
    results = []
    for step in range(num_steps):
        new_weights = case.replaced_weights(step)
        results.append(exchange(comm, case.inputs(step)[rank], new_weights[rank] if new_weights else None))
    return results


def expected_of_case(case: Case, step: int) -> list[Received]:
    return expected(case.config, case.inputs(step), case.replaced_weights(step))
