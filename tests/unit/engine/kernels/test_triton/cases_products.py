"""Products with packed weights in Triton against plain torch. Run by test_interpreter.py and test_gpu.py."""

import itertools

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import ops, packed
from moonpool.engine.kernels.triton import ops as triton_ops
from moonpool.engine.weights.packed import PackedWeight
from tests.unit.engine.kernels.test_packed_products import Kind, Packed
from tests.unit.engine.kernels.test_packed_products import packed as random_weight
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator, slowly

KINDS = (
    Kind(4, 16),
    Kind(4, 32, offsets=True),
    Kind(8, 16, offsets=True),
    Kind(8, 32),
    Kind(4, 128, offsets=True, scales="wide"),
    Kind(5, 32),
    Kind(4, 32, offsets=True, scales="units"),
    Kind(6, 16, scales="units"),
    Kind(4, 16, table=True),
    Kind(4, 16, scales="wide", floats="table"),
    Kind(8, 128, floats="float8_e4m3fn"),
)
OTHERS = (
    Kind(4, 16, offsets=True),
    Kind(4, 32),
    Kind(8, 16),
    Kind(8, 32, offsets=True),
    Kind(6, 32, offsets=True, scales="units"),
    Kind(4, 32, table=True),
)
#: Sums differ by the last addition's rounding, and the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}


def weight_of(made: Packed) -> PackedWeight:
    parts = (made.codes, made.bits, made.group, made.scales, made.zero, made.offsets, made.values, made.units)
    return PackedWeight(*parts, made.offset_units).to(torch.device(DEVICE))


def close(x: Tensor, made: Packed, bias: Tensor | None = None) -> None:
    expected = torch.empty((len(x), made.shape[0]), dtype=x.dtype)
    packed.packed_linear(x, made, bias, expected)
    out = torch.full_like(expected, torch.nan, device=DEVICE)
    triton_ops.packed_linear(x.to(DEVICE), weight_of(made), None if bias is None else bias.to(DEVICE), out)
    limit = TOLERANCE[x.dtype] * float(expected.abs().max())
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=TOLERANCE[x.dtype], atol=limit)


@pytest.mark.parametrize("kind", [*KINDS, *slowly(*zip(OTHERS, strict=True))], ids=str)
def test_products(kind: Kind) -> None:
    made = random_weight(70, 256, kind)
    x = torch.randn((5, 256 + 7), generator=generator())[:, :256]
    bias = torch.randn(70, generator=generator())
    close(x, made, bias)


ROWS = (1, 17, 70)
QUICK = tuple(zip(DTYPES, ROWS, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rows"), [*QUICK, *slowly(*(case for case in itertools.product(DTYPES, ROWS) if case not in QUICK))]
)
def test_types_and_numbers_of_rows(dtype: torch.dtype, rows: int) -> None:
    x = (3 * torch.randn((rows, 256), generator=generator())).to(dtype)
    close(x, random_weight(33, 256, Kind(4, 32, offsets=True)))


def test_a_zero_that_is_not_the_middle() -> None:
    made = random_weight(40, 128, Kind(8, 32))
    made.zero = 7
    close(torch.randn((3, 128), generator=generator()), made)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    made = weight_of(random_weight(40, 256, Kind(4, 32, offsets=True)))
    x = torch.randn((40, 256), generator=generator()).to(DEVICE)
    many = torch.empty((40, 40), device=DEVICE)
    triton_ops.packed_linear(x, made, None, many)
    for row in (0, 16, 39):
        alone = torch.empty((1, 40), device=DEVICE)
        triton_ops.packed_linear(x[row : row + 1], made, None, alone)
        assert torch.equal(alone[0], many[row])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_chunks_that_are_zero_or_no_numbers() -> None:
    made = random_weight(8, 96, Kind(4, 32))
    x = torch.randn((3, 96), generator=generator())
    x[0, :32], x[1, 40], x[2, 70] = 0.0, torch.nan, torch.inf
    out = torch.empty((3, 8), device=DEVICE)
    triton_ops.packed_linear(x.to(DEVICE), weight_of(made), None, out)
    expected = torch.empty(3, 8)
    packed.packed_linear(x, made, None, expected)
    torch.testing.assert_close(out[0].cpu(), expected[0])
    assert not torch.isfinite(out[1:]).any()


def test_wrong_arguments_are_named() -> None:
    made = weight_of(random_weight(8, 96, Kind(4, 32)))
    with pytest.raises(ValueError, match=r"^x: must be \[M, 96\]"):
        ops.packed_linear(torch.zeros((2, 64), device=DEVICE), made)
    with pytest.raises(ValueError, match=r"^bias"):
        ops.packed_linear(torch.zeros((2, 96), device=DEVICE), made, torch.zeros(9, device=DEVICE))
