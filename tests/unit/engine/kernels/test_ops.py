"""The small operations: every implementation, the reference among them, against plain formulas; refusals by name."""

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import ops
from moonpool.engine.kernels.attention import copy_blocks
from tests.unit.engine.kernels.cases import MODES

STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 1e-14}


def norm_by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Number by number: x / sqrt(mean(x^2) + eps) * weight."""
    rows = []
    for row in x.tolist():
        size = math.sqrt(sum(number * number for number in row) / len(row) + eps)
        rows.append([number / size * factor for number, factor in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def turned_by_formula(x: Tensor, angles: Tensor) -> Tensor:
    """Complex multiplication: the pair (i, i + D / 2) of a head is turned by the angle [row, i]."""
    out, half = x.double().clone(), x.shape[2] // 2
    for row, head, i in torch.cartesian_prod(*(torch.arange(n) for n in (*x.shape[:2], half))).tolist():
        pair = complex(x[row, head, i], x[row, head, i + half]) * cmath.rect(1.0, float(angles[row, i]))
        out[row, head, i], out[row, head, i + half] = pair.real, pair.imag
    return out


def gated_by_formula(both: Tensor) -> Tensor:
    """Number by number: gate / (1 + exp(-gate)) * up."""
    half = both.shape[1] // 2
    rows = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:half], row[half:], strict=True)] for row in both.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that runs."""
    monkeypatch.setenv("MOONPOOL_KERNELS", request.param)
    return str(request.param)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("dtype", STEP)
class TestFormula:
    """Every implementation and type against the formula in float64."""

    @pytest.fixture
    def draw(self, dtype: torch.dtype) -> Any:
        generator = torch.Generator().manual_seed(2)
        return lambda *shape: torch.randn(shape, generator=generator).to(dtype)

    def close(self, ours: Tensor, exact: Tensor, times: float = 1.0) -> None:
        step = STEP[ours.dtype]
        torch.testing.assert_close(ours.double(), exact.double(), rtol=step, atol=times * step)

    def test_rms_norm(self, draw: Any) -> None:
        x, residual, weight = draw(5, 48), draw(5, 48), draw(48)
        self.close(ops.rms_norm(x, weight, 1e-6), norm_by_formula(x, weight, 1e-6))
        summed = residual + x
        self.close(ops.rms_norm(x, weight, 1e-6, residual=residual), norm_by_formula(summed, weight, 1e-6))
        assert torch.equal(residual, summed)

    def test_rope(self, draw: Any, dtype: torch.dtype) -> None:
        heads, angles = draw(5, 3, 32), torch.rand(5, 16, dtype=torch.float64) * 6
        cos = torch.cat((angles.cos(), angles.cos()), dim=1).to(dtype)
        sin = torch.cat((-angles.sin(), angles.sin()), dim=1).to(dtype)
        self.close(ops.rope(heads, cos, sin), turned_by_formula(heads, angles), times=2)

    def test_silu_mul(self, draw: Any) -> None:
        both = draw(5, 96)
        self.close(ops.silu_mul(both), gated_by_formula(both))


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
        ("pool", lambda: copy_blocks(X, torch.tensor([0]), torch.tensor([1]))),
        ("source", lambda: copy_blocks(HEADS, torch.tensor([0]).int(), torch.tensor([1]))),
        ("target", lambda: copy_blocks(HEADS, torch.tensor([0]), torch.tensor([1, 0]))),
    ],
)
def test_wrong_arguments_are_named(name: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()
