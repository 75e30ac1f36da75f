"""Writes into the pool in Triton against the reference. Run by test_interpreter.py and test_gpu.py."""

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import kv_quantization, reference
from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator

QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def both_write(
    k: Tensor, v: Tensor | None, kv: Tensor, scales: Tensor | None, block_ids: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Write on the device, in place, and with the reference; return what the latter made of it."""
    ids, slots = torch.tensor(block_ids), torch.tensor(offsets)
    expected, expected_scales = kv.cpu().clone(), None if scales is None else scales.cpu().clone()
    reference.write_kv(k, v, expected, expected_scales, ids, slots)
    values = None if v is None else v.to(DEVICE)
    ops.write_kv(k.to(DEVICE), values, kv, scales, ids.to(DEVICE), slots.to(DEVICE))
    return expected, expected_scales


def same(own: Tensor, other: Tensor) -> bool:
    return torch.equal(own.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(2, 64, 16), (3, 80, 64)])
def test_plain_write(dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int) -> None:
    rng = generator()
    kv = torch.full((5, kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    qkv = torch.randn((4, 3 * kv_heads, head_dim), generator=rng).to(dtype)  # k and v are parts of wider rows
    k, v = qkv[:, :kv_heads], qkv[:, 2 * kv_heads :]
    expected, _ = both_write(k, v, kv, None, [2, 2, 0, 4], [0, 1, 7, block_size - 1])
    assert same(kv, expected)


@pytest.mark.parametrize("stored", [None, *QUANTIZED])
def test_latent_vectors_are_written(stored: torch.dtype | None) -> None:
    rng, width, size = generator(), 72, 16
    if stored is None:
        kv, scales = torch.full((3, 1, 1, size, width), torch.nan, device=DEVICE), None
    else:
        bytes_of = kv_quantization.slice_bytes(1, size, width, planes=1)
        slices = torch.full((3, bytes_of), 0x7F, dtype=torch.uint8, device=DEVICE)
        kv, scales = kv_quantization.views(slices, stored, kv_heads=1, block_size=size, head_dim=width, planes=1)
    vectors = torch.randn((4, 1, width), generator=rng)
    expected, expected_scales = both_write(vectors, None, kv, scales, [2, 2, -1, 1], [3, 4, 5, 15])
    assert same(kv, expected)
    assert expected_scales is None or same(scales, expected_scales)  # type: ignore[arg-type]


def test_slots_outside_the_pool_are_skipped() -> None:
    kv = torch.zeros((2, 1, 2, 16, 64), device=DEVICE)
    k = torch.ones((5, 1, 64), device=DEVICE)
    ids, slots = torch.tensor([-1, 2, 0, 0, 1]), torch.tensor([0, 0, 16, -1, 3])
    ops.write_kv(k, k, kv, None, ids.to(DEVICE), slots.to(DEVICE))
    assert kv.sum().item() == 2 * 64
    assert (kv[1, :, :, 3] == 1).all()


@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), [(torch.float32, 64, 16), (torch.bfloat16, 80, 48)])
def test_quantized_write(stored: torch.dtype, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    """A prompt over two blocks, then tokens one by one, quiet ones and loud ones, into a pool full of old bytes."""
    rng, kv_heads = generator(), 2
    size = kv_quantization.slice_bytes(kv_heads, block_size, head_dim)
    slices = torch.full((3, size), 0x7F, dtype=torch.uint8, device=DEVICE)
    kv, scales = kv_quantization.views(slices, stored, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim)
    slots = [(2, i) for i in range(block_size - 6, block_size)] + [(0, i) for i in range(5)]
    at = 0
    for count, loudness in ((8, 1.0), (1, 0.5), (1, 7.0), (1, 1e-3)):
        k, v = loudness * torch.randn((2, count, kv_heads, head_dim), generator=rng).to(dtype)
        ids, offsets = zip(*slots[at : at + count], strict=True)
        expected, expected_scales = both_write(k, v, kv, scales, list(ids), list(offsets))
        at += count
        assert expected_scales is not None
        assert same(scales, expected_scales)
        assert same(kv, expected)
    assert (slices[1] == 0x7F).all()


def test_zeros_are_stored_as_zeros() -> None:
    slices = torch.full((1, 2 * 16 * (64 + 4)), 0x7F, dtype=torch.uint8, device=DEVICE)
    kv, scales = kv_quantization.views(slices, torch.int8, kv_heads=1, block_size=16, head_dim=64)
    k = torch.zeros((2, 1, 64))
    both_write(k, k, kv, scales, [0, 0], [0, 1])
    assert not kv[:, :, :, :2].any()
    assert not scales[..., :2].any()


def test_float8_codes_are_torchs() -> None:
    """Every finite code, and what lies half way between two: rounded as torch rounds."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((codes, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([448.0, -448.0])))
    near = near[near.abs() <= 448]
    count = -(-near.numel() // 63)
    values = torch.full((count, 63), 448.0)
    values.view(-1)[: near.numel()] = near
    k = torch.cat((values, torch.full((count, 1), 448.0)), 1).view(count, 1, 64)  # each token's scale is 1
    kv = torch.zeros((1, 1, 2, 32, 64), dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros((1, 1, 2, 32), device=DEVICE)
    expected, _ = both_write(k, k, kv, scales, [0] * count, list(range(count)))
    assert same(kv, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_copy_blocks(dtype: torch.dtype) -> None:
    rng = generator()
    size = 2 * 2 * 16 * 40 + 3  # bfloat16's blocks begin at odd multiples of two bytes
    pool = torch.randint(0, 100, (3, 7, size), generator=rng).to(dtype).to(DEVICE)
    source, target = torch.tensor([1, 5, 5]), torch.tensor([2, 0, 6])
    expected = pool.clone()
    reference.copy_blocks(expected, source.to(DEVICE), target.to(DEVICE))
    ops.copy_blocks(pool, source.to(DEVICE), target.to(DEVICE))
    assert same(pool, expected)
    ops.copy_blocks(pool, torch.tensor([1, -1, 7]).to(DEVICE), torch.tensor([-1, 2, 3]).to(DEVICE))
    assert same(pool, expected), "blocks outside the pool are skipped"


def test_copy_of_more_than_a_chunk_and_of_strided_layers() -> None:
    rng = generator()
    whole = torch.randint(0, 100, (2, 4, 3, 5000), generator=rng, dtype=torch.int32).to(DEVICE)
    pool = whole[:, :3]
    expected = whole.clone()
    expected[:, 2] = expected[:, 0]
    ops.copy_blocks(pool, torch.tensor([0]).to(DEVICE), torch.tensor([2]).to(DEVICE))
    assert same(whole, expected)


def test_nothing_to_do() -> None:
    kv = torch.ones((1, 1, 2, 16, 64), device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    ops.write_kv(kv[:0, 0, 0, :1], kv[:0, 0, 0, :1], kv, None, none, none)
    ops.copy_blocks(kv[None], none, none)
    assert (kv == 1).all()
