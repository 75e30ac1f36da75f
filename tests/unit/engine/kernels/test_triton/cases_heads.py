"""Norms of heads, rotation and KV write in one launch, against the reference.

Run by test_interpreter.py and test_gpu.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import kv_quantization, reference
from moonpool.engine.kernels.attention import HeadNorms
from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator

PLAIN = HeadNorms(None, None, None, None, 1e-5, centred=False, wide=False, last=False)
#: Two roundings apart at most, relative to values near 1; the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-5, torch.float16: 2**-9}
BLOCK_SIZE, BLOCKS = 16, 4


def on_device(norms: HeadNorms | None) -> HeadNorms | None:
    if norms is None:
        return None
    parts = norms.q_weight, norms.k_weight, norms.q_bias, norms.k_bias
    q_weight, k_weight, q_bias, k_bias = (None if part is None else part.to(DEVICE) for part in parts)
    return replace(norms, q_weight=q_weight, k_weight=k_weight, q_bias=q_bias, k_bias=k_bias)


def pool(stored: torch.dtype, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor | None]:
    if stored not in reference.QUANTIZED_MAX:
        return torch.full((BLOCKS, kv_heads, 2, BLOCK_SIZE, head_dim), 7.0, dtype=stored), None
    size = kv_quantization.slice_bytes(kv_heads, BLOCK_SIZE, head_dim)
    slices = torch.full((BLOCKS, size), 0x3F, dtype=torch.uint8)
    return kv_quantization.views(slices, stored, kv_heads=kv_heads, block_size=BLOCK_SIZE, head_dim=head_dim)


def check(
    norms: HeadNorms | None,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    seed: int | None = None,
) -> None:
    """Compare queries and the pool; of quantised KV by what is stored."""
    rng, tokens = generator(seed), 3
    flat = torch.randn((tokens, heads + 2 * kv_heads + 1, head_dim), generator=rng).to(dtype)  # with gates behind
    angles = torch.rand((tokens, max(width // 2, 1)), generator=rng) * 6
    turns = torch.cat((angles.cos(), angles.cos()), 1).to(dtype), torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    ids, offsets = torch.tensor([2, -1, 0]), torch.tensor([5, 6, 15])  # the second token is not stored
    results = []
    for device, operation in (("cpu", reference.norm_rope_write), (DEVICE, ops.norm_rope_write)):
        qkv, (kv, scales) = flat.to(device), pool(stored or dtype, kv_heads or 1, head_dim)
        kv, scales = kv.to(device), None if scales is None else scales.to(device)
        out = torch.full((tokens, heads, head_dim), torch.nan, dtype=dtype, device=device)
        operation(
            qkv[:, : heads + kv_heads],
            qkv[:, heads + kv_heads : heads + 2 * kv_heads] if kv_heads else None,
            out,
            norms if operation is reference.norm_rope_write else on_device(norms),
            (turns[0].to(device), turns[1].to(device)) if width else None,
            kv if kv_heads else None,
            scales,
            ids.to(device),
            offsets.to(device),
        )
        results.append((out, reference.dequantize(kv, scales, torch.float32)))
    (out, kv), (ours, our_kv) = results
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double().cpu(), out.double(), rtol=limit, atol=limit)
    # A number between two codes may take either one.
    step = {None: limit, torch.int8: 4 / 127 + limit, torch.float8_e4m3fn: 1 / 8 + limit}[stored]
    torch.testing.assert_close(our_kv.cpu(), kv, rtol=step, atol=step)


def weights(count: int, *shape: int) -> list[Tensor]:
    return [torch.rand(shape, generator=generator(5)) + 0.5 for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("normed", [False, True])
def test_every_type_of_pool(dtype: torch.dtype, stored: torch.dtype | None, normed: bool) -> None:
    q, k = weights(2, 64)
    check(replace(PLAIN, q_weight=q, k_weight=k) if normed else None, 64, dtype=dtype, stored=stored)


@pytest.mark.parametrize(("width", "head_dim"), [(0, 64), (16, 64), (80, 80), (24, 96), (128, 128), (512, 512)])
@pytest.mark.parametrize("last", [False, True])
def test_partial_rotation(width: int, head_dim: int, last: bool) -> None:
    """Of all elements, of the first ones, and of none; heads of any size."""
    q, k = weights(2, head_dim)
    check(replace(PLAIN, q_weight=q, k_weight=k, wide=True, last=last), width, head_dim=head_dim)
    check(None, width, head_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_kinds_of_norms(dtype: torch.dtype, wide: bool) -> None:
    """Without a weight, with one for each head, centred, with a bias."""
    q, k = weights(1, 4, 64)[0], weights(1, 2, 64)[0]
    row, bias = weights(2, 64)
    for norms in (
        PLAIN,
        replace(PLAIN, q_weight=q, k_weight=k),
        replace(PLAIN, q_weight=q, k_weight=k, centred=True),
        replace(PLAIN, q_weight=row, k_weight=row, q_bias=bias, k_bias=-bias, centred=True),
    ):
        check(replace(norms, wide=wide or norms.centred), 64, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (14, 2), (9, 3), (40, 8), (5, 0)])
def test_numbers_of_heads(heads: int, kv_heads: int) -> None:
    """Also more than a program takes, and queries alone, whose keys are another layer's."""
    q, k = weights(2, 64)
    check(replace(PLAIN, q_weight=q, k_weight=k), 64, heads=heads, kv_heads=kv_heads)


def test_results_are_those_of_separate_launches() -> None:
    """To the bit, without a norm: the arithmetic is that of the kernels for one operation each."""
    rng, heads, kv_heads, dim = generator(), 4, 2, 64
    qkv = torch.randn((5, heads + 2 * kv_heads, dim), generator=rng).to(torch.bfloat16).to(DEVICE)
    angles = torch.rand((5, dim), generator=rng).to(torch.bfloat16).to(DEVICE)
    ids, offsets = torch.tensor([0, 0, 1, 3, 2]).to(DEVICE), torch.tensor([0, 1, 2, 3, 4]).to(DEVICE)
    turned, out = torch.empty_like(qkv[:, :6].contiguous()), torch.empty_like(qkv[:, :4].contiguous())
    for stored in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        pools = [pool(stored, kv_heads, dim) for _ in range(2)]
        (kv, scales), (ours, our_scales) = [
            (kv.to(DEVICE), None if scales is None else scales.to(DEVICE)) for kv, scales in pools
        ]
        ops.rope(qkv[:, :6], angles, angles, turned)
        ops.write_kv(turned[:, heads:], qkv[:, 6:], kv, scales, ids, offsets)
        ops.norm_rope_write(qkv[:, :6], qkv[:, 6:], out, None, (angles, angles), ours, our_scales, ids, offsets)
        assert torch.equal(out, turned[:, :heads])
        assert torch.equal(ours.view(torch.uint8), kv.view(torch.uint8))
        assert scales is None or torch.equal(our_scales, scales)  # type: ignore[arg-type]


def test_no_rows() -> None:
    none, ids = torch.empty((0, 3, 64), device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    kv = torch.ones((1, 1, 2, 16, 64), device=DEVICE)
    ops.norm_rope_write(none[:, :2], none[:, :1], none[:, :1], None, None, kv, None, ids, ids)
    assert (kv == 1).all()
