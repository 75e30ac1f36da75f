"""Products with packed weights: the arithmetic to the bit, a row alone and among others, rows given back, refusals."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moonpool.base.native import build
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_packed
from moonpool.engine.kernels.choice import DTYPES
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library
from moonpool.engine.kernels.packed import byte_codes, bytes_of_rows, float8_table, in_units, packed_linear, reads_bytes
from tests.examples import each, pairs

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

OTHERS = [name for name, (needed, _) in build.TARGETS.items() if needed <= build.processor_flags()][1:]
ADD = 1
"""Of `End` in panels.h."""


@dataclass
class Packed:
    codes: Tensor
    bits: int
    group: int
    scales: Tensor
    zero: int
    offsets: Tensor | None
    values: Tensor | None = None
    units: Tensor | None = None
    offset_units: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * (2 if self.bits == 4 else 1)))

    @property
    def floats(self) -> bool:
        return not reads_bytes(self.values)

    def dense(self) -> Tensor:
        codes = byte_codes(self)
        whole = codes.float() - self.zero if self.values is None else self.values[codes.long()]
        grouped = whole.view(len(codes), -1, self.group) * in_units(self.scales, self.units)[..., None]
        if self.offsets is not None:
            grouped = grouped + in_units(self.offsets, self.offset_units)[..., None]
        return grouped.flatten(1)


@dataclass(frozen=True)
class Kind:
    """A form of codes; `scales`: how scales and offsets are held."""

    bits: int
    group: int
    offsets: bool = False
    scales: str = "half"  # or wide: float32; units: whole numbers
    table: bool = False
    floats: str = ""  # table, or a float of 8 bits


def packed(outputs: int, inputs: int, kind: Kind) -> Packed:
    """Random codes of the whole range."""
    bits, group = kind.bits, kind.group
    generator = torch.Generator().manual_seed(outputs + 100 * inputs + bits + 7 * group)

    def scaled(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        if kind.scales != "units":
            return numbers.to(torch.float32 if kind.scales == "wide" else torch.float16), None
        blocks = inputs // group // (2 if inputs // group % 2 == 0 else 1)
        units = torch.rand(outputs, blocks, generator=generator).half() / 1000
        return torch.randint(-128, 128, numbers.shape, generator=generator, dtype=torch.int8), units

    top = 256 if bits == 4 else 1 << bits
    codes = torch.randint(0, top, (outputs, inputs // (2 if bits == 4 else 1)), generator=generator, dtype=torch.uint8)
    scales, units = scaled(torch.rand(outputs, inputs // group, generator=generator) / 100)
    offsets, offset_units = None, None
    if kind.offsets:
        offsets, offset_units = scaled(torch.randn(outputs, inputs // group, generator=generator) / 10)
    values = torch.randint(-128, 128, (16,), generator=generator).float() if kind.table else None
    if kind.floats == "table":
        values = torch.randn(16, generator=generator)
    elif kind.floats:
        values = float8_table(getattr(torch, kind.floats))
        codes[~torch.isfinite(values[codes.long()])] = 1
    zero = 0 if kind.offsets or values is not None else 1 << (bits - 1)
    return Packed(codes, bits, group, scales, zero, offsets, values, units, offset_units)


def arranged(weight: Packed, dtype: torch.dtype, bias: Tensor | None = None, *, gated: bool = False) -> ArrangedWeight:
    made = arrange_packed(weight, bias, dtype, gated=gated, arena=WeightArena())
    assert made is not None
    return made


def rows(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count + inputs)).to(dtype)


def exactly(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype)
    packed_linear(x, weight, bias, out)
    return out


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


KINDS = [
    *(Kind(bits, group, offsets) for bits in (4, 6, 8) for group in (16, 32, 640) for offsets in (False, True)),
    *(Kind(bits, 128, offsets, "wide") for bits in (4, 5, 8) for offsets in (False, True)),
    *(Kind(bits, 32, offsets, "units") for bits in (4, 5, 6) for offsets in (False, True)),
    *(Kind(6, 16, offsets, "units") for offsets in (False, True)),
    *(Kind(5, group) for group in (32, 640)),
    *(Kind(4, group, scales=scales, table=True) for group in (16, 32) for scales in ("half", "units")),
    *(Kind(4, group, scales="wide", floats="table") for group in (16, 64, 640)),
    *(Kind(8, group, floats="float8_e4m3fn") for group in (16, 128)),
    *(Kind(8, group, scales="wide", floats="float8_e4m3fn") for group in (32, 640)),
    Kind(8, 32, floats="float8_e5m2"),
]


def in_pairs(kind: Kind, dtype: torch.dtype) -> bool:
    """Whether the machine multiplies such rows as pairs, whose sums no other machine rounds so."""
    native = library.get()
    assert native is not None
    return bool(kind.floats) and dtype == torch.bfloat16 and "bf16" in native.path.name


TILES = (1, 2, 3, 5, 7, 14, 16, 33, 48, 63)
"""Rows that leave a rest of every tile's size."""


