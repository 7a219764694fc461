"""The torch operators: lifetimes of what they keep, refusals, and what torch itself checks of an operator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
from expertwire.interop.torch import TorchCommunicator, capture  # noqa: E402

HIDDEN = 8
PAGE = Path(__file__).resolve().parent.parent / "docs" / "torch.md"


def single(**fields: Any) -> TorchCommunicator:
    """Return the only rank of a group: four experts, two for each token, rows of eight."""
    sizes = {"num_experts": 4, "hidden_size": HIDDEN, "num_topk": 2, "max_tokens_per_rank": 3}
    return TorchCommunicator(ew.local_group(1)[0], **{**sizes, **fields})


def inputs() -> tuple[Any, Any, Any]:
    x = torch.arange(3.0 * HIDDEN).reshape(3, HIDDEN).bfloat16().requires_grad_()
    return x, torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.tensor([[0.5, 1], [2, 4], [1, 0.25]]).requires_grad_()


def test_outputs_belong_to_the_caller() -> None:
    with single() as moe, torch.no_grad():
        first = moe.dispatch(*inputs())
        kept = [part.clone() for part in first]
        moe.dispatch(torch.full((1, HIDDEN), 9.0).bfloat16(), torch.tensor([[1, 2]]))
        assert all(torch.equal(part, before) for part, before in zip(first, kept, strict=True))


def test_rows_beyond_the_counts_are_zero_also_after_fuller_dispatches() -> None:
    with single() as moe, torch.no_grad():
        moe.dispatch(*inputs())
        second = moe.dispatch(torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[1, -1]]))
        assert second.num_tokens.tolist() == [0, 1, 0, 0]
        assert float(second.tokens.float().sum()) == HIDDEN


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_dispatch_that_newer_ones_have_overwritten_is_not_combined(lanes: int) -> None:
    with single(max_in_flight=lanes) as moe, torch.no_grad():
        made = [moe.dispatch(*inputs()) for _ in range(lanes + 1)]
        with pytest.raises(ew.HandleError, match=f"combine: .*max_in_flight = {lanes} newer ones"):
            moe.combine(made[0].tokens, made[0])
        assert torch.equal(moe.combine(made[1].tokens, made[1]), moe.combine(made[-1].tokens, made[-1]))


def test_rows_of_another_communicator_are_refused() -> None:
    with single() as moe, single() as other, torch.no_grad():
        dispatched = other.dispatch(*inputs())
        moe.dispatch(*inputs())
        with pytest.raises(ew.HandleError, match="combine: these rows are another communicator's"):
            moe.combine(dispatched.tokens, dispatched)


def test_layers_may_be_run_again_in_the_backward_pass() -> None:
    gradients = []
    for again in (False, True):
        with single() as moe:
            x, ids, weights = inputs()

            def layer(x: Any, weights: Any, moe: TorchCommunicator = moe, ids: Any = ids) -> Any:
                dispatched = moe.dispatch(x, ids, weights)
                return moe.combine(torch.sin(dispatched.tokens), dispatched)

            y = checkpoint(layer, x, weights, use_reentrant=False) if again else layer(x, weights)
            y.backward(torch.ones_like(y))
            gradients.append((x.grad, weights.grad))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_backward_again_after_other_dispatches_gives_the_same() -> None:
    with single() as moe:
        x, ids, weights = inputs()
        dispatched = moe.dispatch(x, ids, weights)
        loss = (moe.combine(dispatched.tokens * 2, dispatched).float() ** 2).sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone(), weights.grad.clone()
        x.grad = weights.grad = None
        moe.dispatch(torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[1, 2]]))
        loss.backward()
        assert torch.equal(x.grad, once[0])
        assert torch.equal(weights.grad, once[1])


def test_backward_of_dispatch_alone_needs_no_combine() -> None:
    with single() as moe:
        x, ids, _ = inputs()
        moe.dispatch(x, ids).tokens.float().sum().backward()  # each token lies in two rows
        assert torch.equal(x.grad, torch.full_like(x, 2))


def test_two_layers_share_a_communicator_of_one_lane() -> None:
    with single() as moe:
        x, ids, weights = inputs()
        y = x
        for _ in range(2):
            dispatched = moe.dispatch(y, ids, weights)
            y = moe.combine(dispatched.tokens, dispatched)
        y.backward(torch.ones_like(y))
        total = weights.detach().sum(1, keepdim=True)
        assert torch.equal(x.grad.float(), (total**2).expand(3, HIDDEN))


def test_expert_outputs_in_a_lane_are_copied_before_the_lane_is_used_again() -> None:
    gradients = []
    for use_lane in (False, True):
        with single() as moe:
            x, ids, weights = inputs()
            dispatched = moe.dispatch(x, ids, weights)
            expert_output = torch.zeros_like(dispatched.tokens)
            if use_lane:
                expert_output = moe.communicator.get_combine_input_buffer("torch")
            expert_output.copy_(dispatched.tokens.detach() * 2)
            y = moe.combine(expert_output, dispatched)
            expert_output.data.fill_(99) if use_lane else None
            y.backward(torch.ones_like(y))
            gradients.append(weights.grad)
    assert torch.equal(*gradients)


def test_an_operator_that_kept_a_lane_says_so() -> None:
    with single() as moe:
        x, ids, weights = inputs()
        dispatched = moe.dispatch(x, ids, weights)
        lane = moe.communicator.get_combine_input_buffer("torch")
        lane.zero_()
        y = torch.ops.expertwire.combine(lane, ids, weights, dispatched.ticket, moe._comm)
        with pytest.raises(ew.InvalidArgumentError, match="expert_output: lies in a lane"):
            y.sum().backward()


def test_ranks_that_do_not_train_need_no_side_communicator() -> None:
    with single(training=False) as moe:
        x, ids, weights = inputs()
        dispatched = moe.dispatch(x, ids, weights)
        y = moe.combine(dispatched.tokens, dispatched)
        assert torch.equal(y, (x * weights.sum(1, keepdim=True)).bfloat16())
        with pytest.raises(ew.UnsupportedError, match="training=False"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 128, "quant": ew.QuantConfig(format=ew.DispatchDataType.FP8_E4M3)}, "quant.format = FP8_E4M3"),
        ({"on_peer_loss": "mask"}, "on_peer_loss"),
        ({"placement": range(4)}, "placement: gradients need one that stays"),
        ({"output_layout": "rank_major", "combine_mode": "direct_send"}, "RANK_MAJOR with DIRECT_SEND"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ew.UnsupportedError, match=named):
        single(**fields)


def test_mistakes_are_those_of_the_communicator() -> None:
    with single() as moe:
        x, ids, weights = inputs()
        with pytest.raises(ew.InvalidArgumentError, match=r"x = .*bfloat16"):
            moe.dispatch(x.float(), ids, weights)
        with pytest.raises(ew.InvalidArgumentError, match="topk_ids"):
            moe.dispatch(x, ids + 9, weights)
        dispatched = moe.dispatch(x, ids, weights)
        with pytest.raises(ew.InvalidArgumentError, match="expert_output"):
            moe.combine(dispatched.tokens[:1], dispatched)
    with pytest.raises(ew.InvalidArgumentError, match="no open communicator"):
        moe.dispatch(x, ids, weights)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_torch_finds_schema_and_shapes_to_be_true(layout: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operators = torch.ops.expertwire
    with single(output_layout=layout, max_in_flight=64) as moe:
        x, ids, weights = inputs()
        sent = moe.dispatch(x, ids, weights)
        rows, comm, slots = sent.tokens.detach(), moe._comm, None if layout == "expert_major" else sent.weights.detach()
        kept = rows.clone() if layout == "expert_major" else None
        calls = {
            "dispatch": (x, ids, weights, comm),
            "combine": (rows.clone().requires_grad_(), ids, weights, sent.ticket, comm),
            "dispatch_backward": (rows, slots, ids, sent.ticket, comm),
            "combine_backward": (x.detach(), kept, ids, weights.detach(), sent.ticket, comm),
        }
        for name, arguments in calls.items():
            torch.library.opcheck(getattr(operators, name).default, arguments, test_utils=checks)


def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(import .*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(True, True), (True, True)]\n"


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_what_autograd_notes_of_a_dispatch_stays_out_of_later_ones(layout: str) -> None:
    x, ids, weights = (part.detach() for part in inputs())
    config = ew.MoECommunicatorConfig(
        num_experts=4, hidden_size=HIDDEN, num_topk=2, max_tokens_per_rank=3, output_layout=layout
    )
    with ew.MoECommunicator(ew.local_group(1)[0], config) as comm:
        for name in ("tokens", "combine_input_buffer", *(["weights"] if layout == "rank_major" else [])):
            for _ in range(2):
                getattr(comm.dispatch(x, ids, weights)[0], name).requires_grad_()
                with torch.no_grad():
                    first, second = (comm.dispatch(x, ids, weights)[0] for _ in range(2))
                    assert first is second  # where nothing can be noted
                    assert not getattr(first, name).requires_grad
                    getattr(first, name).requires_grad_()
                    assert not getattr(comm.dispatch(x, ids, weights)[0], name).requires_grad
                    getattr(first, name).requires_grad_(False)


def test_a_graph_needs_a_gpu() -> None:
    with single() as moe:
        with pytest.raises(ew.UnsupportedError, match="on the CPU, and CUDA graphs need one on a GPU"):
            capture(moe.communicator, lambda _: None)
        with pytest.raises(ew.InvalidArgumentError, match="comm = TorchCommunicator object"):
            capture(moe, lambda _: None)
