"""The highest output by a matrix in bytes: always the one that the whole product has, or none is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_weight
from moonpool.engine.kernels.choice import DTYPES
from moonpool.engine.kernels.int8_head import MAX_ROWS, Int8Head, int8_head_bytes, make_int8_head
from moonpool.engine.kernels.memory import WeightArena
from tests.examples import each, examples


def head_of(weight: Tensor) -> tuple[ArrangedWeight, Int8Head | None]:
    panels = arrange_weight(weight, None, gated=False, arena=WeightArena())
    assert panels is not None
    return panels, make_int8_head(panels, WeightArena())


def can_make() -> bool:
    return int8_head_bytes(2, 2, torch.float32) > 0


pytestmark = pytest.mark.skipif(not can_make(), reason="no native kernels, or none with vectors of bytes")


def highest(panels: ArrangedWeight, x: Tensor) -> list[int]:
    """By the whole product: of equal ones the first."""
    return [int((row == row.max()).nonzero()[0]) for row in panels.product(x, wide=True)]


def found(panels: ArrangedWeight, head: Int8Head | None, x: Tensor) -> int:
    """How many calls named tokens; all must be right."""
    assert head is not None
    named = 0
    for row in range(0, len(x), MAX_ROWS):
        some = x[row : row + MAX_ROWS]
        tokens = head.highest(some)
        if tokens is not None:
            assert tokens == highest(panels, some)
            named += 1
    return named


def bell(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize(("shape", "dtype"), each([(20_000, 896), (4096, 384), (3000, 65), (997, 64)], DTYPES))
def test_the_same_token_as_the_whole_product_has(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Nearly always: of random outputs few come close to the highest. Odd inputs go in pairs, too."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(outputs)
    if dtype == torch.bfloat16 and inputs % 2:
        inputs += 1  # what some machines arrange in pairs
    panels, head = head_of(bell(generator, outputs, inputs).to(dtype))
    assert head is not None
    assert head.nbytes == int8_head_bytes(outputs, inputs, dtype) <= 1.04 * outputs * inputs + 12 * (outputs + 32)
    x = bell(generator, 60, inputs).to(dtype)
    x[::7, 3] *= 40
    x[::5] = -x[::5].abs()
    assert found(panels, head, x) >= 17  # of 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_ones_the_first(dtype: torch.dtype) -> None:
    weight, x = bell(torch.Generator().manual_seed(5), 2000, 64), bell(torch.Generator().manual_seed(6), 1, 64)
    weight[7] = weight[1500] = weight[33] = 2 * x[0]
    panels, head = head_of(weight.to(dtype))
    assert found(panels, head, x.to(dtype)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_those_that_rounding_makes_equal_the_first(dtype: torch.dtype) -> None:
    """Bytes tell these weights exactly, so that nothing but the logit's type hides that the second is higher."""
    weight = torch.zeros(2000, 128)
    weight[:, 0] = 127.0
    weight[7, 1:80] = weight[1500, 1:80] = 100.0
    weight[1500, 81] = 0.5 if dtype == torch.float16 else 1.0
    panels, head = head_of(weight.to(dtype))
    x = torch.ones(1, 128, dtype=dtype)
    assert highest(panels, x) == [7]
    assert found(panels, head, x) == 1


def test_all_logits_below_nothing_and_outputs_that_fill_no_panel() -> None:
    """What fills up the last panel stands for no output, though its products are 0."""
    weight = -torch.rand(33 * 32 + 1, 64, generator=torch.Generator().manual_seed(1)) - 0.1
    weight[5] = -0.01
    panels, head = head_of(weight)
    assert found(panels, head, torch.ones(1, 64)) == 1


@pytest.mark.parametrize("inputs", [896, 8192])
def test_sums_as_large_as_they_can_be(inputs: int) -> None:
    weight = bell(torch.Generator().manual_seed(8), 300, inputs) * 0.01
    weight[200] = 1.0
    panels, head = head_of(weight)
    assert found(panels, head, torch.ones(1, inputs)) == 1


