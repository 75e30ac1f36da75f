"""Norm, rotation and activation in Triton against the reference. Run by test_interpreter.py and test_gpu.py."""

import pytest
import torch

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator

#: Two roundings apart at most, relative to values near 1; the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[result.dtype]
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
