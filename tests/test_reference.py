"""The reference itself: against answers worked out by hand, and against brute force that shares no code with it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from bits import assert_same_bits
from cases import ALL_CASES, DIRECT, EXPERT_MAJOR, FP8, QUANTS, RANK_MAJOR, REDUCE, Case, draw_values
from driving import expected, gain
from expertwire import reference
from expertwire.reference import BF16, RankInput
from expertwire.types import DispatchDataType, MoECommunicatorConfig, QuantConfig, ScaleFormat, ScaleLayout

TINY = MoECommunicatorConfig(num_experts=4, hidden_size=8, num_topk=2, max_tokens_per_rank=2)  # 2 ranks, 2 experts each


def _rows(*values: float) -> np.ndarray:
    """Return bfloat16 rows of 8 equal elements."""
    return np.repeat(np.array(values, np.float32)[:, None], 8, axis=1).astype(BF16)


def _tiny_inputs() -> list[RankInput]:
    return [
        RankInput(_rows(1, 2), np.array([[0, 2], [3, -1]]), np.array([[0.5, 0.25], [4, 9]], np.float32)),
        RankInput(_rows(3), np.array([[1, 0]], np.int32)),
    ]


def test_the_comparison_sees_one_bit() -> None:
    row = _rows(1, 2)
    assert_same_bits(row, row.copy(), "equal")
    for wrong in (_rows(1, 3), _rows(-1, 2), row.astype(np.float32), row[:1]):
        with pytest.raises(AssertionError):
            assert_same_bits(wrong, row, "different")
    with pytest.raises(AssertionError):
        assert_same_bits(_rows(-0.0), _rows(0.0), "zeros of different sign")
    assert_same_bits(-_rows(np.nan), _rows(np.nan), "NaN of different sign")


# By hand: layouts


def test_expert_major_rows_by_hand() -> None:
    first, second = reference.dispatch(TINY, _tiny_inputs())
    assert first.layout.num_tokens_per_expert.tolist() == [2, 1]
    assert first.layout.rank_ranges.tolist() == [[[0, 1], [1, 1]], [[0, 0], [0, 1]]]
    assert first.source_token[0, :2].tolist() == [0, 2]  # rank 0 token 0, then rank 1 token 0
    assert first.source_token[1, :1].tolist() == [2]
    assert_same_bits(first.tokens[0, :2], _rows(1, 3), "expert 0")
    assert_same_bits(first.tokens[1, :1], _rows(3), "expert 1")
    assert second.layout.num_tokens_per_expert.tolist() == [1, 1]
    assert second.layout.rank_ranges.tolist() == [[[0, 1], [1, 0]], [[0, 1], [1, 0]]]
    assert second.source_token[:, 0].tolist() == [0, 1]
    assert_same_bits(second.tokens[:, 0], _rows(1, 2), "experts 2 and 3")
    assert first.tokens.shape == (2, 4, 8)
    assert first.topk_ids is first.weights is first.quant is None
    for array in (first.source_token, first.layout.rank_ranges, first.layout.num_tokens_per_expert):
        assert array.dtype == np.int32


def test_rank_major_rows_by_hand() -> None:
    config = replace(TINY, output_layout=RANK_MAJOR, invalid_token_expert_id=-7)
    first, second = reference.dispatch(config, _tiny_inputs())
    assert first.layout.num_tokens_per_rank.tolist() == [1, 1]
    assert first.topk_ids.tolist() == [[0, -7], [-7, -7], [1, 0], [-7, -7]]
    assert first.weights.tolist() == [[0.5, 0], [0, 0], [1, 1], [0, 0]]
    assert_same_bits(first.tokens[[0, 2]], _rows(1, 3), "rank 0")
    assert second.layout.num_tokens_per_rank.tolist() == [2, 0]
    assert second.topk_ids.tolist() == [[-7, 2], [3, -7], [-7, -7], [-7, -7]]
    assert second.weights.tolist() == [[0, 0.25], [4, 0], [0, 0], [0, 0]]
    assert_same_bits(second.tokens[:2], _rows(1, 2), "rank 1")


def test_combine_by_hand() -> None:
    outputs = [np.zeros((2, 4, 8), BF16) for _ in range(2)]
    outputs[0][0, :2], outputs[0][1, :1] = _rows(10, 30), _rows(300)
    outputs[1][0, :1], outputs[1][1, :1] = _rows(100), _rows(200)
    for mode in (REDUCE, DIRECT):
        first, second = reference.combine(replace(TINY, combine_mode=mode), _tiny_inputs(), outputs)
        assert_same_bits(first, _rows(0.5 * 10 + 0.25 * 100, 4 * 200), "rank 0")
        assert_same_bits(second, _rows(330), "rank 1")
        new = [None, np.array([[2, -1]], np.float32)]
        first, second = reference.combine(replace(TINY, combine_mode=mode), _tiny_inputs(), outputs, new)
        assert_same_bits(first, _rows(0.5 * 10 + 0.25 * 100, 4 * 200), "rank 0 keeps its weights")
        assert_same_bits(second, _rows(2 * 300 - 30), "rank 1 has new ones")


def test_ids_that_cannot_be_selected_are_dropped() -> None:
    ids = np.array([[4, 1], [2**31, -(2**40)], [3, 3]])
    assert reference.selected_ids(TINY, ids).tolist() == [[-1, 1], [-1, -1], [3, -1]]


def test_uneven_experts() -> None:
    config = replace(TINY, experts_per_rank=(0, 3, 1))
    assert reference.experts_of_ranks(config, 3) == [range(0), range(3), range(3, 4)]
    with pytest.raises(ValueError, match="experts_per_rank"):
        reference.experts_of_ranks(config, 2)
    with pytest.raises(ValueError, match="experts_per_rank"):
        reference.experts_of_ranks(TINY, 3)


# By hand: rounding


def _combine_one_token(
    mode: object, ids: list[int], values: dict[int, float], weights: list[float], placement: tuple[int, ...] = (2, 2)
) -> float:
    """Combine one token of rank 0; ``values`` are what the experts answer."""
    config = replace(TINY, num_topk=len(ids), max_tokens_per_rank=1, combine_mode=mode, experts_per_rank=placement)
    outputs = [np.zeros((count, len(placement), 8), BF16) for count in placement]
    for experts, output in zip(reference.experts_of_ranks(config, len(placement)), outputs, strict=True):
        for local, expert in enumerate(experts):
            output[local, 0] = np.float32(values.get(expert, 0))
    nothing = RankInput(np.zeros((0, 8), BF16), np.zeros((0, len(ids)), np.int64))
    token = RankInput(_rows(0), np.array([ids]), np.array([weights], np.float32))
    y = reference.combine(config, [token] + [nothing] * (len(placement) - 1), outputs)[0][0]
    assert_same_bits(y, np.repeat(y[:1], 8), "all elements alike")
    return float(y[0])


def test_partials_are_rounded_to_bf16() -> None:
    half_step = 2.0**-8  # half a BF16 step above 1: a tie, which goes to the even neighbour 1
    values = {0: 1.0, 1: half_step, 2: half_step}
    assert _combine_one_token(REDUCE, [0, 1, 2], values, [1, 1, 1]) == 1.0
    assert _combine_one_token(DIRECT, [0, 1, 2], values, [1, 1, 1]) == 1.0 + 2 * half_step


def test_partials_are_summed_in_rank_order() -> None:
    values = {0: 2.0**25, 2: -(2.0**25), 3: 1.0}  # in any other order, 1 is lost in 2^25
    assert _combine_one_token(REDUCE, [3, 2, 0], values, [1, 1, 1], placement=(2, 1, 1)) == 1.0


def test_slots_are_summed_in_ascending_k() -> None:
    values = {0: 1.0, 1: -(2.0**25), 2: 2.0**25}
    assert _combine_one_token(DIRECT, [2, 0, 1], values, [1, 1, 1]) == 0.0  # 2^25 + 1 is 2^25
    assert _combine_one_token(DIRECT, [2, 1, 0], values, [1, 1, 1]) == 1.0
    assert _combine_one_token(REDUCE, [1, 0], {0: 1.0, 1: 2.0**25}, [1, -1]) == 2.0**25


def test_products_are_rounded_before_the_sum() -> None:
    y, w = 1 + 2.0**-7, 1 + 2.0**-23
    rounded = float(np.float32(w * y))
    assert rounded != w * y
    assert _combine_one_token(DIRECT, [0, 1], {0: 1.0, 1: y}, [-rounded, w]) == 0.0  # fused, it would be 2^-30


def test_nothing_is_flushed_to_zero() -> None:
    tiny = float(ml_dtypes.finfo(BF16).smallest_subnormal)
    assert _combine_one_token(REDUCE, [0], {0: tiny}, [1]) == tiny
    assert _combine_one_token(DIRECT, [0], {0: 2.0**100}, [2.0**-149]) == 2.0**-49


@pytest.mark.parametrize("mode", [REDUCE, DIRECT])
def test_zero_is_positive_and_infinity_is_kept(mode: object) -> None:
    assert np.signbit(_combine_one_token(mode, [0], {0: -0.0}, [1])) == np.False_
    assert _combine_one_token(mode, [-1, -1], {}, [1, 1]) == 0.0
    assert _combine_one_token(mode, [0], {0: 3e38}, [2]) == np.inf
    assert np.isnan(_combine_one_token(mode, [0, 2], {0: np.inf, 2: -np.inf}, [1, 1]))
    assert np.isnan(_combine_one_token(mode, [0], {0: np.inf}, [0]))


# FP8


def _block(amax: object) -> np.ndarray:
    """Return one block of bfloat16 values with this largest element, at place 5, negative."""
    block = (np.arange(128, dtype=np.float32) / 256 * np.float32(amax)).astype(BF16)
    block[5] = -np.asarray(amax).astype(BF16)
    return block


def _neighbour(value: float, step: int) -> float:
    bits = int(np.array(value, np.float32).astype(BF16).view(np.uint16)) + step
    return float(np.array(bits, np.uint16).view(BF16))


@pytest.mark.parametrize("power", [-20, -1, 0, 3, 100])
def test_fp8_scales_at_an_edge(power: int) -> None:
    edge = 448.0 * 2.0**power
    for step, rounded_power in ((-1, power), (0, power), (1, power + 1)):
        amax = np.float32(_neighbour(edge, step))
        q, scale = reference.quantize(_block(amax), FP8)
        assert scale == amax / np.float32(448)
        assert float(q[5]) == -448.0
        q, scale = reference.quantize(_block(amax), QUANTS["pow2"])
        assert scale == np.float32(2.0**rounded_power)
        assert float(q[5]) == (-448.0 if step < 1 else -224.0)
        packed = reference.quantize(_block(amax), QUANTS["ue8m0"])[1]
        assert packed.dtype == np.int32
        assert packed.view(np.uint8).tolist() == [rounded_power + 127, 127, 127, 127]


def test_fp8_block_of_zeros_and_of_small_values() -> None:
    least = np.float32(1e-4)
    for block in (np.zeros(128, BF16), np.full(128, 1e-6, BF16), np.full(128, np.nan, BF16)):
        assert reference.quantize(block, FP8)[1] == least / np.float32(448)
        assert reference.quantize(block, QUANTS["pow2"])[1] == np.float32(2.0**-22)
    assert_same_bits(reference.quantize(np.zeros(128, BF16), FP8)[0], np.zeros(128, reference.FP8), "zeros")
    assert reference.quantize(np.full(128, -0.0, BF16), FP8)[0].view(np.uint8).tolist() == [0x80] * 128


@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_fp8_nan_and_inf_stay_where_they_are(quant: object) -> None:
    clean = _block(96.0)
    spoilt = clean.copy()
    spoilt[7] = np.nan
    q, scale = reference.quantize(spoilt, quant)
    wanted, wanted_scale = reference.quantize(clean, quant)
    wanted[7] = np.nan
    assert_same_bits(q, wanted, "all but the NaN")
    assert_same_bits(scale, wanted_scale, "scale")

    spoilt = np.full(128, 1e38, BF16)
    spoilt[3], spoilt[4] = np.inf, -np.inf
    q, scale = reference.quantize(spoilt, quant)
    back = reference.dequantize(q, scale, quant)
    assert (float(q[3]), float(q[4])) == (448.0, -448.0)
    assert np.abs(np.delete(back, [3, 4]) / np.float32(1e38) - 1).max() < 2**-4  # the block stays usable


def test_ue8m0_bytes_are_packed_in_order() -> None:
    x = np.concatenate([_block(448.0 * 2.0**power) for power in (0, 1, 2, 3, 4)])
    packed = reference.quantize(x[None], QUANTS["ue8m0"])[1]
    assert packed.view(np.uint8).tolist() == [[127, 128, 129, 130, 131, 127, 127, 127]]
    assert packed[0, 0] == np.int32(127 + 128 * 2**8 + 129 * 2**16 + 130 * 2**24 - 2**32)


def test_mxfp8_is_ue8m0_by_blocks_of_32() -> None:
    """A block of 128 that repeats a block of 32 four times has its scale and its codes."""
    rng = np.random.default_rng(2)
    for values in ("normal", "specials", "fp8-specials"):
        x = draw_values(values, rng, (6, 512))
        q, scales = reference.quantize(x, QUANTS["mxfp8"])
        assert (q.shape, scales.shape, scales.dtype) == ((6, 512), (6, 4), np.int32)
        repeated = np.repeat(x.reshape(6, 16, 1, 32), 4, axis=2).reshape(6, 16, 128)
        wanted_q, wanted = reference.quantize(repeated, QUANTS["ue8m0"])
        assert_same_bits(q.reshape(6, 16, 32), wanted_q[..., :32], values)
        assert (scales.view(np.uint8) == wanted.view(np.uint8).reshape(6, 16, 4)[..., 0]).all()
    x = np.concatenate([_block(448.0 * 2.0**power)[:32] for power in (0, 1, 2, 3)])
    assert reference.quantize(x, QUANTS["mxfp8"])[1].view(np.uint8).tolist() == [127, 128, 129, 130]
    assert reference.quantize(x, QuantConfig(DispatchDataType.MXFP8))[1].dtype == np.int32


def _e4m3_values() -> list[Fraction]:
    """Return the value of each non-negative finite code: 4 exponent bits, 3 mantissa bits, bias 7; 0x7F is NaN."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        power = Fraction(2) ** (exponent - 7) if exponent else Fraction(2) ** -6
        values.append((Fraction(mantissa, 8) + (1 if exponent else 0)) * power)
    return values


