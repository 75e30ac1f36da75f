"""Compiles every kernel, as it is launched, for GPUs that need not be there: it must compile, fit, and not spill.

The interpreter runs code that the compiler refuses (a function that returns a number in one branch and a tensor in
another). That a kernel compiles does not show that it is right or fast on a GPU: nothing is run here.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.test_triton import launches

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]

HOPPER = ("cuda", 90, 32)
AMPERE = ("cuda", 86, 32)
AMD = ("hip", "gfx942", 64)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_decode_for_hopper() -> None:
    """The one that is always run: pipelined loads, tensor cores, no spilling."""
    kernels = launches.compiled(HOPPER, lambda ops: launches.attend(ops, rows=1, max_context=32))
    assert [name for name, _ in kernels] == ["attention"]
    assert "cp.async" in kernels[0][1].asm["ptx"]
    assert "mma.sync" in kernels[0][1].asm["ptx"]
    assert _stack_bytes(kernels[0][1]) == 0


EVERY_TILE = [(torch.bfloat16, rows, False) for rows in (1, 8, 200)]
EVERY_TILE += [(torch.bfloat16, rows, True) for rows in (1, 200)]
EVERY_TILE += [(torch.float32, 1, False), (torch.float32, 200, True)]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "rows", "deterministic"), EVERY_TILE)
def test_attention_for_hopper(dtype: torch.dtype, head_dim: int, rows: int, deterministic: bool) -> None:
    def launch(ops: Any) -> None:
        launches.attend(ops, dtype=dtype, head_dim=head_dim, rows=rows, deterministic=deterministic)

    for name, kernel in launches.compiled(HOPPER, launch):
        stack = _stack_bytes(kernel)
        print(name, kernel.metadata.shared, stack)
        assert stack <= (64 if name == "join_parts" else 0)  # 128 rows of 256 elements are joined once per launch
        if name == "attention" and rows == 200 and dtype == torch.bfloat16:
            assert "wgmma" in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, AMPERE, AMD])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "block_tokens"), [(1, 64), (200, 16)])
def test_quantized_attention(target: tuple[str, Any, int], stored: torch.dtype, rows: int, block_tokens: int) -> None:
    def launch(ops: Any) -> None:
        launches.attend(ops, rows=rows, stored=stored, block_tokens=block_tokens)

    assert launches.compiled(target, launch)


@pytest.mark.slow
@pytest.mark.parametrize("target", [AMPERE, AMD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "deterministic"), [(1, False), (200, False), (8, True)])
def test_attention_elsewhere(target: tuple[str, Any, int], dtype: torch.dtype, rows: int, deterministic: bool) -> None:
    def launch(ops: Any) -> None:
        launches.attend(ops, dtype=dtype, rows=rows, deterministic=deterministic)

    assert launches.compiled(target, launch)


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, AMPERE, AMD])
@pytest.mark.parametrize("launch", launches.OTHERS)
def test_the_others(target: tuple[str, Any, int], launch: Callable[[Any], None]) -> None:
    kernels = launches.compiled(target, launch)
    assert kernels
    if target == HOPPER:
        assert all(_stack_bytes(kernel) == 0 for _, kernel in kernels)


def _stack_bytes(kernel: Any) -> int:
    """Return the bytes of registers that a program keeps in memory."""
    import triton

    path = Path(kernel.metadata_group[f"{kernel.metadata.name}.cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this triton comes without cuobjdump")
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found, said
    return int(found[1])
