"""Adapters of libraries of others, as far as they can be tried without the libraries and without GPUs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from expertwire.bench.adapters import flashinfer as adapter
from expertwire.bench.adapters.base import Belongings, RankContext
from expertwire.bench.adapters.flashinfer import FlashInfer
from expertwire.bench.adapters.peer import Peer
from expertwire.bench.inputs import rank_input
from expertwire.types import DispatchLayout
from test_bench import QUICK, SMALL

PROBLEM = replace(SMALL, layout=DispatchLayout.RANK_MAJOR)


class Shuffles(Peer):
    """One rank, rows in another order each time, outputs of the first pair in each of them."""

    name = "shuffles"
    notes = ""
    module = "torch"
    install = ""

    def set_up(self) -> None:
        self._random = np.random.default_rng(1)
        self._losing = False

    def dispatch(self) -> None:
        """Put the rows anywhere, or put them there and write no sums."""
        self._places = self._torch.from_numpy(self._random.permutation(len(self._x)))
        self._rows = self._x[self._places.argsort()]

    def apply_experts(self) -> None:
        """Work out what belongs to the rows."""
        order = self._places.argsort()
        self._outputs = self.weighted_outputs(self._rows, self._topk_ids[order], self._weights[order])

    def combine(self) -> None:
        """Take the outputs from their places."""
        self._combined.copy_(self._outputs[self._places])
        if self._losing:
            self._combined[0] = 0

    def received(self) -> tuple[Any, Any]:
        """Return all rows."""
        counts = self._torch.tensor([len(self._rows)])
        return counts, self._rows

    def close(self) -> None:
        """Do nothing."""

    def lose(self, losing: bool) -> None:
        """Whether the first token gets nothing."""
        self._losing = losing


def test_sums_of_rows_in_another_order_are_those_of_one_pair_more() -> None:
    pytest.importorskip("torch")
    problem = replace(SMALL, num_ranks=1, layout=DispatchLayout.RANK_MAJOR)
    (group,) = ew.local_group(1)
    inputs = [rank_input(problem, 0)]
    peer = Shuffles(RankContext(group, problem, QUICK, inputs[0], lambda word: [word], Belongings()))
    (expected,) = Peer.expected(problem, inputs)

    def pair() -> None:
        peer.forget()
        peer.dispatch()
        peer.combine()

    peer.dispatch()
    peer.apply_experts()
    peer.combine()
    assert Peer.difference(peer.observe(), expected) == ""
    pair()
    assert Peer.difference(peer.observe(), expected) == ""
    for _ in range(2):
        peer.lose(losing=True)
        pair()
        peer.lose(losing=False)
        assert "differ by more than rounding" in Peer.difference(peer.observe(), expected)
    pair()
    peer.forget()
    assert "differ by more than rounding" in Peer.difference(peer.observe(), expected)


class Meeting:
    """Where the threads of all ranks leave things for each other."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._left: dict[int, Any] = {}
        self.num_ranks = num_ranks

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        """All-gather."""
        self._left[rank] = thing
        self._barrier.wait()
        things = [self._left[one] for one in range(self.num_ranks)]
        self._barrier.wait()
        return things


