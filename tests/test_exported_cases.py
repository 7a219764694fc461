"""The files that the C++ tests read hold what the reference says, and are those of the case table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bits import assert_same_bits
from cases import Case
from export_cases import EXPORTED, Exported, outputs, read, write

_GIVEN = {"x", "topk_ids", "weights", "block_scales", "new_weights"}
STORED = {stored.name: stored for stored in read()}


def test_the_files_hold_every_exported_case() -> None:
    assert list(STORED) == [case.name for case in EXPORTED]
    assert sum(array.nbytes for stored in STORED.values() for own in stored.arrays for array in own.values()) < 2**20


@pytest.mark.parametrize("case", EXPORTED, ids=lambda case: case.name)
def test_stored_outputs_are_those_of_the_reference(case: Case) -> None:
    stored = STORED[case.name]
    _assert_described(stored, case)
    for own, wanted in zip(stored.arrays, outputs(stored.config, stored.inputs, stored.new_weights), strict=True):
        assert own.keys() - _GIVEN == wanted.keys()
        for name, array in wanted.items():
            assert_same_bits(own[name], array, f"{case.name}: {name}")


def _assert_described(stored: Exported, case: Case) -> None:
    assert [len(own["x"]) for own in stored.arrays] == list(case.tokens)
    for name in ("num_experts", "hidden_size", "num_topk", "max_tokens_per_rank", "output_layout", "combine_mode"):
        assert getattr(stored.config, name) == getattr(case.config, name), name
    assert (stored.config.quant, stored.config.placement) == (case.config.quant, case.placement)
    assert (stored.config.max_in_flight, stored.config.invalid_token_expert_id) == (case.max_in_flight, case.invalid_id)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    for case, exported in zip(EXPORTED, read(tmp_path), strict=True):
        for rank, (given, own) in enumerate(zip(case.inputs(), exported.inputs, strict=True)):
            np.testing.assert_array_equal(own.x.view(np.uint8), given.x.view(np.uint8), err_msg=f"{case.name}, {rank}")
            np.testing.assert_array_equal(own.topk_ids, given.topk_ids)
            assert own.topk_ids.dtype == given.topk_ids.dtype
            assert (own.weights is None) == (given.weights is None)
