"""Every case of the table on CUDA, bit for bit against the reference, by ranks that share a GPU and by a GPU a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import expertwire as ew
from cases import ALL_CASES, CASES, WAYS, Case, way_name
from cuda_driving import (
    EVERY_PAYLOAD,
    EVERY_WAY,
    Place,
    check_case,
    communicator,
    exchange,
    living_at,
    rank_of_case,
    run_virtual,
    share,
)
from driving import Received
from expertwire.types import QuantConfig

pytestmark = pytest.mark.gpu

#: Processes on one GPU take turns in slices of milliseconds, so that few cases have to do.
AS_PROCESSES = (
    *(f"tokens-0-4-4-{way_name(*way)}" for way in WAYS),
    *(f"ids-half-{way_name(*way)}" for way in WAYS),
    "fp8-ue8m0-column-expert",
    "lanes-2-rank-reduce",
    "ids-int32-expert-reduce",
    "model-7168x256x8-expert-reduce-bf16",
)
#: Ranks spread over two GPUs, evenly and not.
OVER_DEVICES = (
    *(name for name in CASES if name.startswith(("ranks-2-", "ranks-4-", "ranks-8-"))),
    *(f"ids-half-{way_name(*way)}" for way in WAYS),
    *(f"values-specials-{way_name(*way)}" for way in WAYS),
    "fp8-float32-given-rank",
    "fp8-ue8m0-column-expert",
    "lanes-2-rank-reduce",
    "model-7168x256x8-rank-reduce-fp8_e4m3",
)
#: With these, partial sums are on their way before a peer could hear of new weights: CUDA refuses the call.
REFUSED = ("new-weights-all-over-router-expert-reduce", "new-weights-even-ranks-over-router-expert-reduce")
EIGHT = (3, 0, 17, 9, 1, 12, 17, 5)


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.name not in REFUSED], ids=lambda case: case.name)
def test_virtual_ranks(case: Case) -> None:
    check_case(case, run_virtual(rank_of_case, share(case.num_ranks), case, 2))


def _try_new_weights(group: ew.Group, place: Place, case: Case) -> str:
    new_weights = case.replaced_weights()
    assert new_weights is not None
    with communicator(group, case, place) as comm, pytest.raises(ew.UnsupportedError) as caught:
        exchange(comm, case.inputs()[comm.rank], new_weights[comm.rank])
    return str(caught.value)


def test_new_weights_over_old_ones_are_refused_where_sums_are_on_their_way() -> None:
    case = CASES[REFUSED[0]]
    for text in run_virtual(_try_new_weights, share(case.num_ranks), case):
        assert "weights: on CUDA with RANK_LOCAL_REDUCE" in text


@EVERY_PAYLOAD
@EVERY_WAY
def test_eight_virtual_ranks(way: tuple, quant: QuantConfig) -> None:
    name = f"eight-{way_name(*way)}-{quant.format.value}"
    case = Case(name, EIGHT, 64, 1024, 8, layout=way[0], combine_mode=way[1], quant=quant, weights="router", ids="half")
    check_case(case, run_virtual(rank_of_case, share(8), case, 2))


@pytest.mark.parametrize("num_blocks", [1, 2, (3, 1), (1, 7), None])
@EVERY_WAY
def test_any_grid_gives_the_same_bits(way: tuple, num_blocks: int | tuple[int, int] | None) -> None:
    case = Case(f"grid-{way_name(*way)}", (19, 33), 12, 136, 3, layout=way[0], combine_mode=way[1])
    check_case(case, run_virtual(rank_of_case, [Place(num_blocks=num_blocks)] * 2, case, 2))


def test_one_rank_with_the_whole_gpu() -> None:
    case = Case("alone", (40,), 6, 512, 4)
    for num_blocks in (None, share(1)[0].num_blocks * 2 - 1):
        check_case(case, run_virtual(rank_of_case, [Place(num_blocks=num_blocks)], case, 2))


def _rank_as_process(group: ew.Group, case: Case, places: Sequence[Place]) -> list[Received]:
    with living_at(places[group.rank]):
        return rank_of_case(group, places[group.rank], case, 2)


@pytest.mark.parametrize("name", AS_PROCESSES)
def test_processes_share_a_gpu(name: str) -> None:
    case = CASES[name]
    check_case(case, ew.spawn(_rank_as_process, case.num_ranks, case, [Place()] * case.num_ranks, timeout_s=110))


def _given_four(case: Case) -> Case:
    return replace(case, name=f"{case.name}-by-four", tokens=(5, 0, 7, 3), num_experts=12, experts_per_rank=None)


@EVERY_WAY
def test_four_processes_share_a_gpu(way: tuple) -> None:
    case = _given_four(CASES[f"weights-router-{way_name(*way)}"])
    check_case(case, ew.spawn(_rank_as_process, 4, case, [Place()] * 4, timeout_s=110))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", [name for name in OVER_DEVICES if CASES[name].num_ranks == 2])
def test_a_process_for_each_gpu(name: str) -> None:
    case = CASES[name]
    check_case(case, ew.spawn(_rank_as_process, 2, case, [Place("cuda:0"), Place("cuda:1")], timeout_s=110))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", OVER_DEVICES)
def test_virtual_ranks_over_two_gpus(name: str) -> None:
    case = CASES[name]
    check_case(case, run_virtual(rank_of_case, share(case.num_ranks, 2), case, 2))
