"""A part of the case table as files that Python and C++ both read: inputs, and outputs according to the reference.

    python tests/export_cases.py tests/data

writes ``cases.bin``, the elements of all arrays one behind the other (little-endian, each array at a multiple of 16
bytes), and ``cases.txt``, which says what they are, a line at a time: ``case NAME`` begins a case, then come the
fields of its configuration, and then ``array RANK NAME DTYPE SHAPE OFFSET``: a shape like ``3x24`` and a position in
``cases.bin``. Of dispatch outputs and of ``expert_output``, the input of combine, only the valid rows are there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bits import valid_rows
from cases import CASES, DIRECT, EXPERT_MAJOR, FP8, RANK_MAJOR, REDUCE, WAYS, Case, way_name
from driving import expert_output
from expertwire import reference
from expertwire.reference import RankInput
from expertwire.types import (
    CombineMode,
    DispatchDataType,
    DispatchLayout,
    DispatchOutput,
    MoECommunicatorConfig,
    QuantConfig,
    ScaleFormat,
    ScaleLayout,
)

FOLDER = Path(__file__).parent / "data"
_ALIGNMENT = 16
_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}

#: Small shapes that between them meet every layout, combine mode, payload, kind of routing and kind of placement.
EXPORTED: tuple[Case, ...] = (
    *(CASES[f"ids-half-{way_name(*way)}"] for way in WAYS),
    *(CASES[f"tokens-0-4-4-{way_name(*way)}"] for way in WAYS),
    *(CASES[f"placed-3-0-5-{way_name(*way)}"] for way in WAYS),
    *(CASES[f"logical-copies-{way_name(*way)}"] for way in WAYS),
    *(CASES[f"ids-empty-experts-{way_name(*way)}"] for way in WAYS),
    *(Case(f"exported-1-rank-{way_name(*way)}", (5,), 6, 136, 3, 0, None, *way) for way in WAYS),
    *(Case(f"exported-8-ranks-{way_name(*way)}", (4, 1, 0, 5, 2, 3, 1, 4), 16, 40, 5, 0, None, *way) for way in WAYS),
    CASES["ids-zipf:1.5-expert-reduce"],
    CASES["ids-one-hot-expert-direct"],
    CASES["ids-none-rank-reduce"],
    CASES["ids-int32-expert-reduce"],
    CASES["ids-far-negative-int32"],
    CASES["weights-none-expert-reduce"],
    CASES["weights-one-nan-expert-direct"],
    CASES["weights-mixed-rank-reduce"],
    CASES["weights-denormal-expert-reduce"],
    CASES["new-weights-all-over-router-expert-reduce"],
    CASES["new-weights-all-over-router-expert-direct"],
    CASES["new-weights-all-over-none-expert-reduce"],
    CASES["values-specials-expert-reduce"],
    CASES["lanes-2-expert-direct"],
    CASES["lanes-3-rank-reduce"],
    CASES["invalid-id--1000"],
    *(
        Case(f"exported-fp8-{way_name(*way)}", (5, 0, 6), 7, 256, 3, 0, (3, 0, 4), *way, FP8, ids="half")
        for way in ((EXPERT_MAJOR, REDUCE), (EXPERT_MAJOR, DIRECT), (RANK_MAJOR, REDUCE))
    ),
    *(
        replace(CASES[name], name=f"exported-{name}", hidden_size=hidden)
        for name, hidden in (
            ("fp8-pow2-rank", 256),
            ("fp8-ue8m0-column-expert", 640),
            ("fp8-float32-column-rank", 128),
            ("fp8-float32-given-expert", 256),
            ("fp8-ue8m0-given-rank", 128),
            ("fp8-mxfp8-expert", 256),
            ("fp8-mxfp8-column-given-rank", 128),
        )
    ),
)


@dataclass
class Exported:
    """One case as it lies in the files: its configuration, and the arrays of each rank by name."""

    name: str
    config: MoECommunicatorConfig
    arrays: list[dict[str, np.ndarray]] = field(default_factory=list)

    @property
    def inputs(self) -> list[RankInput]:
        """What each rank brings to dispatch."""
        return [
            RankInput(own["x"], own["topk_ids"], own.get("weights"), own.get("block_scales")) for own in self.arrays
        ]

    @property
    def new_weights(self) -> list[np.ndarray | None] | None:
        """What each rank gives to combine as weights, or None if no rank gives any."""
        given = [own.get("new_weights") for own in self.arrays]
        return None if all(weights is None for weights in given) else given


def outputs(
    config: MoECommunicatorConfig, inputs: list[RankInput], new_weights: list[np.ndarray | None] | None
) -> list[dict[str, np.ndarray]]:
    """Return what the reference says each rank gets, and what its experts answer, as it is exported."""
    received = reference.dispatch(config, inputs)
    ranks = reference.experts_of_ranks(config, len(inputs))
    answers = [expert_output(config, own, experts) for own, experts in zip(received, ranks, strict=True)]
    combined = reference.combine(config, inputs, answers, new_weights)
    return [
        {**_of_dispatch(own), "expert_output": _valid(own, answer), "combined": rows}
        for own, answer, rows in zip(received, answers, combined, strict=True)
    ]


def _of_dispatch(received: DispatchOutput) -> dict[str, np.ndarray]:
    arrays: dict[str, Any] = {"tokens": _valid(received, received.tokens)}
    if received.quant is not None:
        arrays["scales"] = _valid(received, received.quant.block_scales)
    if received.layout.kind is DispatchLayout.EXPERT_MAJOR:
        arrays["num_tokens_per_expert"] = received.layout.num_tokens_per_expert
        arrays["rank_ranges"] = received.layout.rank_ranges
        arrays["source_token"] = _valid(received, received.source_token)
    else:
        arrays["num_tokens_per_rank"] = received.layout.num_tokens_per_rank
        arrays["received_ids"], arrays["received_weights"] = received.topk_ids, received.weights
    return arrays


def _valid(received: DispatchOutput, array: Any) -> np.ndarray:
    """Return the valid rows of an array that has the rows of the dispatch output, one behind the other."""
    rows = [array[where] for where in valid_rows(received)]
    past = 2 if received.layout.kind is DispatchLayout.EXPERT_MAJOR else 1
    return np.ascontiguousarray(np.concatenate([np.zeros((0, *array.shape[past:]), array.dtype), *rows]))


def _export(case: Case) -> Exported:
    exported = Exported(case.name, case.config)
    new_weights = case.replaced_weights()
    for rank, (given, got) in enumerate(
        zip(case.inputs(), outputs(case.config, case.inputs(), new_weights), strict=True)
    ):
        optional = {
            "block_scales": given.block_scales,
            "weights": given.weights,
            "new_weights": new_weights[rank] if new_weights else None,
        }
        present = {name: array for name, array in optional.items() if array is not None}
        exported.arrays.append({"x": given.x, "topk_ids": given.topk_ids, **present, **got})
    return exported


def _config_lines(exported: Exported) -> Iterator[str]:
    config = exported.config
    counts = [len(experts) for experts in reference.experts_of_ranks(config, len(exported.arrays))]
    yield f"num_ranks {len(exported.arrays)}"
    yield f"experts_per_rank {' '.join(map(str, counts))}"
    yield f"placement {' '.join(map(str, config.placement or ()))}".rstrip()
    for name in ("num_experts", "hidden_size", "num_topk", "max_tokens_per_rank", "max_in_flight"):
        yield f"{name} {getattr(config, name)}"
    yield f"invalid_token_expert_id {config.invalid_token_expert_id}"
    yield f"output_layout {config.output_layout.value}"
    yield f"combine_mode {config.combine_mode.value}"
    yield f"quant {config.quant.format.value} {config.quant.scale_format.value} {config.quant.scale_layout.value}"
    yield f"round_scale_pow2 {int(config.quant.round_scale_pow2)}"


def write(folder: Path) -> None:
    """Write both files."""
    elements, lines = bytearray(), ["# Made by tests/export_cases.py, which says what the lines mean."]
    for exported in map(_export, EXPORTED):
        lines += [f"case {exported.name}", *_config_lines(exported)]
        for rank, arrays in enumerate(exported.arrays):
            for name, array in arrays.items():
                elements += bytes(-len(elements) % _ALIGNMENT)
                shape = "x".join(map(str, array.shape))
                lines.append(f"array {rank} {name} {array.dtype.name} {shape} {len(elements)}")
                elements += array.astype(array.dtype.newbyteorder("<")).tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.bin").write_bytes(elements)
    (folder / "cases.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(folder: Path = FOLDER) -> list[Exported]:
    """Read both files."""
    elements = (folder / "cases.bin").read_bytes()
    cases: list[Exported] = []
    fields: dict[str, list[str]] = {}
    for line in (folder / "cases.txt").read_text(encoding="utf-8").splitlines():
        key, *words = line.split()
        if key == "case":
            fields = {"name": words}
        elif key == "array":
            if fields:
                cases.append(_case_of(fields))
                fields = {}
            cases[-1].arrays[int(words[0])][words[1]] = _array_of(words, elements)
        elif key != "#":
            fields[key] = words
    return cases


def _array_of(words: list[str], elements: bytes) -> np.ndarray:
    shape = [int(size) for size in words[3].split("x")]
    array = np.frombuffer(elements, _DTYPES[words[2]], int(np.prod(shape)), int(words[4]))
    return array.reshape(shape)


def _case_of(fields: dict[str, list[str]]) -> Exported:
    numbers = ("num_experts", "hidden_size", "num_topk", "max_tokens_per_rank", "max_in_flight")
    payload, scale_format, scale_layout = fields["quant"]
    config = MoECommunicatorConfig(
        **{name: int(fields[name][0]) for name in (*numbers, "invalid_token_expert_id")},
        experts_per_rank=tuple(map(int, fields["experts_per_rank"])),
        placement=tuple(map(int, fields["placement"])) or None,
        output_layout=DispatchLayout(fields["output_layout"][0]),
        combine_mode=CombineMode(fields["combine_mode"][0]),
        quant=QuantConfig(
            DispatchDataType(payload),
            fields["round_scale_pow2"] == ["1"],
            ScaleFormat(scale_format),
            ScaleLayout(scale_layout),
        ),
        device="cpu",
    )
    return Exported(fields["name"][0], config, [{} for _ in range(int(fields["num_ranks"][0]))])


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