def test_a_number_beside_which_others_are_lost_in_fixed_point() -> None:
    """They are less than 1 there, so an output of theirs alone seems to be nothing, and is the highest."""
    weight, x = torch.zeros(1000, 64), torch.full((1, 64), 27.0)
    x[0, 0], x[0, 1] = 1e6, 400.0
    weight[3, 1] = weight[500, 2:] = 1.0
    panels, head = head_of(weight)
    assert highest(panels, x) == [500]
    assert found(panels, head, x) == 1


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_logits_so_small_that_their_type_has_few_numbers(size: float) -> None:
    """float16 has steps of 2^-24 near 0: many outputs become equal, and -0.0 is equal to 0.0."""
    generator = torch.Generator().manual_seed(11)
    panels, head = head_of((bell(generator, 4000, 128) * size).half())
    found(panels, head, (bell(generator, 40, 128) * size).half())
    for lower, higher in ((1.0, 1.02), (-0.01, 0.01)):
        weight = torch.full((2000, 2), -1.0)
        weight[7], weight[1500] = torch.tensor([lower, 0.0]), torch.tensor([higher, 0.0])
        panels, head = head_of(weight.half())
        x = torch.tensor([[1e-6, 0.0]]).half()
        assert highest(panels, x) == [7]
        found(panels, head, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-28, 1e-21])
def test_weights_whose_squares_are_nothing(dtype: torch.dtype, size: float) -> None:
    """An output of many small weights that no byte tells is higher than one of few that are told."""
    weight = torch.zeros(2000, 64)
    weight[7, 0] = weight[1500, 0] = size
    weight[7, 1:61], weight[1500, 1:21] = 0.49 / 127 * size, size / 127
    panels, head = head_of(weight.to(dtype))
    found(panels, head, torch.ones(1, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_whose_squares_are_infinite_have_no_int8_head(dtype: torch.dtype) -> None:
    weight = bell(torch.Generator().manual_seed(4), 2000, 2064)
    weight[3], weight[1500] = 1e18, 0.5
    assert head_of(weight.to(dtype))[1] is None


@pytest.mark.parametrize("row", ["nan", "infinite", "huge", "nothing"])
def test_rows_by_which_nothing_can_be_told_name_none(row: str) -> None:
    weight = bell(torch.Generator().manual_seed(2), 500, 32)
    x = torch.full((1, 32), {"nan": torch.nan, "infinite": torch.inf, "huge": 1e30, "nothing": 0.0}[row])
    _, head = head_of(weight)
    assert head is not None
    assert head.highest(x) is None


def test_where_many_come_close_none_is_named() -> None:
    generator = torch.Generator().manual_seed(3)
    _, head = head_of(bell(generator, 1, 256).expand(5000, 256) + 1e-4 * bell(generator, 5000, 256))
    assert head is not None
    assert head.highest(bell(generator, 1, 256)) is None


def test_what_has_no_int8_head() -> None:
    weight = torch.randn(64, 32)
    for bias, gated in ((torch.randn(64), False), (None, True)):
        panels = arrange_weight(weight, bias, gated=gated, arena=WeightArena())
        assert panels is not None
        assert make_int8_head(panels, WeightArena()) is None
    weight[5, 5] = torch.inf
    assert head_of(weight)[1] is None


def test_rows_of_another_shape_or_type_are_refused() -> None:
    _, head = head_of(torch.randn(64, 32))
    assert head is not None
    for x in (
        torch.ones(1, 31),
        torch.ones(MAX_ROWS + 1, 32),
        torch.ones(1, 32, dtype=torch.bfloat16),
        torch.ones(32),
    ):
        with pytest.raises(ValueError, match="x: must be"):
            head.highest(x)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(1, 700), st.integers(1, 40), st.sampled_from(DTYPES), st.floats(-6, 6))
def test_any_weights_of_any_size(seed: int, outputs: int, pairs: int, dtype: torch.dtype, magnitude: float) -> None:
    """Also where one weight is far larger than all others, so that its output's bytes tell little."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (magnitude / (3 if dtype == torch.float16 else 1))
    weight, x = bell(generator, outputs, 2 * pairs) * scale, bell(generator, 3, 2 * pairs) / scale
    weight[seed % outputs, seed % (2 * pairs)] *= 100
    panels, head = head_of(weight.to(dtype))
    found(panels, head, x.to(dtype))
