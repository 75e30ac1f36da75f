"""The small operations: every implementation against the reference, and refusals by name."""

from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.attention import copy_blocks

MODES = ["reference", "torch", "native"]
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 1e-14}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", STEP)
def test_all_follow_the_reference(dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    def close(ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, rtol=STEP[dtype], atol=STEP[dtype])

    x, residual, weight = draw(5, 48), draw(5, 48), draw(48)
    expected, theirs = torch.empty_like(x), residual.clone()
    reference.rms_norm(x, theirs, weight, 1e-6, expected)
    close(ops.rms_norm(x, weight, 1e-6, residual=residual), expected)
    close(residual, theirs)
    heads, cos, sin = draw(5, 3, 32), draw(5, 32), draw(5, 32)
    expected = torch.empty_like(heads)
    reference.rope(heads, cos, sin, expected)
    close(ops.rope(heads, cos, sin), expected)
    both = draw(5, 96)
    expected = torch.empty_like(x)
    reference.silu_mul(both, expected)
    close(ops.silu_mul(both), expected)
    matrix, bias = draw(7, 48), draw(7)
    expected = torch.empty(5, 7, dtype=dtype)
    reference.linear(x, matrix, bias, expected)
    torch.testing.assert_close(ops.linear(x, matrix, bias), expected, rtol=STEP[dtype], atol=20 * STEP[dtype])


X, WEIGHT, HEADS, ANGLES = torch.ones(3, 8), torch.ones(8), torch.ones(3, 2, 8), torch.ones(3, 8)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: ops.rms_norm(X[0], WEIGHT, 1e-6)),
        ("x", lambda: ops.rms_norm(torch.ones(8, 3).t(), WEIGHT, 1e-6)),
        ("weight", lambda: ops.rms_norm(X, WEIGHT[:5], 1e-6)),
        ("weight", lambda: ops.rms_norm(X, WEIGHT.double(), 1e-6)),
        ("residual", lambda: ops.rms_norm(X, WEIGHT, 1e-6, residual=X[:2])),
        ("residual", lambda: ops.rms_norm(X, WEIGHT, 1e-6, residual=torch.ones(3, 9)[:, :8])),
        ("out", lambda: ops.rms_norm(X, WEIGHT, 1e-6, out=X.half())),
        ("x", lambda: ops.rope(X, ANGLES, ANGLES)),
        ("x", lambda: ops.rope(HEADS[..., :7], ANGLES, ANGLES)),
        ("cos", lambda: ops.rope(HEADS, ANGLES[:2], ANGLES)),
        ("sin", lambda: ops.rope(HEADS, ANGLES, ANGLES[:, None])),
        ("gate_up", lambda: ops.silu_mul(X[:, :7])),
        ("out", lambda: ops.silu_mul(X, out=X)),
        ("x", lambda: ops.linear(WEIGHT, X)),
        ("weight", lambda: ops.linear(X, WEIGHT)),
        ("weight", lambda: ops.linear(X, torch.ones(4, 7))),
        ("bias", lambda: ops.linear(X, X, WEIGHT)),
        ("pool", lambda: copy_blocks(X, torch.tensor([0]), torch.tensor([1]))),
        ("source", lambda: copy_blocks(HEADS, torch.tensor([0]).int(), torch.tensor([1]))),
        ("target", lambda: copy_blocks(HEADS, torch.tensor([0]), torch.tensor([1, 0]))),
    ],
)
def test_wrong_arguments_are_named(name: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()
