"""Arranged matrices: products by the reference, a row alone and among others, rows given back, refusals."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.base.checkpoint.weight_file import WeightFile
from moonpool.base.native import build
from moonpool.engine.kernels import memory, reference
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_weight
from moonpool.engine.kernels.choice import DTYPES
from moonpool.engine.kernels.memory import LARGE_PAGE, WeightArena
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library
from tests.examples import examples, pairs

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
ADD = 1
"""Of `End` in panels.h."""
OTHERS = [name for name, (needed, _) in build.TARGETS.items() if needed <= build.processor_flags()][1:]


def arranged(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> ArrangedWeight:
    made = arrange_weight(weight, bias, gated=gated, arena=WeightArena())
    assert made is not None
    return made


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    reference.linear(x, weight, bias, out)
    if not gated:
        return out
    inner = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype)
    reference.silu_mul(out, inner)
    return inner


def product(panels: ArrangedWeight, x: Tensor, columns: int) -> Tensor:
    """What is not written stays NaN."""
    return panels.product(x, out=torch.full((x.shape[0], columns), torch.nan, dtype=x.dtype))


def check(
    rows: int, inputs: int, columns: int, *, bias: bool, gated: bool, dtype: torch.dtype, counts: Iterable[int] = ()
) -> None:
    """Compares with the reference, and the first rows, as many as `counts` say, and all of them with each row alone."""
    generator = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * columns)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    outputs = 2 * columns if gated else columns
    x, weight, added = draw(rows, inputs + 3)[:, :inputs], draw(outputs, inputs), draw(outputs) if bias else None
    panels = arranged(weight, added, gated=gated)
    want = expected(x, weight, added, gated=gated).double()
    scale = float(want.abs().max()) if rows else 1.0
    step = STEP[dtype]
    got = product(panels, x, columns)
    torch.testing.assert_close(got.double(), want, rtol=step, atol=step * max(1.0, scale))
    alone = torch.cat([got[:0], *(product(panels, x[row : row + 1], columns) for row in range(rows))])
    for count in (*counts, rows):
        assert torch.equal(product(panels, x[:count], columns), alone[:count]), f"{count} rows"
    if not gated:
        assert torch.equal(panels.product(x, wide=True), got.float())
        native, residual = library.get(), draw(rows, columns)
        assert native is not None
        total = residual + got
        native.product(panels.structure, x, residual, ADD)
        assert torch.equal(residual, total)
    index = torch.randperm(outputs, generator=generator)
    assert torch.equal(panels.rows(index), weight[index])


@pytest.mark.parametrize(("gated", "wide"), [(False, False), (False, True), (True, False)])
def test_a_matrix_that_is_worked_on_in_parts(gated: bool, wide: bool) -> None:
    """As large as heads are."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(140_010, 32, generator=generator), torch.randn(140_010, generator=generator)
    x = torch.randn(3, 32, generator=generator)
    want = expected(x, weight, bias, gated=gated)
    torch.testing.assert_close(arranged(weight, bias, gated=gated).product(x, wide=wide), want, rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(40))
@given(
    st.integers(0, 40),
    st.integers(1, 80),
    st.integers(1, 100),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_any_shape(rows: int, half: int, columns: int, bias: bool, gated: bool, dtype: torch.dtype) -> None:
    check(rows, 2 * half, columns, bias=bias, gated=gated, dtype=dtype)


@pytest.mark.parametrize("target", [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_instruction_sets(target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Library(build.build(target))
    monkeypatch.setattr(library, "loader", library.Loader(lambda: built.path))
    for gated in (False, True):
        check(15, 66, 45, bias=gated, gated=gated, dtype=dtype, counts=range(1, 15))
        check(200, 1100, 45, bias=gated, gated=gated, dtype=dtype, counts=range(1, 41))


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


YES = (False, True)


@pytest.mark.parametrize(
    ("inputs", "gated", "bias", "dtype", "threads"), pairs([128, 514, 1100], YES, YES, DTYPES, [1, 2])
)
def test_a_row_alone_and_in_a_batch_of_any_size(
    inputs: int, gated: bool, bias: bool, dtype: torch.dtype, threads: int
) -> None:
    """Parts of a panel have 64 to 512 inputs; its 8 panels are 3, 3 and 2 for one thread, 3 and 1 for each of two."""
    torch.set_num_threads(threads)
    check(40, inputs, 115 if gated else 230, bias=bias, gated=gated, dtype=dtype, counts=range(1, 40))


@pytest.mark.parametrize(("panels", "gated", "dtype", "threads"), pairs([2, 3, 11], YES, DTYPES, [1, 2]))
def test_many_rows(panels: int, gated: bool, dtype: torch.dtype, threads: int) -> None:
    """Blocks have 192 rows on AVX2; several go at once where the panels are few for the threads."""
    torch.set_num_threads(threads)
    columns = panels * (16 if gated else 32) - 5
    check(460, 600, columns, bias=False, gated=gated, dtype=dtype, counts=(192, 193, 385, 400))


def test_a_matrix_that_pairs_do_not_fit_stays_as_it_is() -> None:
    native = library.get()
    assert native is not None
    odd = torch.randn(8, 7).bfloat16()
    assert (arrange_weight(odd, None, gated=False, arena=WeightArena()) is None) == native.has_bf16


def test_plain_torch_has_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", "torch")
    assert arrange_weight(torch.randn(8, 8), None, gated=False, arena=WeightArena()) is None


def test_wrong_arguments_are_named() -> None:
    panels = arranged(torch.randn(8, 6))
    for wrong in (torch.randn(6), torch.randn(2, 5), torch.randn(2, 6).double()):
        with pytest.raises(ValueError, match=r"^x: must be \[M, 6\]"):
            panels.product(wrong)
    for row in (-1, 8):
        with pytest.raises(IndexError, match=r"^index: "):
            panels.rows(torch.tensor([0, row]))


def test_pieces_in_a_file_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FILE_CHUNK", 1 << 20)
    arena = WeightArena(WeightFile(tmp_path / "weights", "a"))
    first, second, large = arena.take(100), arena.take(1), arena.take((1 << 20) + 1)
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(1), second.fill_(2), large[-1].fill_(3)
    assert (first.tolist(), second.tolist(), large[-2:].tolist()) == ([1] * 100, [2], [0, 3])
    assert arena.mapped_bytes == 128 + 64 + (1 << 20) + 64
    arena.record([1, "a"])
    assert arena.finish("a note") == "a note"
    again = WeightArena(WeightFile(tmp_path / "weights", "a"))
    assert again.whole
    assert [again.take(count)[-1].item() for count in (100, 1, (1 << 20) + 1)] == [1, 2, 3]
    assert again.recorded() == [1, "a"]
    assert (again.finish("another"), again.mapped_bytes) == ("a note", arena.mapped_bytes)


def test_pieces_of_memory_are_apart_and_begin_at_large_pages() -> None:
    arena = WeightArena()
    first, second, large = arena.take(100), arena.take(1), arena.take(33 << 20)
    assert first.data_ptr() % LARGE_PAGE == large.data_ptr() % LARGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(1), second.fill_(2), large.fill_(3)
    assert (first.tolist(), second.tolist(), large.numel()) == ([1] * 100, [2], 33 << 20)
