"""How paged attention launches are cut, and which batches compile every kernel variant. Needs no Triton.

A variant is what Triton compiles once: a kernel's constants, warps and stages. Variants follow from the model, and from
three things that change from step to step: which sequences a launch is for, their tile, and what a program does about
the split. Other numbers that change are not specialised on (`moonpool.engine.kernels.triton.device`). The remaining
kernels have one variant each for a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from moonpool.engine.kernels.triton.tiles import EXACT_PART, SMALL_ROWS, Limits, Tile, latent_group, part_keys, tile_for

#: What a program does about the split along the keys: ignore it; take one part and write it out; take all, one by one.
WHOLE, PART, JOINED = 0, 1, 2

#: Which sequences a launch is for: row s is sequence s's only one; those with one row; those with other than one row.
ROW_EACH, SINGLES, MANY = 0, 1, 2
#: Keys of a context that tell a right result from a wrong one.
TELLING_KEYS = 100
Variant = tuple[int, Tile, int]
"""Which sequences, their tile, and the split."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How one launch is cut: programs in query tiles and key parts."""

    tile: Tile
    tokens: int  # of a tile
    tiles: int
    split: int  # WHOLE, PART or JOINED
    keys: int  # of a part
    parts: int  # that have programs of their own


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of `sequences` with `rows` rows each, the longest with `context` tokens."""

    sequences: int
    rows: int
    context: int

    @property
    def tokens(self) -> int:
        """Rows of all sequences."""
        return self.sequences * self.rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer's launches have in common: types of queries and pool, heads, and the device's limits.

    `rest`: elements of a latent vector behind those that are its value; 0: keys and values are two planes. All query
    heads read the one head of latent vectors.
    """

    dtype: torch.dtype
    stored: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    deterministic: bool
    limits: Limits
    rest: int = 0

    @property
    def group(self) -> int:
        """Query heads of a program."""
        if not self.rest:
            return self.heads // self.kv_heads
        return latent_group(self.heads, self.dtype, self.stored, self.limits, exact=self.deterministic)

    @property
    def groups(self) -> int:
        """Programs for the heads of a tile."""
        return self.heads // self.group

    def launch(self, which: int, tokens: int, sequences: int, longest: int, others: int = 0) -> LaunchShape:
        """Return how a launch over a batch is cut.

        Args:
            which: ROW_EACH, SINGLES or MANY.
            tokens: Query rows of the batch.
            sequences: Of the batch.
            longest: Tokens of context that any sequence may have.
            others: At least this many sequences, with one row each, are not the launch's.
        """
        return _launch(self, which, tokens, sequences, longest, others)

    def result_bytes(self, tokens: int, sequences: int, longest: int) -> int:
        """Return the memory for results of parts of the keys, in a step whose sequences may have any number of rows."""
        cuts = [self.launch(which, tokens, sequences, longest) for which in (SINGLES, MANY)]
        programs = (cut.tiles * cut.tokens * cut.parts if cut.split == PART else 0 for cut in cuts)
        return max(programs) * self.heads * (self.head_dim - self.rest + 2) * 4

    def variant(self, which: int, batch: BatchShape) -> Variant:
        """Return the variant that a launch takes."""
        shape = self.launch(which, batch.tokens, batch.sequences, batch.context)
        return which, shape.tile, shape.split

    def batches(self, tokens: int, longest: int) -> list[BatchShape]:
        """Return batches that take every variant; launches as of `prefill_attention`.

        Of each variant the cheapest whose sequences end within a tile, behind enough keys to tell a right result from a
        wrong one (`moonpool.engine.kernels.self_check`).

        Args:
            tokens: Most rows of a batch.
            longest: Most tokens of a sequence.
        """
        found: dict[Variant, BatchShape] = {}
        enough = EXACT_PART + 1 if self.deterministic else TELLING_KEYS

        def cost(batch: BatchShape) -> tuple[bool, int, int]:
            return batch.context < enough, batch.tokens * batch.context, batch.tokens

        candidates = sorted(_candidates(tokens, longest), key=cost)
        for batch in candidates:
            found.setdefault(self.variant(SINGLES if batch.rows == 1 else MANY, batch), batch)
        return list(dict.fromkeys(found.values()))


def _candidates(tokens: int, longest: int) -> Iterator[BatchShape]:
    for count in _sizes(tokens):
        for rows in _sizes(min(tokens // count, longest)):
            for context in sorted({*_sizes(longest), *(size - 3 for size in _sizes(longest))}):
                if rows <= context:
                    yield BatchShape(count, rows, context)


def _sizes(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


@lru_cache(maxsize=1024)  # all layers of a step ask for the same
def _launch(shape: AttentionShape, which: int, tokens: int, sequences: int, longest: int, others: int) -> LaunchShape:
    group = shape.group
    mode = _mode(shape.deterministic, which, tokens - others, sequences - others, group)
    tile = tile_for(mode, shape.dtype, shape.stored, shape.head_dim, group, shape.limits, shape.rest)
    per_tile = tile.rows // group if which == MANY else 1
    tiles = tokens // per_tile + sequences if which == MANY else sequences
    split, keys, parts = _split(shape, which, tiles * shape.groups, longest, tile)
    return LaunchShape(tile, per_tile, tiles, split, keys, parts)


def _mode(deterministic: bool, which: int, tokens: int, sequences: int, group: int) -> str:
    """Return the tile's name, by the mean number of rows."""
    if deterministic:
        return "exact"
    if which != MANY:
        return "decode"
    rows = -(-tokens // max(sequences, 1)) * group
    return "small" if rows <= SMALL_ROWS else "prefill"


def _split(shape: AttentionShape, which: int, programs: int, longest: int, tile: Tile) -> tuple[int, int, int]:
    """Return (what a program does about the split, keys per part, parts with separate programs)."""
    processors = shape.limits.processors
    if shape.deterministic:
        # The sums are the same either way; programs of their own only where the device has room for them.
        parts = -(-longest // EXACT_PART) if programs < 2 * processors else 1
        return (PART if parts > 1 else JOINED), EXACT_PART, parts
    if which == MANY and programs >= processors:
        return WHOLE, longest, 1  # results of so many rows would weigh more than what they balance
    keys = part_keys(programs, longest, processors, tile.keys)
    parts = -(-longest // keys)
    return (PART if parts > 1 else WHOLE), keys, parts
