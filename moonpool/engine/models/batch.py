"""One step's sequences as packed tensors: any mix of prompt chunks and decode steps, without padding.

Also which rows the last layer is computed for: only rows with wanted logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.base.errors import InvalidRequest
from moonpool.engine.kernels.plan import AttentionPlan
from moonpool.engine.kernels.to_device import send_to_device, send_together

LayersKV = Tensor | Sequence[Tensor]
"""A stage's KV, by layer [blocks, kv_heads, planes, block_size, head_dim]: one tensor for equal layers, else a tensor
for each.
"""
LayersScales = Tensor | Sequence[Tensor | None]
"""Of quantised KV, alike, by layer [blocks, kv_heads, planes, block_size] float32."""


@dataclass(slots=True)
class PackedBatch:
    """S sequences' tokens, one after the other: T rows in all.

    A sequence that starts at position p with n tokens attends to the first p + n tokens; the first p tokens' KV is in
    the pool already, in the sequence's blocks.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [S + 1] int32: rows of sequence s are query_start[s] .. query_start[s + 1]
    context_lens: Tensor  # [S] int32: tokens with KV after this step
    block_tables: Tensor  # [S, max_blocks] int32, padded with 0
    block_ids: Tensor  # [T] int64: the block for each row's KV; -1: already there
    offsets: Tensor  # [T] int64: and the token slot inside
    last_rows: Tensor  # [S] int64: each sequence's last row, whose logits choose the next token
    block_size: int
    # As `block_tables` and `block_ids`, of layers with a window or a recurrent state: by window slots if the pool has
    # such, else the same tensors. A block without slot is 0 in tables, where no row sees it, and -1 in ids.
    slot_tables: Tensor
    slot_ids: Tensor
    most_context: int | None = None
    """Set if the contents change between two uses, as in a captured graph: contexts have at most this many tokens. In
    a batch with as many rows as sequences, every sequence has one.
    """
    # On a CPU, the same memory as numpy arrays, whose small operations take a tenth of torch's time; and `capacity`,
    # [S] int64: tokens that each sequence's table holds.
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    room: int = 0  # steps that the tables have room for, this one included; 0: not looked at yet
    within: int = 0  # further steps in which no sequence begins a block
    slot_of: NDArray[np.int64] | None = None  # each block's window slot; None: the pool has no such slots
    loras: BatchLoras | None = None  # the rows' LoRA adapters; None: no row has one
    # M-RoPE behind pictures: what rows are turned by, [T], or [3, T] by time, row and column; None: `positions`. And
    # how far this is behind `positions` for each sequence's tokens to come, [S]. Both int64.
    rope_positions: Tensor | None = None
    rope_shifts: Tensor | None = None
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # by layer: rows, and what is added behind it
    pictures: Sequence[Any] = ()  # `moonpool.engine.models.whole_pictures.PictureRows`, where tokens attend both ways
    # What a stage's layers compute once per batch:
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    query_factors: dict[int, Tensor | None] = field(default_factory=dict)  # by rope
    plans: dict[Any, AttentionPlan] = field(default_factory=dict)
    per_layer: Tensor | None = None  # [T, layers, n], tokens' embeddings for each layer
    normed: Tensor | None = None  # [T, hidden], what the part of a layer reads beside which the next one's stands
    narrow: Tensor | None = None  # [T, q_rank], the queries' latent vectors of an indexer and the attention behind
    chosen: Any = None  # `moonpool.engine.kernels.sparse.ChosenKeys` of the last indexer; None: rows see all keys
    spans: Any = None  # of recurrent layers: `moonpool.engine.models.recurrent.state_spans`
    source: PackedBatch | None = None  # the batch on the host that this is a copy of; None: this is no copy

    @property
    def host(self) -> PackedBatch:
        """The same batch on the host: looking at a tensor of a device would wait for the device."""
        return self if self.source is None else self.source

    @property
    def num_tokens(self) -> int:
        """T, the number of rows."""
        return self.token_ids.shape[0]

    def last_of(self, hidden: Tensor, sequences: Sequence[int]) -> Tensor:
        """Return the rows of `hidden` [T, n] that are the sequences' last, [R, n]."""
        return hidden.index_select(0, send_to_device(self.host.last_rows[list(sequences)], hidden.device))

    @classmethod
    def build(
        cls,
        sequences: Sequence[tuple[bytes, int, Sequence[int]]],
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        full_hits: Collection[int] = (),
        slot_of: NDArray[np.int64] | None = None,
    ) -> PackedBatch:
        """Pack `sequences`, each (token ids as little-endian int32, position of the first, block table).

        Those at the indices `full_hits` have all tokens' KV: the KV is read, and none is written. `slot_of`: see
        `KVMemory.slot_of`.

        Raises:
            InvalidRequest: no sequence, a sequence without tokens, or a block table too short for its tokens; names
                which.
        """
        if not sequences:
            raise InvalidRequest("sequences", "a batch needs at least one")
        starts: list[int] = []
        counts: list[int] = []
        tables: list[Sequence[int]] = []
        for i, (tokens, start, table) in enumerate(sequences):
            count = len(tokens) // 4
            if not count or len(tokens) % 4 or start < 0:
                raise InvalidRequest(f"sequences[{i}]", f"{len(tokens)} bytes of tokens from position {start}")
            if len(table) * block_size < start + count:
                raise _too_short(i, start + count, len(table), block_size)
            starts.append(start)
            counts.append(count)
            tables.append(table)
        batch = cls(**_packed(b"".join(item[0] for item in sequences), starts, counts, tables, block_size, slot_of))
        for index in full_hits:
            begin, end = batch.query_start[index : index + 2].tolist()
            batch.block_ids[begin:end] = batch.slot_ids[begin:end] = -1
        return batch if torch.device(device).type == "cpu" else batch.to(device)

    def after(self, tokens: Sequence[int]) -> PackedBatch:
        """Return the batch for the same sequences' next step, on a CPU: each has one of `tokens` more.

        A batch with one token each is changed in place and returned.

        Raises:
            InvalidRequest: a block table is too short; names which.
        """
        if self.num_tokens != len(self.context_lens):
            return self._packed_anew(tokens)
        arrays, size = self.arrays, self.block_size
        positions, tables = arrays["positions"], arrays["block_tables"]
        positions += 1
        self.room = (self.room or int((arrays["capacity"] - positions).min()) + 1) - 1
        if not self.room:
            short = int((arrays["capacity"] - positions).argmin())
            raise _too_short(short, int(positions[short]) + 1, int(arrays["capacity"][short]) // size, size)
        arrays["token_ids"][:] = tokens
        arrays["context_lens"] += 1
        if self.within:  # mostly: behind a step caches are cold, so each kind of operation costs time
            arrays["offsets"] += 1
            self.within -= 1
        else:
            np.remainder(positions, size, out=arrays["offsets"])
            arrays["block_ids"][:] = tables[np.arange(len(tables)), positions // size]
            if self.slot_of is not None:
                arrays["slot_ids"][:] = self.slot_of[arrays["block_ids"]]
            self.within = size - 1 - int(arrays["offsets"].max())
        self.angles.clear()
        self.query_factors.clear()
        self.added, self.pictures = [], ()
        if self.rope_shifts is not None:
            self.rope_positions = self.positions + self.rope_shifts
        self.spans = None
        for plan in self.plans.values():
            plan.go_on(tables if plan.window is None else arrays["slot_tables"])
        return self

    def without_slots(self) -> PackedBatch:
        """Return the batch as a layer sees it whose KV is kept in all blocks; attention is planned anew."""
        return replace(self, slot_tables=self.block_tables, slot_ids=self.block_ids, plans={})

    def filled(self) -> list[int]:
        """Return the blocks that the step fills, for a batch with one token per sequence."""
        if self.within:
            return []
        filled: list[int] = self.arrays["block_ids"][self.arrays["offsets"] == self.block_size - 1].tolist()
        return filled

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same batch on another device, by one copy for the stream that is set."""
        names = ["token_ids", "positions", "query_start", "context_lens", "block_tables", "block_ids", "offsets"]
        names += ["last_rows", *(("slot_tables", "slot_ids") if self.slot_of is not None else ())]
        turned = self.rope_positions is not None and self.rope_shifts is not None
        names += ["rope_positions", "rope_shifts"] if turned else []
        sent = send_together([getattr(self, name) for name in names], device)
        moved: dict[str, Any] = dict(zip(names, sent, strict=True))
        slots = {"slot_tables": moved["block_tables"], "slot_ids": moved["block_ids"]}
        batch = PackedBatch(**(slots | moved), block_size=self.block_size)
        batch.loras = None if self.loras is None else self.loras.to(self.query_start, device)
        batch.pictures, batch.source = self.pictures, self
        return batch

    def _packed_anew(self, tokens: Sequence[int]) -> PackedBatch:
        used = (self.arrays["capacity"] // self.block_size).tolist()
        tables = [row[:count] for row, count in zip(self.block_tables.tolist(), used, strict=True)]
        ids = [array("i", [token]).tobytes() for token in tokens]
        parts = list(zip(ids, self.context_lens.tolist(), tables, strict=True))
        batch = PackedBatch.build(parts, self.block_size, slot_of=self.slot_of)
        batch.loras = None if self.loras is None else self.loras.of_steps()
        if self.rope_shifts is not None:
            batch.rope_shifts, batch.rope_positions = self.rope_shifts, batch.positions + self.rope_shifts
        return batch


class BatchLoras:
    """The LoRA adapters of a batch's rows; on a device by slots, `moonpool.engine.models.lora_slots.SlotLoras`.

    Attributes:
        adapted: each adapter, a `moonpool.engine.models.lora.StageLora`, with its rows [n] int64; None: all rows.
        base: rows without an adapter; None: no row.
        layers: by index in the model, what the adapters make of a layer's weights.
        native: what native layers take, by the first of them (`moonpool.engine.models.native_step`).
    """

    rows: Tensor | None = None
    """Of adapters in slots: each row's slot, [T] int64; -1: no adapter."""

    def __init__(self, of: Sequence[Any], query_start: Sequence[int], device: torch.device | str) -> None:
        """Make the adapters of a batch on `device`.

        Args:
            of: each sequence's adapter; None: the base model alone. At least one has an adapter.
            query_start: as `PackedBatch.query_start`.
            device: where the batch is.
        """
        self._of = of
        found: dict[bytes, tuple[Any, list[int]]] = {}
        for lora, (begin, end) in zip(of, pairwise(query_start), strict=True):
            found.setdefault(lora.id if lora else b"", (lora, []))[1].extend(range(begin, end))
        rows = {
            key: None if len(found) == 1 else torch.tensor(numbers, device=device)
            for key, (_, numbers) in found.items()
        }
        self.base = rows.get(b"")
        self.adapted = [(lora, rows[key]) for key, (lora, _) in found.items() if lora is not None]
        self.layers: dict[int, Any] = {}
        self.native: dict[int, Any] = {}

    def of_steps(self) -> BatchLoras:
        """Return the adapters of a batch with one row for each sequence, on a CPU."""
        return BatchLoras(self._of, range(len(self._of) + 1), "cpu")

    def to(self, query_start: Tensor, device: torch.device | str) -> BatchLoras:
        """Return the same for the batch on another device."""
        return BatchLoras(self._of, query_start.tolist(), device)


def _too_short(index: int, tokens: int, blocks: int, block_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"sequences[{index}].block_table", f"{blocks} blocks of {block_size} tokens do not hold {tokens}"
    )


def _packed(
    tokens: bytes,
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    slot_of: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Return the fields of a batch."""
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    rows_of, ends = np.array(counts), np.cumsum(counts)
    sequence = np.repeat(np.arange(len(counts)), rows_of)
    positions = np.arange(ends[-1]) + np.repeat(np.array(starts) - (ends - rows_of), rows_of)
    arrays = {
        "token_ids": np.frombuffer(tokens, "<i4").astype(np.int64),
        "positions": positions,
        "query_start": np.concatenate(([0], ends)).astype(np.int32),
        "context_lens": (np.array(starts) + rows_of).astype(np.int32),
        "block_tables": padded,
        "block_ids": padded[sequence, positions // block_size].astype(np.int64),
        "offsets": positions % block_size,
        "last_rows": ends - 1,
    }
    arrays["slot_tables"], arrays["slot_ids"] = arrays["block_tables"], arrays["block_ids"]
    if slot_of is not None:
        arrays["slot_tables"] = np.maximum(slot_of[padded], 0).astype(np.int32)
        arrays["slot_ids"] = slot_of[arrays["block_ids"]]
    fields: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    capacity = np.array([len(table) for table in tables]) * block_size
    return {**fields, "block_size": block_size, "slot_of": slot_of, "arrays": {**arrays, "capacity": capacity}}


@dataclass(slots=True)
class LogitsRows:
    """The wanted rows, and what attention is given for them; see `moonpool.engine.kernels.plan.AttentionPlan`."""

    rows: Tensor  # [R] int64, rising
    single: Tensor  # [n, 4] int32: place in `rows`, 1, sequence, context; for sequences with one wanted row
    several: Tensor  # [n, 4] int32: first place in `rows`, how many, sequence, context; of the others


def logits_rows(batch: PackedBatch, last_rows: Sequence[int] | None) -> LogitsRows | None:
    """Return what the last layer computes; None for all rows.

    `last_rows`: for each sequence, how many last rows are wanted; None: all of all.
    """
    if last_rows is None or sum(last_rows) == batch.num_tokens:
        return None
    rows: list[int] = []
    items: list[tuple[int, int, int, int]] = []
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    for index, ((begin, end), count) in enumerate(zip(pairwise(starts), last_rows, strict=True)):
        assert 0 <= count <= end - begin
        if count:
            items.append((len(rows), count, index, contexts[index]))
            rows += range(end - count, end)
    return LogitsRows(
        torch.tensor(rows, dtype=torch.int64),
        _rows_table([item for item in items if item[1] == 1]),
        _rows_table([item for item in items if item[1] > 1]),
    )


def _rows_table(items: Sequence[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(items, dtype=torch.int32).view(-1, 4)
