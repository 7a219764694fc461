"""Every case of the table on CUDA, bit for bit against the reference, by ranks that share a GPU and by a GPU a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import expertwire as ew
from cases import ALL_CASES, CASES, WAYS, Case, way_name
from cuda_driving import (
    EVERY_PAYLOAD,
    EVERY_WAY,
    Place,
    check_case,
    living_at,
    rank_of_case,
    run_virtual,
    share,
)
from driving import Received
from expertwire.types import QuantConfig

pytestmark = pytest.mark.gpu

#: Processes on one GPU take turns in slices of milliseconds, and take seconds to start: few cases have to do.
AS_PROCESSES = {
    2: ("lanes-2-rank-reduce", "ids-int32-expert-reduce", "model-7168x256x8-expert-reduce-bf16"),
    3: (*(f"tokens-0-4-4-{way_name(*way)}" for way in WAYS), "fp8-ue8m0-column-expert"),
    4: tuple(f"ids-half-{way_name(*way)}" for way in WAYS),
}
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
EIGHT = (3, 0, 17, 9, 1, 12, 17, 5)


@EVERY_WAY
def test_one_rank_with_the_whole_gpu(way: tuple) -> None:
    case = Case(f"alone-{way_name(*way)}", (40,), 6, 512, 4, layout=way[0], combine_mode=way[1])
    for num_blocks in (None, share(1)[0].num_blocks * 2 - 1, 8):  # these go in pairs of SMs
        check_case(case, run_virtual(rank_of_case, [Place(num_blocks=num_blocks)], case, 2))


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


def _long_lists(way: tuple, **fields: Any) -> Case:
    """Return a case in which warps of two blocks have so many parts of rows each that they move two words at once."""
    shape = {"tokens": (100, 61), "num_experts": 12, "hidden_size": 1024, "num_topk": 4, "weights": "router", **fields}
    return Case(f"long-{way_name(*way)}", layout=way[0], combine_mode=way[1], **shape)


@EVERY_PAYLOAD
@EVERY_WAY
def test_long_lists_of_few_blocks(way: tuple, quant: QuantConfig) -> None:
    case = _long_lists(way, quant=quant)
    check_case(case, run_virtual(rank_of_case, [Place(num_blocks=2)] * 2, case, 2))


@EVERY_WAY
def test_long_lists_with_masking(way: tuple) -> None:
    case = _long_lists(way)
    places = [Place(num_blocks=2)] * 2
    check_case(case, run_virtual(partial(rank_of_case, on_peer_loss="mask"), places, case, 2))


@EVERY_WAY
def test_long_lists_of_the_whole_gpu(way: tuple) -> None:
    """Half of whose blocks send in EXPERT_MAJOR, and half place."""
    case = _long_lists(way, tokens=(600,), hidden_size=7168)
    check_case(case, run_virtual(rank_of_case, [Place()], case, 2))


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_virtual_ranks(case: Case) -> None:
    check_case(case, run_virtual(rank_of_case, share(case.num_ranks), case, 2))


def _many_to_few_tokens(num_ranks: int) -> list[Case]:
    """Return cases whose later calls bring fewer tokens, so that kernels for many and for few follow one another."""
    return [
        Case(f"many-{way_name(*way)}", (300, 1) * (num_ranks // 2), 16, 1024, 4, layout=way[0], combine_mode=way[1])
        for way in WAYS
    ]


@pytest.mark.parametrize("case", _many_to_few_tokens(4), ids=lambda case: case.name)
def test_many_tokens_and_few(case: Case) -> None:
    check_case(case, run_virtual(rank_of_case, share(4), case, 2))


def _cases_as_process(group: ew.Group, cases: Sequence[Case], places: Sequence[Place]) -> list[list[Received]]:
    with living_at(places[group.rank]):
        return [rank_of_case(group, places[group.rank], case, 2) for case in cases]


def _check_processes(cases: Sequence[Case], places: Sequence[Place]) -> None:
    of_ranks = ew.spawn(_cases_as_process, len(places), cases, places, timeout_s=80)
    for number, case in enumerate(cases):
        check_case(case, [results[number] for results in of_ranks])


@pytest.mark.timeout(100)
@pytest.mark.parametrize("num_ranks", AS_PROCESSES)
def test_processes_share_a_gpu(num_ranks: int) -> None:
    _check_processes([CASES[name] for name in AS_PROCESSES[num_ranks]], [Place()] * num_ranks)


@pytest.mark.multi_gpu
@pytest.mark.timeout(100)
def test_a_process_for_each_gpu() -> None:
    cases = [CASES[name] for name in OVER_DEVICES if CASES[name].num_ranks == 2]
    _check_processes(cases, [Place("cuda:0"), Place("cuda:1")])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", OVER_DEVICES)
def test_virtual_ranks_over_two_gpus(name: str) -> None:
    case = CASES[name]
    check_case(case, run_virtual(rank_of_case, share(case.num_ranks, 2), case, 2))
