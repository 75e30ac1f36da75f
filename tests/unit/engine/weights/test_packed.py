"""Packed weights: what codes stand for, how weights are joined, how dense weights are packed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels.packed import byte_codes, float8_table
from moonpool.engine.weights.packed import PackedWeight, join_rows
from moonpool.engine.weights.packing import pack_int4, pack_int8


def weights(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, as trained weights are about."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def packed(bits: int = 4, group: int = 32, **changes: Any) -> PackedWeight:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (4, 64 * bits // 8), generator=generator, dtype=torch.uint8)
    fields: dict[str, Any] = {"codes": codes, "bits": bits, "group": group, "scales": torch.ones(4, 64 // group)}
    return PackedWeight(**{**fields, **changes})


def test_a_number_is_scale_by_code_less_zero_plus_offset() -> None:
    weight = PackedWeight(
        torch.tensor([[0x21, 0xF0] + [0x88] * 14], dtype=torch.uint8),
        4, 16,
        torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        zero=8,
        offsets=torch.tensor([[0.25, -1.0]]),
    )  # fmt: skip
    exact = torch.tensor([[(code - 8) * 0.5 + 0.25 for code in (1, 2, 0, 15, *[8] * 12)] + [-1.0] * 16])
    assert torch.equal(weight.dequantise(), exact)
    assert (weight.outputs, weight.inputs, weight.kind) == (1, 32, "int4/16")
    assert weight.nbytes == 16 + 2 * 2 + 2 * 4


def test_a_table_gives_values_by_code() -> None:
    table = torch.arange(16).float().square()
    weight = packed(values=table)
    assert torch.equal(weight.dequantise(), table[byte_codes(weight).long()])
    assert weight.kind == "table4/32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 7}, "bits: must be 4, 5, 6 or 8, not 7"),
        ({"codes": torch.zeros(4, 32)}, "codes: must be uint8"),
        ({"group": 24}, "group: must be a multiple of 16 that divides 64 inputs"),
        ({"scales": torch.ones(4, 3)}, r"scales: must be float16 or float32 \[4, 2\]"),
        ({"scales": torch.ones(4, 2, dtype=torch.bfloat16)}, r"scales: .* not torch.bfloat16"),
        ({"offsets": torch.ones(3, 2)}, r"offsets: must be float16 or float32 \[4, 2\]"),
        ({"units": torch.ones(4, 1).half()}, r"scales: must be int8 \[4, 2\]"),
        (
            {"scales": torch.ones(4, 2, dtype=torch.int8), "units": torch.ones(4, 3).half()},
            r"scales: units must be float16 \[4, blocks of 2 groups\]",
        ),
        ({"zero": 16}, "zero: must be a code of 4 bits, not 16"),
        ({"values": torch.zeros(15)}, r"values: must be float32 \[16\]"),
        ({"values": torch.zeros(16), "zero": 8}, "values: a table of values has neither zero nor offsets"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed(**changes)


def test_selected_rows_are_those_of_the_weight() -> None:
    weight = packed(offsets=torch.arange(8).float().view(4, 2))
    rows = torch.tensor([2, 0, 2])
    assert torch.equal(weight.select(rows).dequantise(), weight.dequantise()[rows])


MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_a_table_of_whole_or_half_numbers_becomes_bytes() -> None:
    weight = packed(values=torch.cat((MXFP4, -MXFP4)))
    exact = weight.without_table()
    assert exact is not None
    assert exact.bits == 8
    assert torch.equal(exact.dequantise(), weight.dequantise())
    assert packed(values=torch.linspace(-1, 1, 16)).without_table() is None


def test_products_take_tables_of_floats_and_finite_floats_of_8_bits() -> None:
    table = packed(values=torch.linspace(-1, 1, 16))
    found = table.for_products()
    assert found is not None
    assert torch.equal(found.dequantise(), table.dequantise())
    for dtype, none in ((torch.float8_e4m3fn, 127), (torch.float8_e5m2, 252)):
        codes = torch.arange(64, dtype=torch.uint8).repeat(4, 1)
        floats = packed(bits=8, codes=codes, values=float8_table(dtype))
        assert floats.for_products() is not None
        codes[2, 5] = none
        assert floats.for_products() is None
    assert packed(bits=8, values=torch.arange(256).float()).for_products() is None


def test_joining_keeps_every_number() -> None:
    plain = packed(zero=8, scales=torch.rand(4, 2).half())
    sums = packed(offsets=torch.rand(4, 2))
    fine = packed(bits=8, group=16, codes=torch.randint(0, 64, (4, 64), dtype=torch.uint8), zero=32)
    table = packed(values=torch.cat((MXFP4, -MXFP4)))
    for parts in ([plain, plain], [plain, sums], [sums, fine, plain], [table, table], [table, fine]):
        joined = join_rows(parts)
        assert joined is not None
        assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))
    same = join_rows([plain, plain])
    assert same is not None
    assert (same.bits, same.scales.dtype) == (4, torch.float16)
    assert join_rows([packed(values=torch.linspace(-1, 1, 16)), plain]) is None


def test_int8_is_within_half_a_step() -> None:
    weight = weights(8, 96)
    weight[3] = 0
    found = pack_int8(weight)
    step = found.scales.float().repeat_interleave(32, 1)
    assert (found.scales.dtype, found.zero) == (torch.float16, 128)
    # float16 rounds a scale by at most 2^-11, so the largest of a group may be cut by 127 times that.
    assert bool(((found.dequantise() - weight).abs() <= step * (0.5 + 127 * 2**-11)).all())
    assert not bool(found.dequantise()[3].any())


def test_int4_beats_plain_rounding() -> None:
    weight = weights(64, 256)
    groups = weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    plain = ((groups - low) / scale).round() * scale + low
    found = pack_int4(weight)
    error = (found.dequantise() - weight).square().mean()
    assert error < 0.85 * (plain - groups).square().mean()
    assert (found.scales.dtype, found.nbytes * 8 / weight.numel()) == (torch.float16, 5.0)


def test_int4_errs_least_where_inputs_count() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, importance = torch.randn(64, 96, generator=generator), torch.rand(96, generator=generator).square() + 0.01
    errors = [(pack_int4(weight, 32, counted).dequantise() - weight).square() for counted in (importance, None)]
    weighted, plain = ((error * importance).sum() for error in errors)
    assert float(weighted) < 0.95 * float(plain)
    assert float(errors[1].sum()) < float(errors[0].sum())
    same = (pack_int4(weight, 32, counted).dequantise() for counted in (torch.ones(96), torch.zeros(96), None))
    ones, none_counts, unsaid = same
    torch.testing.assert_close(ones, unsaid)
    assert torch.equal(none_counts, unsaid)


@pytest.mark.parametrize("wrong", [torch.ones(64), -torch.ones(96), torch.full((96,), torch.nan)])
def test_importance_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="importance: must be 96 numbers of 0 or more"):
        pack_int4(torch.zeros(2, 96), 32, wrong)


def test_int4_holds_16_equal_steps_exactly() -> None:
    weight = (torch.arange(64).view(1, 64) % 16) * 0.25 - 1.5
    assert torch.equal(pack_int4(weight).dequantise(), weight)
    same = torch.full((2, 32), 0.75)
    assert torch.equal(pack_int4(same).dequantise(), same)


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_numbers_too_small_for_float16_keep_their_digits(pack: Any) -> None:
    weight = weights(4, 64) * 1e-6
    found = pack(weight)
    assert found.scales.dtype == torch.float32
    assert float((found.dequantise() - weight).norm() / weight.norm()) < 0.1


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_what_cannot_be_packed_is_refused(pack: Any) -> None:
    with pytest.raises(ValueError, match="group: must be a multiple of 16 that divides the inputs"):
        pack(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="weight: a number is not finite"):
        pack(torch.full((2, 32), torch.nan))
