"""Random batches over a paged pool, the exact attention of each, and how far a kernel may be from it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.kernels.attention import paged_attention
from moonpool.engine.kernels.kind import PLAIN, AttentionKind

MODES = ["reference", "torch", "native"]

#: Largest error of one number of a row, relative to the root mean square of the exact row. The exact row itself shrinks
#: as 1 / sqrt(context), so that the tolerance does, too. Measured: 3e-6, 2.4e-2 (weights rounded to bfloat16), 2.6e-3.
TOLERANCE = {torch.float32: 6e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}
#: The values of a sequence's last token are larger by this factor: its weight is about 1 / context, and a kernel that
#: forgets it must be farther off than the tolerance.
LAST_TOKEN = 6.0


@dataclass
class Case:
    """Arguments of one call, and the dense keys and values behind the pool."""

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    dense: list[Tensor]  # per sequence [2, context, kv_heads, head_dim]
    scale: float = 0.25
    kind: AttentionKind = PLAIN

    def run(self, **changed: Any) -> Tensor:
        names = ("q", "kv", "block_tables", "query_start", "context_lens", "scale", "kind")
        return paged_attention(**{name: getattr(self, name) for name in names} | changed)

    def exact(self) -> Tensor:
        """Causal attention in float64, one query row after the other: no kernel's code, no mask."""
        rows = []
        for s, (keys, values) in enumerate(both.double() for both in self.dense):
            begin, end = int(self.query_start[s]), int(self.query_start[s + 1])
            for row in range(begin, end):
                seen = keys.shape[0] - (end - 1 - row)
                q = self.q[row].double().view(keys.shape[1], -1, keys.shape[2])  # [kv_heads, group, head_dim]
                first = 0
                if self.kind.window is not None:
                    window = (seen - 1) % self.kind.window + 1 if self.kind.chunked else self.kind.window
                    first = max(0, seen - window)
                scores = torch.einsum("hgd,thd->hgt", q, keys[first:seen]) * self.scale
                if self.kind.soft_cap is not None:
                    scores = torch.tanh(scores / self.kind.soft_cap) * self.kind.soft_cap
                weights = scores.exp()
                total = weights.sum(-1, keepdim=True)
                if self.kind.sinks is not None:
                    total = total + self.kind.sinks.double().view(total.shape).exp()
                rows.append(torch.einsum("hgt,thd->hgd", weights / total, values[first:seen]).flatten(0, 1))
        return torch.stack(rows)

    def check(self, out: Tensor, times: float = 1.0) -> None:
        """Fails when a number of `out` is farther from the exact one than `times` the type's tolerance."""
        exact = self.exact()
        error = (out.double() - exact).abs() / exact.square().mean(-1, keepdim=True).sqrt()
        worst, limit = float(error.max()), times * TOLERANCE[self.q.dtype]
        assert worst <= limit, f"error {worst:.1e} of a row's size, at most {limit:.1e}"  # also false for NaN


def make(
    sequences: list[tuple[int, int]],  # (query rows, tokens in all) of each sequence
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Scatter random sequences over a pool whose other slots are NaN; table entries past the end are garbage."""
    generator = torch.Generator().manual_seed(5)
    used = [-(-total // block_size) for _, total in sequences]
    free = torch.randperm(sum(used) + 3, generator=generator).tolist()
    kv = torch.full((len(free), kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(sequences), max(used) + 1), 2**30, dtype=torch.int32)
    dense = []
    for s, (_, total) in enumerate(sequences):
        both = torch.randn((2, total, kv_heads, head_dim), generator=generator)
        both[1, -1] *= LAST_TOKEN
        both = both.to(dtype)
        for j in range(used[s]):
            block = tables[s, j] = free.pop()
            part = both[:, j * block_size : (j + 1) * block_size]
            kv[block, :, :, : part.shape[1]] = part.permute(2, 0, 1, 3)
        dense.append(both)
    counts = torch.tensor([0] + [count for count, _ in sequences])
    q = torch.randn((int(counts.sum()), heads, head_dim), generator=generator).to(dtype)
    lengths = torch.tensor([total for _, total in sequences], dtype=torch.int32)
    return Case(q, kv, tables, counts.cumsum(0).int(), lengths, dense)


BATCHES = {
    "prompt": [(40, 40)],
    "chunk": [(16, 48)],
    "decode": [(1, 1), (1, 16), (1, 17), (1, 100), (1, 31)],
    "decode, unsorted": [(1, 40), (1, 20), (1, 33), (1, 17)],
    "decode, equal": [(1, 20), (1, 20), (1, 20)],
    "mixed": [(1, 33), (20, 20), (1, 5), (7, 90), (1, 64), (150, 150)],
    "far apart": [(1, 3), (1, 400), (1, 4), (1, 350)],
}
