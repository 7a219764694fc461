"""The torch operators on CUDA: gradients as on the CPU, and a captured dispatch, experts and combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import expertwire as ew

torch = pytest.importorskip("torch")
from expertwire.interop.torch import TorchCommunicator, capture  # noqa: E402
from test_torch_gradients import LAYOUTS, Problem, check_gradients, rank_gradients, same  # noqa: E402

pytestmark = pytest.mark.gpu
HIDDEN, EXPERTS, MOST = 64, 4, 3


@pytest.fixture(autouse=True)
def _not_while_kernels_are_listed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("list_kernels", None) is not None:
        pytest.skip("compiles its kernels as it runs")


def problems(tokens: tuple[int, ...], experts: tuple[int, ...]) -> list[Problem]:
    return [Problem(tokens, experts, 3, layout, is_exact=True) for layout in LAYOUTS]


def _rank(group: ew.Group, all_problems: Sequence[Problem], devices: Sequence[str]) -> list[dict[str, Any]]:
    torch.cuda.set_device(devices[group.rank])
    return [rank_gradients(group, problem, problem.inputs(), devices) for problem in all_problems]


def _check(all_problems: Sequence[Problem], of_ranks: Sequence[list[dict[str, Any]]]) -> None:
    for number, problem in enumerate(all_problems):
        check_gradients(problem, problem.inputs(), [results[number] for results in of_ranks], same)


def test_gradients_on_one_rank_are_exact() -> None:
    ones = problems((5,), (4,))
    _check(ones, [_rank(ew.local_group(1)[0], ones, ["cuda:0"])])


@pytest.mark.timeout(100)
def test_gradients_of_processes_that_share_a_gpu_are_exact() -> None:
    twos = problems((5, 3), (2, 2))
    _check(twos, list(ew.spawn(_rank, 2, twos, ["cuda:0"] * 2, timeout_s=80)))


@pytest.mark.multi_gpu
@pytest.mark.timeout(100)
def test_gradients_of_a_process_for_each_gpu_are_exact() -> None:
    uneven = problems((4, 5), (1, 3))
    _check(uneven, list(ew.spawn(_rank, 2, uneven, ["cuda:0", "cuda:1"], timeout_s=80)))


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_a_captured_layer_follows_its_arguments(layout: str) -> None:
    def experts(output: ew.DispatchOutput) -> None:
        rows = output.combine_input_buffer
        if output.weights is None:
            torch.mul(output.tokens, 2, out=rows)
        else:  # rows go back weighted
            torch.mul(output.tokens, 2 * output.weights.sum(-1, keepdim=True).bfloat16(), out=rows)

    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_topk": 2, "max_tokens_per_rank": MOST}
    config = ew.MoECommunicatorConfig(**sizes, output_layout=layout, device="cuda:0")
    x = torch.arange(MOST * HIDDEN).view(MOST, HIDDEN).remainder(128).bfloat16().cuda()
    ids = torch.tensor([[0, 3], [2, -1], [1, 0]], device="cuda")
    weights = torch.tensor([[0.5, 0.25], [2.0, 9.0], [1.0, 1.0]], device="cuda")
    factors = torch.tensor([[1.5], [4.0], [4.0]], device="cuda")  # of the slots that select something, times 2
    with ew.MoECommunicator(ew.local_group(1)[0], config) as comm:
        graphed = capture(comm, experts)
        for num_tokens in (3, 1, 0, 2):
            y = graphed(x[:num_tokens], ids[:num_tokens], weights[:num_tokens])
            assert torch.equal(y, (x * factors)[:num_tokens].bfloat16())
        with pytest.raises(ew.InvalidArgumentError, match="x = 4 tokens: must be at most the captured 3"):
            graphed(torch.zeros(4, HIDDEN, device="cuda").bfloat16(), ids, weights)
        torch.cuda.synchronize()
        del graphed


def test_layers_share_a_communicator_on_a_gpu() -> None:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_topk": 2, "max_tokens_per_rank": MOST}
    with TorchCommunicator(ew.local_group(1)[0], device="cuda:0", **sizes) as moe:
        x = torch.ones(MOST, HIDDEN, device="cuda").bfloat16().requires_grad_()
        y = x
        for _ in range(2):
            dispatched = moe.dispatch(y, torch.tensor([[0, 1], [2, 3], [3, 0]], device="cuda"))
            y = moe.combine(dispatched.tokens, dispatched)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 4))
