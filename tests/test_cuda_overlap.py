"""overlap= on CUDA: a stream, an event and a number of SMs for one operation. The bits do not depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import expertwire as ew
from cases import Case, way_name
from cuda_driving import EVERY_WAY, Place, communicator, poison, run_virtual, share, to_device, to_host
from driving import Received, assert_received, copy_output, expected, expert_output, local_experts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("overlap-op", (40, 3, 25), 9, 512, 3, max_in_flight=2, weights="router")


def _rank_with_few_sms(group: ew.Group, place: Place, case: Case, fields: dict[str, Any]) -> list[Received]:
    """Change the number of SMs with every call, and run each on another stream behind an event."""
    results = []
    with communicator(group, case, place, two_phase=True, **fields) as comm:
        side = torch.cuda.Stream(place.device)
        for step, sms in enumerate((1, 3, None, 2, 1000, 1)):
            current, event = torch.cuda.current_stream(), torch.cuda.Event()
            given = case.inputs(step)[group.rank]
            arrays = [to_device(array, place.device) for array in (given.x, given.topk_ids, given.weights)]
            poison(comm.get_dispatch_output_buffer("torch"))
            event.record(current)
            overlap = comm.create_overlap_config("dispatch", stream=side, wait_event=event, num_comm_sms=sms)
            if step % 2:
                out, handle = comm.dispatch(*arrays, overlap=overlap)
            else:
                out, handle = comm.dispatch_async(*arrays, overlap=overlap).wait(stream=side)
            side.synchronize()
            received = copy_output(out, to_host)
            answer = to_device(expert_output(case.config, received, local_experts(comm)), place.device)
            result = poison(torch.empty((len(given.x), case.hidden_size), dtype=torch.bfloat16, device=place.device))
            event.record(current)
            overlap = comm.create_overlap_config("combine", stream=side, wait_event=event, num_comm_sms=sms)
            if step % 3:
                comm.combine(answer, handle, out=result, overlap=overlap)
            else:
                comm.combine_async(answer, handle, out=result, overlap=overlap).wait(stream=side)
            side.synchronize()
            results.append(Received(received, to_host(result)))
    return results


@pytest.mark.parametrize("policy", ["raise", "mask"])
@EVERY_WAY
def test_any_number_of_sms_gives_the_same_bits(way: tuple, policy: str) -> None:
    case = replace(CASE, name=f"{CASE.name}-{way_name(*way)}", layout=way[0], combine_mode=way[1])
    of_ranks = run_virtual(_rank_with_few_sms, share(3), case, {"on_peer_loss": policy})
    for step in range(6):
        got = [results[step] for results in of_ranks]
        assert_received(got, expected(case.config, case.inputs(step)), f"step {step}")


def _refuse(group: ew.Group, place: Place) -> None:
    case = replace(CASE, name="overlap-refused", tokens=(5,))
    with communicator(group, case, place) as comm:
        with pytest.raises(ew.UnsupportedError, match="block_overlap=True"):
            comm.create_overlap_config("combine", level="block")
        with pytest.raises(ew.InvalidArgumentError, match="wait_event = str object"):
            comm.create_overlap_config("combine", wait_event="now")
        with pytest.raises(ew.InvalidArgumentError, match="wait_event = Event object"):
            comm.create_overlap_config("combine", wait_event=torch.cuda.Event())  # never recorded


def test_what_cuda_does_not_take_is_refused() -> None:
    run_virtual(_refuse, share(1))