class OneSided:
    """What both generations of FlashInfer do: a token once for each rank, in any slot of its source rank's part."""

    def __init__(self, meeting: Meeting, rank: int, num_experts: int, num_tokens: int) -> None:
        self._meeting, self._rank, self._num_tokens = meeting, rank, num_tokens
        self._share = num_experts // meeting.num_ranks
        self._random = np.random.default_rng(rank)
        self._waits = False

    def dispatch(self, ids: Any, payloads: list[Any], mark: int) -> list[Any]:
        """Return parts [R, T, ...]; ids of slots without a token are marked, all else in them is old."""
        import torch

        assert not self._waits
        assert ids.dtype is torch.int32
        self._waits = True
        self._slots = []
        for rank in range(self._meeting.num_ranks):
            to_it = ((ids // self._share) == rank).any(dim=1).nonzero()[:, 0]
            slots = torch.full((self._num_tokens,), -1)
            slots[to_it] = torch.from_numpy(self._random.permutation(len(to_it)))
            self._slots.append(slots)
        sent = self._meeting.exchange(self._rank, (self._slots, payloads))
        received = [
            torch.full((len(sent), *part.shape), mark if part is ids else 3, dtype=part.dtype) for part in payloads
        ]
        for source, (slots, parts) in enumerate(sent):
            tokens = (slots[self._rank] >= 0).nonzero()[:, 0]
            for part, rows in zip(received, parts, strict=True):
                part[source, slots[self._rank][tokens]] = rows[tokens]
        hidden = payloads[0].shape[1]
        self.buffer = torch.full((len(sent), self._num_tokens, hidden), float("nan"), dtype=torch.bfloat16)
        return received

    def combine(self, outputs: Any, combined: Any) -> None:
        """Sum what lies in the slots."""
        import torch

        assert self._waits
        self._waits = False
        total = torch.zeros(combined.shape)
        for slots, rows in zip(self._slots, self._meeting.exchange(self._rank, outputs.clone()), strict=True):
            own = rows.view(self._meeting.num_ranks, self._num_tokens, -1)[self._rank]
            total += own[slots.clamp(min=0)].float().where((slots >= 0)[:, None], torch.zeros(()))
        combined.copy_(total)


def of_0_6(meeting: Meeting) -> dict[str, ModuleType]:
    """Return modules like those of FlashInfer 0.6."""

    class MoeAlltoAll:
        def __init__(self, mapping: Any, max_num_tokens: int, top_k: int, num_experts: int, **more: Any) -> None:
            assert more.keys() == {"hidden_size", "mnnvl_config"}
            assert top_k == PROBLEM.num_topk
            self._way = OneSided(meeting, mapping.rank, num_experts, max_num_tokens)

        def dispatch(
            self,
            token_selected_experts: Any,
            input_payloads: list[Any],
            runtime_max_tokens_per_rank: int,
            invalid_token_expert_id: int | None = None,
            expert_id_payload_index: int | None = None,
        ) -> list[Any]:
            assert runtime_max_tokens_per_rank == PROBLEM.num_tokens
            assert expert_id_payload_index is not None
            assert input_payloads[expert_id_payload_index] is token_selected_experts
            assert invalid_token_expert_id is not None
            return self._way.dispatch(token_selected_experts, input_payloads, invalid_token_expert_id)

        def get_combine_payload_tensor_in_workspace(self, num_tokens: int, hidden_size: int, dtype: Any) -> Any:
            assert self._way.buffer.shape[1:] == (num_tokens, hidden_size)
            assert self._way.buffer.dtype is dtype
            return self._way.buffer

        def combine(
            self,
            payload: Any,
            runtime_max_tokens_per_rank: int,
            payload_in_workspace: bool = False,
            output: Any = None,
        ) -> Any:
            assert runtime_max_tokens_per_rank == PROBLEM.num_tokens
            assert payload_in_workspace
            self._way.combine(payload, output)
            return output

    comm, mapping, mnnvl = (ModuleType(f"flashinfer.comm{end}") for end in ("", ".mapping", ".mnnvl"))
    comm.MoeAlltoAll = MoeAlltoAll  # type: ignore[attr-defined]
    mapping.Mapping = SimpleNamespace  # type: ignore[attr-defined]
    mnnvl.MnnvlConfig = SimpleNamespace  # type: ignore[attr-defined]
    mnnvl.TorchDistBackend = object  # type: ignore[attr-defined]
    return {module.__name__: module for module in (comm, mapping, mnnvl)}


def of_0_7(meeting: Meeting) -> dict[str, ModuleType]:
    """Return modules like those of FlashInfer 0.7."""

    class NVLinkOneSidedAlltoAll:
        def __init__(self, rank: int, params: Any) -> None:
            assert (params.top_k, params.hidden_size) == (PROBLEM.num_topk, PROBLEM.hidden_size)
            self._way = OneSided(meeting, rank, params.num_experts, params.max_tokens_per_rank)

        def dispatch(self, hidden_states: Any, topk_ids: Any, topk_weights: Any = None) -> Any:
            parts = self._way.dispatch(topk_ids, [hidden_states, topk_ids, topk_weights], -1)
            names = ("hidden_states", "topk_ids", "topk_weights")
            return SimpleNamespace(**{name: part.flatten(0, 1) for name, part in zip(names, parts, strict=True)})

        def get_combine_input_buffer(self, dtype: Any) -> Any:
            assert self._way.buffer.dtype is dtype
            return self._way.buffer.flatten(0, 1)

        def combine(self, expert_output: Any, *, output: Any = None) -> Any:
            self._way.combine(expert_output, output)
            return output

        def destroy(self) -> None:
            pass

    comm, moe_ep = ModuleType("flashinfer.comm"), ModuleType("flashinfer.moe_ep")
    for name in ("MoEEpCommParams", "BootstrapConfig", "NVLinkOneSidedConfig"):
        setattr(moe_ep, name, SimpleNamespace)

    def create_communication(bootstrap: Any, params: Any, backend: Any) -> NVLinkOneSidedAlltoAll:
        assert bootstrap.world_size == meeting.num_ranks
        assert backend == SimpleNamespace()
        return NVLinkOneSidedAlltoAll(bootstrap.rank, params)

    moe_ep.create_communication = create_communication  # type: ignore[attr-defined]
    return {module.__name__: module for module in (comm, moe_ep)}


@pytest.mark.parametrize("library", [of_0_6, of_0_7])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_flashinfer_of_either_generation(
    library: Callable[[Meeting], dict[str, ModuleType]], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    problem = replace(PROBLEM, num_ranks=num_ranks)
    modules = {"flashinfer": ModuleType("flashinfer"), **library(Meeting(num_ranks))}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if name.count(".") == 1:
            setattr(modules["flashinfer"], name.split(".")[1], module)
    monkeypatch.setattr(adapter, "process_group", lambda _context: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    groups = ew.local_group(num_ranks)
    inputs = [rank_input(problem, rank) for rank in range(num_ranks)]
    expected = FlashInfer.expected(problem, inputs)

    def rank(own: ew.Group) -> list[str]:
        def exchange(word: bytes) -> list[bytes]:
            return own.all_gather(word)

        peer = FlashInfer(RankContext(own, problem, QUICK, inputs[own.rank], exchange, Belongings()))
        peer.dispatch()
        peer.apply_experts()
        peer.combine()
        wrong = [peer.difference(peer.observe(), expected[own.rank])]
        for _ in range(3):
            peer.forget()
            peer.dispatch()
            peer.combine()
            wrong.append(peer.difference(peer.observe(), expected[own.rank]))
        peer.close()
        return wrong

    with ThreadPoolExecutor(num_ranks) as pool:
        assert list(pool.map(rank, groups)) == [[""] * 4] * num_ranks


def test_outputs_stay_where_captured_graphs_read_them() -> None:
    torch = pytest.importorskip("torch")
    adapter = SimpleNamespace(_expert_output=None)
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert Peer.put_outputs(adapter, first)
    assert not Peer.put_outputs(adapter, second)
    assert adapter._expert_output.data_ptr() == first.data_ptr()
    assert torch.equal(first, second)
