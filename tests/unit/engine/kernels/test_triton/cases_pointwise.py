"""Norm, rotation and activation in Triton against the reference. Run by test_interpreter.py and test_gpu.py."""

import pytest
import torch

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator

#: Two roundings apart at most, relative to values near 1; the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}


def close(result: torch.Tensor, expected: torch.Tensor, *, roundings: int = 2) -> None:
    limit = TOLERANCE[result.dtype] * roundings / 2
    torch.testing.assert_close(result.double().cpu(), expected.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 896])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, size: int, with_residual: bool) -> None:
    rng = generator()
    x = torch.randn((3, size + 7), generator=rng).to(dtype)[:, :size]
    weight = torch.randn(size, generator=rng).to(dtype)
    residual = torch.randn((3, size), generator=rng).to(dtype) if with_residual else None
    wide = x.double() + residual.double() if residual is not None else x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = torch.full((3, size), torch.nan, dtype=dtype, device=DEVICE)
    theirs = None if residual is None else residual.to(DEVICE)
    ops.rms_norm(x.to(DEVICE), theirs, weight.to(DEVICE), 1e-5, out)
    close(out, expected)
    if theirs is not None:
        close(theirs, wide)


def test_rms_norm_in_place() -> None:
    x = torch.randn((2, 64), generator=generator())
    expected = torch.empty_like(x)
    reference.rms_norm(x, None, torch.ones(64), 1e-6, expected)
    ours = x.to(DEVICE)
    ops.rms_norm(ours, None, torch.ones(64, device=DEVICE), 1e-6, ours)
    close(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("centred", "wide", "weighted", "biased"),
    [
        (False, True, "", False), (False, True, "row", False), (False, False, "row", False),
        (False, True, "heads", False), (False, False, "heads", False), (True, True, "row", True),
        (True, True, "heads", False), (True, True, "", False),
    ],
)  # fmt: skip
def test_norms_of_heads_among_others(
    dtype: torch.dtype, centred: bool, wide: bool, weighted: str, biased: bool
) -> None:
    """Heads of a row are read where the product has put them, and written among others."""
    rng, heads, size = generator(), 3, 80
    stored = (torch.randn((4, heads + 2, size), generator=rng) + 0.5).to(dtype)
    weight = torch.randn((heads, size) if weighted == "heads" else size, generator=rng) if weighted else None
    bias = torch.randn(size, generator=rng) if biased else None
    expected = torch.empty((4, heads, size), dtype=dtype)
    reference.norm(stored[:, 1:-1], None, weight, bias, 1e-5, expected, centred=centred, wide=wide)
    out = torch.full((4, heads + 1, size), 7.0, dtype=dtype, device=DEVICE)
    scale, shift = (None if part is None else part.to(DEVICE) for part in (weight, bias))
    ops.norm(stored.to(DEVICE)[:, 1:-1], None, scale, shift, 1e-5, out[:, 1:], centred=centred, wide=wide)
    close(out[:, 1:], expected, roundings=2 if wide else 3)
    assert bool((out[:, 0] == 7).all())


def test_a_norm_with_an_offset_takes_the_residual() -> None:
    x, residual = (torch.randn((3, 1, 64), generator=generator()) for _ in range(2))
    weight, expected, sums = torch.rand(64) + 1, torch.empty((3, 1, 64)), residual.clone()
    reference.norm(x, sums, weight, None, 1e-6, expected, centred=False, wide=True)
    ours, out = residual.to(DEVICE), torch.empty((3, 1, 64), device=DEVICE)
    ops.norm(x.to(DEVICE), ours, weight.to(DEVICE), None, 1e-6, out, centred=False, wide=True)
    close(out, expected)
    close(ours, sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (10, 80), (3, 96)])
def test_rope(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    rng = generator()
    wide = torch.randn((3, heads + 2, head_dim), generator=rng).to(dtype)
    x = wide[:, :heads]
    angles = torch.rand((3, head_dim // 2), generator=rng) * 6
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    expected = torch.empty(x.shape, dtype=torch.float64)
    reference.rope(x.double(), cos.double(), sin.double(), expected)
    out = torch.full((3, heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    ops.rope(x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), out)
    close(out, expected)
    ours = wide.to(DEVICE)
    ops.rope(ours[:, :heads], cos.to(DEVICE), sin.to(DEVICE), ours[:, :heads])
    close(ours[:, :heads], expected)
    assert torch.equal(ours[:, heads:].cpu(), wide[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1100])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = (3 * torch.randn((2, 2 * size), generator=generator())).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    out = torch.full((2, size), torch.nan, dtype=dtype, device=DEVICE)
    ops.silu_mul(gate_up.to(DEVICE), out)
    close(out, gate * torch.sigmoid(gate) * up)


def test_no_rows() -> None:
    none = torch.empty((0, 64), device=DEVICE)
    ops.rms_norm(none, None, torch.ones(64, device=DEVICE), 1e-6, none)
    ops.silu_mul(torch.empty((0, 128), device=DEVICE), none)
    ops.rope(none[:, None], none, none, none[:, None])
