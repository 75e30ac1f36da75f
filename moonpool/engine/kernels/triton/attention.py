"""Launches of paged attention: which tiles, how many programs, whether to split. `kernels.reference` has the contract.

Grids and memory for partial results follow from shapes alone, never from the contents of lengths and tables. So no
launch waits for the device, and a launch can be captured in a CUDA graph and replayed with other contents (after one
call outside, which compiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.kernels.triton import device as code
from moonpool.engine.kernels.triton.tiles import JOINED_AHEAD, join_shape, limits_of, padded
from moonpool.engine.kernels.triton.variants import MANY, PART, ROW_EACH, SINGLES, AttentionShape

_STORED = {torch.int8: code.INT8, torch.float8_e4m3fn: code.FLOAT8}
_UNIT = 16  # elements: the widest distance between blocks that the compiler can make use of


class Kind(Protocol):
    """What attention has beside softmax(q k^T * scale) v: see `moonpool.engine.kernels.kind.AttentionKind`."""

    @property
    def window(self) -> int | None: ...
    @property
    def soft_cap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...
    @property
    def chunked(self) -> bool: ...


def _windowed(kind: Kind | None) -> int:
    if kind is None or kind.window is None:
        return 0
    return code.CHUNKED if kind.chunked else code.SLIDING


def decode_attention(
    q: Tensor,  # [S, heads, D], rows dense, stride(0) free
    kv: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,  # [S, max_blocks] int32
    context_lens: Tensor,  # [S] int32
    scale: float,
    out: Tensor,  # [S, heads, D or fewer], rows dense, stride(0) free
    *,
    kind: Kind | None = None,
    max_context: int | None = None,
    deterministic: bool = False,
) -> None:
    """Write softmax(q k^T * scale) v for one query row per sequence to `out`; zero for a sequence without context.

    `max_context`, where the caller knows one below the table's width, is the most tokens that any sequence has (also in
    replays), and shapes a split's parts. `deterministic`: a row's bits depend only on the row's own sequence, and equal
    `prefill_attention`'s.
    """
    call = _Call(q, kv, scales, block_tables, None, context_lens, scale, out, kind, max_context, deterministic)
    call.launch(ROW_EACH)


def prefill_attention(
    q: Tensor,  # [T, heads, D], rows dense, stride(0) free
    kv: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,  # [S, max_blocks] int32
    query_start: Tensor,  # [S + 1] int32, from 0 to T
    context_lens: Tensor,  # [S] int32
    scale: float,
    out: Tensor,  # [T, heads, D or fewer], rows dense, stride(0) free
    *,
    kind: Kind | None = None,
    max_context: int | None = None,
    singles: int | None = None,
    deterministic: bool = False,
) -> None:
    """Write the causal attention of every query row to `out`; zero for a row that sees no key.

    Sequences with one row are done in a separate, fitting launch. `singles`, if the caller knows the number, is
    their number (also in replays): an empty launch is spared. Otherwise keywords are those of `decode_attention`.
    """
    call = _Call(q, kv, scales, block_tables, query_start, context_lens, scale, out, kind, max_context, deterministic)
    sequences, tokens = context_lens.shape[0], q.shape[0]
    if singles is None:
        singles = int(tokens == 1) if sequences == 1 else -1
    if singles != 0:
        call.launch(SINGLES)
    if singles < tokens:
        call.launch(MANY, others=max(singles, 0))


def chosen_attention(
    q: Tensor,  # [R, heads, D], rows dense, stride(0) free
    kv: Tensor,  # [blocks, 1, 1, block_size, D]: latent vectors
    scales: Tensor | None,
    places: Tensor,  # [R, most] int32: block * block_size + slot of each key that a row sees
    numbers: Tensor,  # [R] int32: how many a row sees, the first of its places
    scale: float,
    out: Tensor,  # [R, heads, fewer than D], rows dense, stride(0) free
    *,
    deterministic: bool = False,
) -> None:
    """Write softmax(q k^T * scale) v for rows that see keys anywhere in the pool; keywords as of `decode_attention`."""
    call = _Call(q, kv, scales, places, None, numbers, scale, out, None, None, deterministic, by_place=True)
    call.launch(ROW_EACH)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's arguments."""

    q: Tensor
    kv: Tensor
    scales: Tensor | None
    tables: Tensor
    starts: Tensor | None
    lengths: Tensor
    scale: float
    out: Tensor
    kind: Kind | None
    max_context: int | None
    deterministic: bool
    by_place: bool = False
    """Whether tables have tokens' places in place of blocks."""

    def launch(self, which: int, others: int = 0) -> None:
        """Run the kernel over the sequences that `which` names, and join the parts after a split.

        `others`: at least this many sequences, with one row each, are not among them.
        """
        tokens, heads, head_dim = self.q.shape
        _, kv_heads, planes, block_size, _ = self.kv.shape
        sequences, value_dim = self.lengths.shape[0], self.out.shape[2]
        rest = head_dim - value_dim
        assert planes == (1 if rest else 2), "a latent vector has elements behind its value"
        if not tokens or not sequences:
            return
        assert self.tables.stride(1) == 1, "entries of a sequence's table stand side by side"
        limits = limits_of(self.q.device)
        entry = 1 if self.by_place else block_size
        width = self.tables.shape[1] * entry
        longest = max(1, width if self.max_context is None else min(width, self.max_context))
        heads_of = AttentionShape(
            self.q.dtype, self.kv.dtype, heads, kv_heads, head_dim, self.deterministic, limits, rest
        )
        group, groups = heads_of.group, heads_of.groups
        cut = heads_of.launch(which, tokens, sequences, longest, others)
        tile, tiles, parts = cut.tile, cut.tiles, cut.parts
        used = cut.tokens * group
        partial = (tiles, groups, parts, used) if cut.split == PART else (0,)
        results = torch.empty((*partial, value_dim), dtype=torch.float32, device=self.q.device)
        stats = torch.empty((*partial, 2), dtype=torch.float32, device=self.q.device)
        stored = code.PLAIN if self.scales is None else _STORED[self.kv.dtype]
        cap, window, sinks = (self.kind.soft_cap, self.kind.window, self.kind.sinks) if self.kind else (None,) * 3
        unit = math.gcd(self.kv.stride(0), _UNIT)
        # No fusion of multiplications into additions but those that are spelt out: equal code must round alike.
        dim = max(padded(value_dim), 16)
        shape = {"GROUP": group, "TOKENS": cut.tokens, "WHICH": which, "enable_fp_fusion": False}
        plane = 0 if rest else self.kv.stride(2)
        scale_plane = 0 if rest or self.scales is None else self.scales.stride(2)
        code.attention[tiles, groups, parts](
            self.q, self.kv.view(torch.uint8) if stored == code.FLOAT8 else self.kv, self.scales,
            self.tables, self.starts, self.lengths, sinks, self.out, results, stats,
            (self.scale if cap is None else cap) * math.log2(math.e), self.scale / (cap or 1.0), window or 0,
            sequences, self.q.stride(0), self.out.stride(0), self.kv.stride(0) // unit, self.tables.stride(0),
            0 if self.scales is None else self.scales.stride(0), cut.keys,
            **shape, HEAD_DIM=head_dim, PLANE=plane, SCALE_PLANE=scale_plane, PADDED_DIM=dim,
            REST=rest, PADDED_REST=rest and max(padded(rest), 16),
            BLOCK_SIZE=block_size, ROWS=tile.rows, KEYS=tile.keys, UNIT=unit, KV=stored,
            NATIVE=limits.float8, SPLIT=cut.split, PRECISION="ieee",
            CAPPED=cap is not None, WINDOWED=_windowed(self.kind), ENTRY=entry,
            WIDE=code.INTERPRETED and self.q.dtype == torch.bfloat16, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if cut.split == PART:
            warps, width = join_shape(padded(used), dim)
            code.join_parts[tiles, groups, dim // width](
                self.starts, self.lengths, sinks, self.out, results, stats,
                sequences, self.out.stride(0), cut.keys, parts, **shape, HEAD_DIM=value_dim,
                ROWS=padded(used), WIDTH=width, AHEAD=JOINED_AHEAD, num_warps=warps,
            )  # fmt: skip
