"""Pictures whose tokens attend to each other both ways (`DecoderSpec.whole_pictures`): rows of a step, and attention.

A picture's KV depends on all its tokens. So a chunk that ends within a picture also computes the rest of the picture,
whose KV goes to no block: the chunk behind computes the rest again. A chunk may begin within a picture: what the pool
has of the picture was computed with the whole picture, and its key has the picture's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moonpool.base.kv.media import overlapping
from moonpool.base.scheduling.steps import SequenceStep
from moonpool.engine.kernels.attention import write_kv
from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.reference import dequantize

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class PictureRows:
    """A picture's rows of a step.

    Attributes:
        sequence: number of the sequence in the batch.
        begin: position of the first row.
        rows: number of rows of the sequence, whose KV is in the pool.
        first: the first of these, in the batch.
        beside: the same of the rows behind, which no block keeps.
        beside_first: the first of these.
    """

    sequence: int
    begin: int
    rows: int
    first: int
    beside: int = 0
    beside_first: int = 0

    @property
    def stored(self) -> int:
        """Position behind the last row whose KV is in the pool."""
        return self.begin + self.rows

    def index(self, device: torch.device) -> Tensor:
        """All rows in the batch, in order, int64."""
        parts = [range(self.first, self.first + self.rows)]
        parts.append(range(self.beside_first, self.beside_first + self.beside))
        return torch.tensor([row for part in parts for row in part], device=device)


def with_rests(sequences: Sequence[SequenceStep], block_size: int) -> tuple[list[SequenceStep], list[PictureRows]]:
    """Return a step's sequences, behind them the rests of pictures within which chunks end; and all pictures' rows."""
    rests, found = list[SequenceStep](), list[PictureRows]()
    first, behind = 0, sum(len(sequence.token_ids) for sequence in sequences) // _TOKEN_BYTES
    for number, sequence in enumerate(sequences):
        count = len(sequence.token_ids) // _TOKEN_BYTES
        end = sequence.start + count
        for item in overlapping(sequence.media, sequence.start, end):
            begin, last = max(item.begin, sequence.start), min(item.end, end)
            rows = PictureRows(number, begin, last - begin, first + begin - sequence.start)
            if item.end > end:
                rows = replace(rows, beside=item.end - end, beside_first=behind)
                behind += rows.beside
                # The tables are as long as they must be; what they lead to is attended by nobody.
                table = sequence.block_table[:1] * -(-item.end // block_size)
                tokens = sequence.token_ids[-_TOKEN_BYTES:] * rows.beside
                rests.append(SequenceStep(tokens, end, table, full_hit=True, lora=sequence.lora, media=(item,)))
            found.append(rows)
        first += count
    return [*sequences, *rests], found


def attend_both_ways(
    pictures: Sequence[PictureRows],
    q: Tensor,
    stored: tuple[Tensor, Tensor | None],
    kv: Tensor,
    scales: Tensor | None,
    tables: Tensor,
    scale: float,
    kind: AttentionKind,
    out: Tensor,
) -> None:
    """Write the attention of pictures' rows to `out` [T, heads, head_dim], one picture after the other.

    Args:
        pictures: the step's.
        q: queries of all rows, [T, heads, head_dim].
        stored: keys and values of all rows, [T, kv_heads, head_dim]; those that blocks keep are in `kv`.
        kv: as `paged_attention` has it.
        scales: the same.
        tables: [S, max_blocks] int32.
        scale: factor on scores.
        kind: the layer's window and soft cap.
        out: changed.
    """
    assert not kind.chunked, "no family has such layers and whole pictures"
    assert kind.sinks is None
    size, share = kv.shape[3], q.shape[1] // kv.shape[1]
    for rows in pictures:
        first = 0 if kind.window is None else max(0, rows.begin - kind.window + 1)
        begins = first // size
        used = tables[rows.sequence, begins : -(-rows.stored // size)].long()
        seen = slice(first - begins * size, rows.stored - begins * size)
        planes = [_wide(kv[used], None if scales is None else scales[used])[:, :, seen]]
        if rows.beside:
            planes.append(_beside(rows, stored, kv, scales))
        keys, values = torch.cat(planes, 2)
        index = rows.index(q.device)
        hidden = None
        if kind.window is not None:
            at = torch.arange(first, first + keys.shape[1], device=q.device)
            hidden = at <= torch.arange(rows.begin, rows.begin + len(index), device=q.device)[:, None] - kind.window
            hidden = hidden.repeat_interleave(share, 0)
        for head in range(kv.shape[1]):
            queries = q[index, head * share : (head + 1) * share].float().flatten(0, 1)
            scores = kind.capped((queries @ keys[head].T).mul_(scale))
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            result = (torch.softmax(scores, 1) @ values[head]).view(len(index), share, -1)
            out[index, head * share : (head + 1) * share] = result.to(out.dtype)


def _beside(rows: PictureRows, stored: tuple[Tensor, Tensor | None], kv: Tensor, scales: Tensor | None) -> Tensor:
    """Return what the pool would give for rows that no block keeps, [planes, kv_heads, n, head_dim] float32."""
    own = slice(rows.beside_first, rows.beside_first + rows.beside)
    keys, values = stored
    shape = (1, *kv.shape[1:3], rows.beside, kv.shape[4])
    block = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    block_scales = None if scales is None else torch.empty(shape[:4], dtype=scales.dtype, device=kv.device)
    at = torch.arange(rows.beside, device=kv.device)
    write_kv(keys[own], None if values is None else values[own], block, torch.zeros_like(at), at, scales=block_scales)
    return _wide(block, block_scales)


def _wide(blocks: Tensor, scales: Tensor | None) -> Tensor:
    """Return blocks [n, kv_heads, planes, size, head_dim] as [planes, kv_heads, tokens, head_dim] in float32."""
    wide = dequantize(blocks, scales, torch.float32)
    return wide.permute(2, 1, 0, 3, 4).reshape(wide.shape[2], wide.shape[1], -1, wide.shape[4])
