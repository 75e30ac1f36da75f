"""Compiles every kernel, as it is launched, for GPUs that need not be there: it must compile, fit, and not spill.

The interpreter runs code that the compiler refuses (a function that returns a number in one branch and a tensor in
another). That a kernel compiles does not show that it is right or fast on a GPU: nothing is run here.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.test_triton import launches
from tools.compiled_kernels import AMD, AMPERE, AMPERE_SMALL, HOPPER, Gpu, Launch, caught, compile_for, resources_of
from tools.gen_kernel_resources import GPUS, PAGE, SHAPES, table, told

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]

FIRST = next(iter(SHAPES))
GIVEN_UP = 8
"""Bytes of two registers, which the assembler keeps in memory of itself, for another program at once."""


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Python 3.11 counts the depth of all parsers together. What other tests left behind may parse when it is collected.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_kernels_of_a_model() -> None:
    """The ones that are always compiled: all that services launch for a model of 8B on the first GPU."""
    _check(FIRST, GPUS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_of_every_model(name: str) -> None:
    _check(name)


def _check(name: str, gpus: Sequence[Gpu] = GPUS) -> None:
    """Compile a model's kernels, and compare with the page: another compiler's registers may differ by more."""
    text = PAGE.read_text(encoding="utf-8")
    page = {row: cells for row, cells in told(text, name).items() if any(cells[: len(gpus)])}
    same = f"Triton {importlib.metadata.version('triton')} " in text
    found = table(SHAPES[name], gpus)
    assert list(page) == list(found), "python -m tools.gen_kernel_resources writes the page"
    for row, cells in found.items():
        for gpu, cell, there in zip(gpus, cells, page[row], strict=False):
            assert (cell is None) == (there is None), row
            if cell is None or there is None:
                continue
            taken = cell[1]
            assert taken.stack_bytes <= GIVEN_UP, f"{row} spills on {gpu.name}: {taken}"
            assert taken.shared_bytes <= gpu.limits.shared_bytes, f"{row} does not fit on {gpu.name}: {taken}"
            assert taken.registers == pytest.approx(there[0], abs=24 if same else 96), (row, gpu.name)
            assert taken.shared_bytes / 1024 == pytest.approx(there[1], rel=0.1, abs=1), (row, gpu.name)


def test_a_prompt_and_a_decode_step_take_the_units_that_hopper_has() -> None:
    """Pipelined loads, and products of warpgroups where there are enough rows."""
    for rows, instruction in ((1, "mma.sync"), (200, "wgmma.mma_async")):
        found = _attention(rows, HOPPER)
        assert "cp.async" in found.asm["ptx"]
        assert instruction in found.asm["ptx"]


def _attention(rows: int, gpu: Gpu) -> Any:
    """Compile attention for a batch of sequences with so many rows."""
    [launch] = [
        it
        for it in _launched(gpu, lambda ops: launches.attend(ops, rows=rows, max_context=32))
        if it.name == "attention"
    ]
    return compile_for(gpu, launch)


def _launched(gpu: Gpu, launch: Callable[[Any], None]) -> list[Launch]:
    from kernels.triton import ops

    with caught(gpu.limits) as launched:
        launch(ops)
    return launched


def _fits(gpu: Gpu, launch: Callable[[Any], None]) -> None:
    launched = _launched(gpu, launch)
    assert launched
    for it in launched:
        kernel = compile_for(gpu, it)
        assert kernel.metadata.shared <= gpu.limits.shared_bytes, it.name
        if gpu == HOPPER:
            assert resources_of(kernel).stack_bytes <= GIVEN_UP, it.name


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 200])
def test_attention_in_float32(head_dim: int, rows: int) -> None:
    _fits(HOPPER, lambda ops: launches.attend(ops, dtype=torch.float32, head_dim=head_dim, rows=rows))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [AMPERE, AMPERE_SMALL, AMD])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "block_tokens"), [(1, 64), (200, 16)])
def test_quantized_attention(gpu: Gpu, stored: torch.dtype, rows: int, block_tokens: int) -> None:
    _fits(gpu, lambda ops: launches.attend(ops, rows=rows, stored=stored, block_tokens=block_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [AMPERE_SMALL, AMD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "deterministic"), [(1, False), (200, False), (8, True)])
def test_attention_elsewhere(gpu: Gpu, dtype: torch.dtype, rows: int, deterministic: bool) -> None:
    _fits(gpu, lambda ops: launches.attend(ops, dtype=dtype, rows=rows, deterministic=deterministic))


@pytest.mark.parametrize(("gpu", "rows", "instruction"), [(HOPPER, 1, "mma.sync"), (AMPERE, 200, "mma.sync")])
def test_packed_products_are_of_bytes_on_tensor_cores(gpu: Gpu, rows: int, instruction: str) -> None:
    _fits(gpu, lambda ops: launches.packed_products(ops, rows=rows))
    found = _launched(gpu, lambda ops: launches.packed_products(ops, rows=rows))
    [product] = [compile_for(gpu, it) for it in found if it.name == "_packed_product"]
    assert instruction in product.asm["ptx"]
    assert "s8.s8" in product.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [HOPPER, AMPERE, AMPERE_SMALL, AMD])
@pytest.mark.parametrize("launch", launches.OTHERS)
def test_the_others(gpu: Gpu, launch: Callable[[Any], None]) -> None:
    _fits(gpu, launch)