@pytest.mark.parametrize(("kind", "threads"), each(KINDS, (1, 2)), ids=str)
def test_products_are_the_reference_to_the_bit(kind: Kind, threads: int) -> None:
    """Also of any number of rows: the same bits as each row alone."""
    torch.set_num_threads(threads)
    weight = packed(75, 640, kind)
    for dtype in DTYPES:
        bias = rows(1, 75, dtype)[0] if kind.offsets else None
        panels = arranged(weight, dtype, bias)
        x = rows(64, 640 + 8, dtype)[:, :640]
        want = exactly(x, weight, bias)
        got = panels.product(x)
        if in_pairs(kind, dtype):
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))
            want = got
        assert torch.equal(got, want), dtype
        assert torch.equal(panels.product(x, wide=True), want.float())
        for count in range(1, 64) if dtype == torch.float32 else TILES:
            assert torch.equal(panels.product(x[:count]), want[:count]), f"{count} rows, {dtype}"
        alone = torch.cat([panels.product(x[row : row + 1]) for row in range(64)])
        assert torch.equal(alone, want), dtype


@pytest.mark.parametrize("target", [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_other_instruction_sets(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSE2 has no fused multiplication, so that sums differ in their last bits."""
    built = Library(build.build(target))
    monkeypatch.setattr(library, "loader", library.Loader(lambda: built.path))
    for kind in KINDS:
        weight, x = packed(75, 640, kind), rows(40, 640, torch.float32)
        panels, want = arranged(weight, torch.float32), exactly(x, weight)
        for count in (1, 2, 3, 5, 6, 7, 11, 14, 40):
            got = panels.product(x[:count])
            if target == "sse2":
                torch.testing.assert_close(got, want[:count], rtol=1e-5, atol=1e-5 * float(want.abs().max()))
            else:
                assert torch.equal(got, want[:count])


@pytest.mark.parametrize(("bits", "dtype", "threads"), pairs([4, 8], DTYPES, [1, 2]))
def test_gates_and_ups(bits: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, x = packed(2 * 45, 96, Kind(bits, 32, True)), rows(9, 96, dtype)
    gates, ups = exactly(x, weight).chunk(2, dim=1)
    want = torch.nn.functional.silu(gates.float()).to(dtype).float() * ups.float()
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    got = arranged(weight, dtype, gated=True).product(x)
    torch.testing.assert_close(got.float(), want, rtol=step, atol=step)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_sum_is_added_to_what_is_there(bits: int) -> None:
    weight, x, residual = (
        packed(70, 64, Kind(bits, 32)),
        rows(5, 64, torch.bfloat16),
        rows(5, 70, torch.bfloat16),
    )
    want = residual + exactly(x, weight)
    native = library.get()
    assert native is not None
    panels = arranged(weight, torch.bfloat16)
    native.product(panels.structure, x, residual, ADD)
    assert torch.equal(residual, want)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_and_a_head_in_parts(bits: int) -> None:
    weight = packed(100_010, 64, Kind(bits, 32))
    x = rows(3, 64, torch.float32)
    assert torch.equal(arranged(weight, torch.float32).product(x), exactly(x, weight))
    small, many = packed(40, 1120, Kind(bits, 32, True)), rows(3000, 1120, torch.bfloat16)
    assert torch.equal(arranged(small, torch.bfloat16).product(many), exactly(many, small))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_come_back_dequantised(kind: Kind) -> None:
    weight = packed(75, 640, kind)
    index = torch.randperm(75, generator=torch.Generator().manual_seed(1))
    got = arranged(weight, torch.float32).rows(index)
    torch.testing.assert_close(got, weight.dense()[index], rtol=1e-6, atol=1e-6)
    gated = packed(2 * 37, 640, kind)
    index = torch.arange(74)
    torch.testing.assert_close(
        arranged(gated, torch.float32, gated=True).rows(index), gated.dense(), rtol=1e-6, atol=1e-6
    )


def test_the_worst_numbers_do_not_overflow() -> None:
    """Whole sums of a chunk are as large as they can be, of either sign."""
    for bits, zero in ((4, 0), (4, 15), (8, 0), (8, 255)):
        codes = torch.full((33, 64 * bits // 8), 255 if not zero else 0, dtype=torch.uint8)
        weight = Packed(codes, bits, 32, torch.ones(33, 2), zero, None)
        for x in (torch.ones(2, 64), -torch.ones(2, 64)):
            got = arranged(weight, torch.float32).product(x)
            assert torch.equal(got, exactly(x, weight))
            assert float(got.abs().min()) == pytest.approx(64 * ((1 << bits) - 1), rel=1e-5)


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    weight, x = packed(40, 64, Kind(4, 32)), rows(4, 64, torch.float32)
    clean = arranged(weight, torch.float32).product(x)
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    got = arranged(weight, torch.float32).product(x)
    assert torch.equal(got[[0, 3]], clean[[0, 3]])
    assert not bool(torch.isfinite(got[1:3]).any())


def test_rows_in_bytes_are_within_half_a_step() -> None:
    x = rows(6, 96, torch.float32)
    x[2], x[3] = 0, 1e-35
    numbers, scales = bytes_of_rows(x)
    assert float(numbers.abs().max()) == 127
    step = scales.repeat_interleave(32, 1)
    assert bool(((numbers * step - x).abs() <= step * 0.501)[[0, 1, 2, 4, 5]].all())
    assert not bool(numbers[2:4].any())


@pytest.mark.parametrize(("inputs", "group"), [(48, 16), (96, 48), (80, 80)])
def test_a_matrix_that_chunks_do_not_fit_stays_as_it_is(inputs: int, group: int) -> None:
    weight = packed(8, inputs, Kind(8, group))
    assert arrange_packed(weight, None, torch.float32, gated=False, arena=WeightArena()) is None


def test_rows_that_floats_multiply_stay_as_they_are() -> None:
    """Sums are those of the dense weight in float64, as near as float32 comes."""
    for kind in (floating for floating in KINDS if floating.floats):
        weight, x = packed(75, 640, kind), rows(8, 640, torch.float32)
        want = x.double() @ weight.dense().double().t()
        got = arranged(weight, torch.float32).product(x)
        assert float((got - want).abs().max()) < 2e-6 * float(want.abs().max())


def test_a_table_of_256_numbers_is_not_arranged() -> None:
    weight = packed(8, 64, Kind(8, 32, floats="float8_e4m3fn"))
    weight.values = torch.arange(256) / 2
    assert arrange_packed(weight, None, torch.float32, gated=False, arena=WeightArena()) is None


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (Kind(4, 32), 4.5),
        (Kind(4, 32, offsets=True), 5),
        (Kind(5, 32), 5.5),
        (Kind(8, 32), 8.5),
        (Kind(4, 32, table=True), 4.5),
        (Kind(4, 32, True, "units"), 4 + 0.5 + 0.5),
        (Kind(6, 16, scales="units"), 6 + 0.5 + 0.5),
        (Kind(4, 64, scales="wide", floats="table"), 4.5),
        (Kind(8, 128, floats="float8_e4m3fn"), 8.125),
    ],
    ids=str,
)
def test_arranged_weights_take_what_their_codes_take(kind: Kind, bits: float) -> None:
    """Units of 16 bits are for two groups."""
    assert arranged(packed(64, 256, kind), torch.bfloat16).memory.nbytes == 64 * 256 * bits / 8
