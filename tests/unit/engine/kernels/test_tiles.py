"""Products and attention through the matrix unit's tiles: over the model everywhere, beside AMX where there is AMX."""

import itertools
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.base.native import build
from moonpool.engine.kernels.kind import PLAIN, AttentionKind
from moonpool.engine.kernels.native.library import Library
from tests.examples import each, pairs
from tests.unit.engine.kernels.cases import make
from tests.unit.engine.kernels.test_arranged_weights import arranged, check
from tests.unit.engine.kernels.test_kv_quantization import attended
from tests.unit.engine.kernels.test_native import hidden, kinds_of_window
from tests.unit.engine.kernels.test_packed_products import KINDS, Kind, exactly, packed, rows
from tests.unit.engine.kernels.test_packed_products import arranged as arranged_packed
from tests.unit.engine.kernels.tile_model import tile_model

__all__ = ["tile_model"]
pytestmark = pytest.mark.timeout(600)  # the first test builds the library
AMX = "avx512-bf16-amx"
WIDE = 2
"""Of `End` in panels.h."""


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("inputs", "columns", "gated", "threads"), pairs([2, 30, 64, 96, 530], [5, 45, 64, 115], [False, True], [1, 2])
)
def test_a_row_alone_and_in_a_batch_of_any_size(
    inputs: int, columns: int, gated: bool, threads: int, tile_model: Library
) -> None:
    """Up to 16 rows go by two panels; 32 are a call; 64 are a block where inputs are many."""
    torch.set_num_threads(threads)
    check(
        70,
        inputs,
        columns,
        bias=gated,
        gated=gated,
        dtype=torch.bfloat16,
        counts=(2, 7, 15, 16, 17, 31, 32, 33, 64, 65),
    )


def test_blocks_of_rows(tile_model: Library) -> None:
    """A block has 512 rows at most; of one panel each of two threads has a block of its own."""
    torch.set_num_threads(2)
    check(520, 64, 20, bias=False, gated=False, dtype=torch.bfloat16, counts=(511, 512, 513))


BYTES = [kind for kind in KINDS if not kind.floats and kind.group <= 32] + [Kind(8, 640, offsets=True)]


@pytest.mark.parametrize(("kind", "dtype"), each(BYTES, [torch.float32, torch.bfloat16]))
def test_packed_weights_have_the_bits_of_the_formula(kind: Kind, dtype: torch.dtype, tile_model: Library) -> None:
    """From 16 rows on through tiles; 17 are 8 and 9, by one copy of the panel. A panel has 20 chunks, or 40."""
    weight, x = (
        packed(70, 1280 if kind.group == 640 else 640, kind),
        rows(40, 1280 if kind.group == 640 else 640, dtype),
    )
    panels, want = arranged_packed(weight, dtype), exactly(x, weight)
    for count in (15, 16, 17, 33, 40):
        assert torch.equal(panels.product(x[:count]), want[:count]), f"{count} rows"


@pytest.mark.parametrize(("head_dim", "heads"), pairs([16, 64, 80, 96, 128], [4, 7]))
def test_prompts_attend(head_dim: int, heads: int, tile_model: Library) -> None:
    case = make([(1, 40), (70, 300), (33, 33)], heads=heads, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    case = replace(case, scale=head_dim**-0.5)
    case.check(case.run())


@pytest.mark.parametrize(("stored", "shape"), pairs([torch.int8, torch.float8_e4m3fn], [(3, 32), (7, 64), (9, 80)]))
def test_prompts_attend_to_quantised_kv(stored: torch.dtype, shape: tuple[int, int], tile_model: Library) -> None:
    case, scales = attended(stored, torch.bfloat16, [70, 1, 33], [300, 40, 33], shape)
    case.check(case.run(scales=scales))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_prompts_attend_within_windows(stored: torch.dtype, tile_model: Library) -> None:
    for kind in kinds_of_window(1, 33, 64, 250):
        if stored is torch.bfloat16:
            case, scales = make([(70, 300), (33, 333)], head_dim=32, dtype=stored), None
        else:
            case, scales = attended(stored, torch.bfloat16, [70, 33], [300, 333], (2, 32))
        case = replace(case, kind=kind)
        if scales is None:
            hidden(case)
        case.check(case.run(scales=scales))


@pytest.mark.parametrize(("cut", "kind"), pairs([2, 31, 64], [PLAIN, *kinds_of_window(40, 290)]))
def test_a_prompt_cut_anywhere_keeps_its_bits(cut: int, kind: AttentionKind, tile_model: Library) -> None:
    case = make([(70, 300)], heads=4, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    case = replace(case, kind=kind)
    first = case.run(
        q=case.q[:cut], query_start=torch.tensor([0, cut]).int(), context_lens=torch.tensor([230 + cut]).int()
    )
    second = case.run(q=case.q[cut:], query_start=torch.tensor([0, 70 - cut]).int())
    assert torch.equal(torch.cat((first, second)), case.run())


def test_a_nan_stays_in_its_row(tile_model: Library) -> None:
    weight, x = torch.randn(40, 70).bfloat16(), torch.randn(40, 70).bfloat16()
    panels = arranged(weight)
    clean = panels.product(x)
    x[17, 3] = torch.nan
    out = panels.product(x)
    assert out[17].isnan().all()
    assert torch.equal(torch.cat((out[:17], out[18:])), torch.cat((clean[:17], clean[18:])))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction set of x86-64")
@pytest.mark.parametrize("source", ["multiply", "packed", "prefill"])
def test_the_instructions_compile_without_such_a_processor(source: str, tmp_path: Path) -> None:
    flags = [flag for flag in build.flags(AMX) if flag not in ("-O3", "-shared")]
    command = [
        build.compiler(),
        "-O0",
        *flags,
        "-c",
        str(build.SOURCES / f"{source}.cpp"),
        "-o",
        str(tmp_path / "made.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_processor_has_the_bits_of_the_model(tile_model: Library) -> None:
    """Runs where there is AMX; elsewhere the level cannot be loaded."""
    if build.detect() != AMX:
        pytest.skip(f"needs a processor with AMX, permitted; here the level is {build.detect()}")
    processor = Library(build.build(AMX))
    generator = torch.Generator().manual_seed(3)
    for inputs, size in itertools.product((50, 64, 530, 576), (1.0, 1e-19, 1e-20)):
        weight, x = ((torch.randn(n, inputs, generator=generator) * size).bfloat16() for n in (96, 70))
        panels = arranged(weight)
        for count in (1, 7, 16, 33, 70):
            found = [torch.empty(count, 96) for _ in range(2)]
            for native, out in zip((tile_model, processor), found, strict=True):
                native.product(panels.structure, x[:count], out, WIDE)
            assert torch.equal(*(out.view(torch.int32) for out in found)), (inputs, size, count)