def _nearest_code(value: Fraction, values: list[Fraction]) -> int:
    """Return the code nearest to a value, of two equally near the even one; ``values`` are ascending, as codes are."""
    above = min(bisect_left(values, value), len(values) - 1)
    return min((max(above - 1, 0), above), key=lambda code: (abs(values[code] - value), code & 1))


@pytest.mark.parametrize("name", ["float32", "pow2"])
def test_quantize_equals_exact_rounding(name: str) -> None:
    """Every element is the nearest code of the float32 product, ties to even, by rational arithmetic."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal((3, 128)) * [[1e-3], [1.0], [1e30]]
    x = np.concatenate([drawn, rng.integers(-255, 256, size=(24, 128))]).astype(BF16)  # integers are often near a tie
    q, scales = reference.quantize(x, QUANTS[name])
    values = _e4m3_values()
    for row, scale, codes in zip(x.astype(np.float32), scales[:, 0], q.view(np.uint8), strict=True):
        amax = np.abs(row).max()
        factor = np.float32(1) / scale if name == "pow2" else np.float32(448) / amax
        for element, code in zip(row, codes, strict=True):
            wanted = _nearest_code(abs(Fraction(float(element * factor))), values)
            assert code == wanted | (0x80 if np.signbit(element) else 0)


# Brute force over the case table


def _with_physical_ids(case: Case, inputs: list[RankInput]) -> list[RankInput]:
    """Return the inputs as they are without the placement, whose tables test_placement.py looks at."""
    if case.placement is None:
        return inputs
    return [
        replace(given, topk_ids=reference.chosen_experts(case.config, given.topk_ids, rank, case.num_ranks))
        for rank, given in enumerate(inputs)
    ]


SMALL = [case for case in ALL_CASES if case.hidden_size * case.num_experts <= 1152 * 64]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_dispatch_equals_brute_force(case: Case) -> None:
    """Every row is where a search over all tokens puts it, by loops over experts, ranks and tokens."""
    inputs, config = case.inputs(), case.config
    payloads, scales = [given.x for given in inputs], [given.block_scales for given in inputs]
    if case.quant.format is not DispatchDataType.BF16 and not case.prequantized:
        pairs = [reference.quantize(x, case.quant) for x in payloads]
        payloads, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    counts = case.experts_per_rank or [case.num_experts // case.num_ranks] * case.num_ranks
    received = reference.dispatch(config, inputs)
    inputs = _with_physical_ids(case, inputs)
    for rank, out in enumerate(received):
        local = [sum(counts[:rank]) + index for index in range(counts[rank])]
        groups = [[expert] for expert in local] if case.layout is EXPERT_MAJOR else [local]
        for index, group in enumerate(groups):
            rows = [(s, t) for s, given in enumerate(inputs) for t in range(len(given.x))
                    if any(chosen in group for chosen in given.topk_ids[t].tolist())]  # fmt: skip
            for place, (source, token) in enumerate(rows):
                if case.layout is EXPERT_MAJOR:
                    where: tuple[int, ...] = (index, place)
                    assert out.source_token[where] == source * config.max_tokens_per_rank + token
                else:
                    before = sum(1 for s, _ in rows[:place] if s == source)
                    where = (source * config.max_tokens_per_rank + before,)
                    wanted = [chosen if chosen in group else config.invalid_token_expert_id
                              for chosen in inputs[source].topk_ids[token].tolist()]  # fmt: skip
                    assert out.topk_ids[where].tolist() == wanted
                assert_same_bits(out.tokens[where], payloads[source][token], f"row {where}")
                if scales[source] is not None:
                    assert_same_bits(out.quant.block_scales[where], scales[source][token], f"scales {where}")
            if case.layout is EXPERT_MAJOR:
                assert out.layout.num_tokens_per_expert[index] == len(rows)
            else:
                of_source = [sum(1 for s, _ in rows if s == source) for source in range(case.num_ranks)]
                assert out.layout.num_tokens_per_rank.tolist() == of_source


@pytest.mark.parametrize("case", [c for c in SMALL if "specials" not in c.name], ids=lambda case: case.name)
def test_combine_is_near_the_exact_sum(case: Case) -> None:
    """y = sum of w * gain(e) * x in float64, within what rounding to BF16 allows: answer, partial and sum."""
    inputs, new_weights = case.inputs(), case.replaced_weights() or [None] * case.num_ranks
    results = expected(case.config, inputs, new_weights)
    for given, new, received in zip(_with_physical_ids(case, inputs), new_weights, results, strict=True):
        x = _arrived(case, given)
        weights = next((w for w in (new, given.weights) if w is not None), np.ones(given.topk_ids.shape))
        chosen = (given.topk_ids >= 0) & (given.topk_ids < case.num_experts)
        gains = gain(given.topk_ids, case.hidden_size).astype(np.float64)
        factors = np.where(chosen, weights.astype(np.float64), 0.0)[..., None] * gains
        exact, bound = factors.sum(axis=1) * x, np.abs(factors).sum(axis=1) * np.abs(x) * 2.0**-6 + 1e-38
        y, clean = received.combined.astype(np.float64), ~np.isnan(exact)
        assert np.isnan(y[~clean]).all()
        assert (np.abs(y - exact)[clean] <= bound[clean]).all()


def _arrived(case: Case, given: RankInput) -> np.ndarray:
    """Return the rows that experts see, float64; quantised ones are held against the originals."""
    if case.quant.format is DispatchDataType.BF16:
        return given.x.astype(np.float64)
    if given.block_scales is not None:
        return reference.dequantize(given.x, given.block_scales, case.quant).astype(np.float64)
    back = reference.dequantize(*reference.quantize(given.x, case.quant), case.quant).astype(np.float64)
    x = given.x.astype(np.float64).reshape(len(given.x), case.hidden_size // 128, 128)
    denormal = np.abs(x).max(axis=-1, keepdims=True) * 2.0**-17  # half of the smallest step: 2^-10 of 448's scale
    assert (np.abs(back.reshape(x.shape) - x) <= np.abs(x) * 2.0**-4 + denormal).all()
    return back


def test_column_scales_have_token_stride_one() -> None:
    for name, layout in (("float32-column", EXPERT_MAJOR), ("ue8m0-column", RANK_MAJOR)):
        quant = QUANTS[name]
        case = Case("column", (4, 5), 4, 640, 2, layout=layout, quant=quant)
        for rank, out in enumerate(reference.dispatch(case.config, case.inputs())):
            scales = out.quant.block_scales
            in_rows = replace(case.config, quant=replace(quant, scale_layout=ScaleLayout.ROW))
            wanted = reference.dispatch(in_rows, case.inputs())[rank].quant.block_scales
            assert scales.strides[-2] == scales.itemsize
            assert scales.shape[-1] == (2 if quant.scale_format is ScaleFormat.UE8M0 else 5)
            assert_same_bits(scales, wanted, "the same values in another order")
