"""Random pools, batches and expectations for the cases of this folder: fresh at every run, from printed seeds."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.kind import PLAIN, AttentionKind
from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.cases import LAST_TOKEN, TOLERANCE

DEVICE = os.environ.get("MOONPOOL_TRITON_DEVICE", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOWLY = pytest.mark.slow if os.environ.get("TRITON_INTERPRET") == "1" else ()
"""Of what a GPU does in a moment and the interpreter in many seconds."""


def slowly(*cases: tuple[Any, ...]) -> list[Any]:
    """Parameters of cases that are slow in the interpreter."""
    return [pytest.param(*case, marks=SLOWLY) for case in cases]


def generator(seed: int | None = None) -> torch.Generator:
    """A generator whose seed is printed: that of the test's name, or others with MOONPOOL_SEED."""
    if seed is None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].partition(" ")[0]
        seed = zlib.crc32(f"{os.environ.get('MOONPOOL_SEED', '')} {test}".encode())
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """A batch and the pool behind it: slots, table entries and scales that nothing may use are poisoned."""

    q: Tensor
    kv: Tensor
    scales: Tensor | None
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    exact: Tensor  # the pool's numbers in float64
    scale: float
    kind: AttentionKind = PLAIN
    rest: int = 0  # elements of a latent vector behind its value

    def empty(self) -> Tensor:
        return torch.full((*self.q.shape[:2], self.q.shape[2] - self.rest), torch.nan).to(self.q)

    def prefill(self, **keywords: Any) -> Tensor:
        out = self.empty()
        ops.prefill_attention(
            self.q, self.kv, self.scales, self.tables, self.starts, self.lengths, self.scale, out,
            kind=self.kind, **keywords,
        )  # fmt: skip
        return out

    def decode(self, **keywords: Any) -> Tensor:
        out = self.empty()
        ops.decode_attention(
            self.q, self.kv, self.scales, self.tables, self.lengths, self.scale, out, kind=self.kind, **keywords
        )
        return out

    def expected(self) -> Tensor:
        out = self.empty().double().cpu()
        reference.prefill_attention(
            self.q.double().cpu(), self.exact, None, self.tables.cpu(), self.starts.cpu(), self.lengths.cpu(),
            self.scale, out, kind=self.on_the_host(),
        )  # fmt: skip
        return out

    def on_the_host(self) -> AttentionKind:
        sinks = self.kind.sinks
        return self.kind if sinks is None else replace(self.kind, sinks=sinks.double().cpu())

    def check(self, out: Tensor) -> None:
        exact, limit = self.expected(), TOLERANCE[self.q.dtype]
        size = exact.square().mean(-1, keepdim=True).sqrt()
        error = ((out.double().cpu() - exact).abs() / size).max().item()
        print(f"error {error:.2e} of a row's size, at most {limit:.0e}")
        assert error <= limit, "out of tolerance"  # also false for NaN


def make(
    sequences: list[tuple[int, int]],  # (query rows, tokens in all) of each
    *,
    dtype: torch.dtype = torch.float16,
    stored: torch.dtype | None = None,  # int8 or float8_e4m3fn
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    block_size: int = 16,
    seed: int | None = None,
    spare: int = 3,
    stride: int = 0,  # elements between blocks beyond their size
    rest: int = 0,  # there is one plane, of latent vectors with so many elements behind their value
) -> Case:
    """Scatter random sequences over a poisoned pool."""
    rng = generator(seed)
    used = [-(-total // block_size) for _, total in sequences]
    blocks = sum(used) + spare
    free = torch.randperm(blocks, generator=rng).tolist()
    tables = torch.full((len(sequences), max(used) + 1), 2**30, dtype=torch.int32)
    planes = 1 if rest else 2
    exact = torch.full((blocks, kv_heads, planes, block_size, head_dim), torch.nan, dtype=torch.float64)
    scales = None
    if stored is not None:
        scales = torch.full((blocks, kv_heads, planes, block_size), torch.nan)
    kv = torch.full(exact.shape, torch.nan, dtype=dtype) if stored is None else _poison(exact.shape, stored)
    for s, (_, total) in enumerate(sequences):
        for j in range(used[s]):
            block = free.pop()
            tables[s, j] = block
            n = min(block_size, total - j * block_size)
            values = torch.randn((kv_heads, planes, n, head_dim), generator=rng)
            if j == used[s] - 1:
                values[:, -1, -1] *= LAST_TOKEN
            if scales is None:
                kv[block, :, :, :n] = values.to(dtype)
                exact[block, :, :, :n] = kv[block, :, :, :n].double()
            else:
                factor = torch.rand((kv_heads, planes, n), generator=rng) * 0.01 + 0.002
                scales[block, :, :, :n] = factor if stored == torch.int8 else factor * 0.3
                factor = scales[block, :, :, :n, None]
                codes = reference.to_stored(values / factor, kv.dtype)
                kv[block, :, :, :n] = codes
                exact[block, :, :, :n] = codes.double() * factor.double()
    counts = torch.tensor([0] + [count for count, _ in sequences])
    q = torch.randn((int(counts.sum()), kv_heads * group, head_dim), generator=rng).to(dtype)
    if stride:
        wide = torch.zeros((blocks, exact[0].numel() + stride), dtype=kv.dtype)
        spread = wide[:, : exact[0].numel()].view(exact.shape)
        spread.copy_(kv)
        kv = spread
    return Case(
        q.to(DEVICE), kv.to(DEVICE) if DEVICE == "cpu" or not stride else _to_device(kv),
        None if scales is None else scales.to(DEVICE), tables.to(DEVICE), counts.cumsum(0).int().to(DEVICE),
        torch.tensor([total for _, total in sequences], dtype=torch.int32).to(DEVICE), exact, head_dim**-0.5, rest=rest,
    )  # fmt: skip


def _poison(shape: torch.Size, stored: torch.dtype) -> Tensor:
    """A pool of the largest codes: float8's NaN, int8's 127."""
    return torch.full(shape, 0x7F, dtype=torch.uint8).view(stored)


def _to_device(kv: Tensor) -> Tensor:
    """Move a pool and keep the distance of its blocks."""
    moved = torch.empty_strided(kv.shape, kv.stride(), dtype=kv.dtype, device=DEVICE)
    return moved.copy_(kv)
