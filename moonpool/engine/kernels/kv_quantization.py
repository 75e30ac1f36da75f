"""Typed views of a quantised KV pool: one-byte values, with their scales behind each plane.

A slice is [kv_heads, planes] runs of bytes: [block_size, head_dim] values, then [block_size] float32 scales. So
some heads of a slice are one run of bytes with their scales. Planes are K and V, or one plane with latent vectors. A
number is the stored value (int8, or float8_e4m3fn) times the token's scale for this head and plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_SCALE_BYTES = 4


def slice_bytes(kv_heads: int, block_size: int, head_dim: int, planes: int = 2) -> int:
    """Return the bytes of one layer slice."""
    return kv_heads * planes * block_size * (head_dim + _SCALE_BYTES)


def views(
    slices: Tensor, dtype: torch.dtype, *, kv_heads: int, block_size: int, head_dim: int, planes: int = 2
) -> tuple[Tensor, Tensor]:
    """Return (values, scales) over the same memory as `slices`, uint8 [..., blocks, slice_bytes].

    Values are [..., blocks, kv_heads, planes, block_size, head_dim], scales float32 without the last dimension.
    Slices are dense.

    Raises:
        ValueError: `slices` or `dtype` does not fit; the message begins with the name.
    """
    size = slice_bytes(kv_heads, block_size, head_dim, planes)
    values = block_size * head_dim
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, not {dtype}")
    if slices.dtype != torch.uint8 or slices.dim() < 2 or slices.shape[-1] != size:
        raise ValueError(
            f"slices: must be [..., blocks, {size}] in torch.uint8, not {list(slices.shape)} in {slices.dtype}"
        )
    if slices.stride(-1) != 1 or any(stride % 4 for stride in slices.stride()[:-1]) or values % 4:
        raise ValueError("slices: a slice must be dense and begin at a multiple of 4 bytes")
    runs = slices.view(*slices.shape[:-1], kv_heads, planes, -1)
    numbers = runs[..., :values].view(*runs.shape[:-1], block_size, head_dim).view(dtype)
    return numbers, runs[..., values:].view(torch.float32)
