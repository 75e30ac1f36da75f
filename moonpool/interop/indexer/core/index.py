"""Which engine holds which blocks in which tier, by rolling hashes over tokens.

A block's hash is XXH3-64 as Mooncake's KV events and Dynamo have it: over the block's tokens for the first block, over
the hash before and the block's own hash for later ones. A salt goes in front of the first block. A LoRA adapter changes
the seed of the blocks' own hashes, as at Dynamo. Behind the tokens of a block in which pictures begin, the block's own
hash has their offsets and digests, as keys have them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from moonpool.base.kv.keys import BlockKey, tokens_to_bytes
from moonpool.base.kv.media import MediaItem, block_marks

HASH_SEED = 1337
"""The seed of Dynamo's hashes."""
HASH_BYTES = 8
NO_SALT = BlockKey(b"")
"""Root of chains without a salt."""
TIERS = ("GPU", "CPU", "DISK")
"""Where blocks are, nearest first; tier `n` is bit `1 << n` of a mask."""


class Scope(NamedTuple):
    """Blocks of different scopes have nothing in common."""

    model: str
    tenant: str
    block_size: int


class Holder(NamedTuple):
    """A data-parallel rank of an instance."""

    instance: str
    rank: int


def salt_root(salt: str) -> BlockKey:
    """Root of the chains with a salt."""
    return BlockKey(_hashed(salt.encode())) if salt else NO_SALT


def block_hashes(
    token_ids: Sequence[int], block_size: int, lora: str = "", media: Sequence[MediaItem] = ()
) -> list[bytes]:
    """Each full block's hash alone, computed by the LoRA adapter of this name ("" = by the base model)."""
    data, size, seed = memoryview(tokens_to_bytes(token_ids)), 4 * block_size, HASH_SEED
    if lora:
        seed = (seed + xxhash.xxh3_64_intdigest(lora.encode())) % (1 << 8 * HASH_BYTES)
    marks = block_marks(media, 0, len(token_ids), block_size)
    starts = enumerate(range(0, len(data) - size + 1, size))
    if not marks:
        return [_hashed(data[start : start + size], seed) for _, start in starts]
    return [_hashed(bytes(data[start : start + size]) + marks.get(index, b""), seed) for index, start in starts]


def rolling(parent: bytes, hashes: Iterable[bytes]) -> list[BlockKey]:
    """Rolling hashes behind a root or a block, from the blocks' own hashes."""
    found = list[BlockKey]()
    for block_hash in hashes:
        parent = _hashed(parent + block_hash) if parent else block_hash
        found.append(BlockKey(parent))
    return found


def sequence_keys(
    parent: bytes, token_ids: Sequence[int], block_size: int, lora: str = "", media: Sequence[MediaItem] = ()
) -> list[BlockKey]:
    """Rolling hashes of the full blocks behind a root or a block. `media`: pictures, by their places in `token_ids`."""
    return rolling(parent, block_hashes(token_ids, block_size, lora, media))


def number_of(key: bytes) -> int:
    """A hash as events and queries tell it."""
    return int.from_bytes(key, "little")


def key_of(number: int) -> BlockKey:
    """The hash of this number, which may be signed."""
    return BlockKey((number % (1 << 8 * HASH_BYTES)).to_bytes(HASH_BYTES, "little"))


def _hashed(data: bytes | memoryview, seed: int = HASH_SEED) -> bytes:
    return xxhash.xxh3_64_intdigest(data, seed).to_bytes(HASH_BYTES, "little")


@dataclass(slots=True)
class InstanceMatch:
    """Leading tokens of a chain that an instance holds.

    Attributes:
        longest: at any rank and tier.
        ranks: by rank, in any tier.
        tiers: by position in `TIERS`, at any rank.
    """

    longest: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    tiers: list[int] = field(default_factory=lambda: [0] * len(TIERS))


class TieredIndex:
    """Blocks of all instances."""

    def __init__(self) -> None:
        self._scopes: dict[Scope, dict[BlockKey, dict[Holder, int]]] = {}

    def __len__(self) -> int:
        """Blocks, each counted once for its scope."""
        return sum([len(blocks) for blocks in self._scopes.values()])

    def scopes(self, model: str, tenant: str, block_size: int | None) -> list[Scope]:
        """Scopes with blocks; `block_size` None = any."""
        return [
            scope for scope in self._scopes if scope[:2] == (model, tenant) and block_size in (None, scope.block_size)
        ]

    def add(self, scope: Scope, holder: Holder, tier: int, keys: Iterable[BlockKey]) -> None:
        """A holder has blocks in a tier."""
        blocks = self._scopes.setdefault(scope, {})
        for key in keys:
            holders = blocks.setdefault(key, {})
            holders[holder] = holders.get(holder, 0) | 1 << tier

    def remove(self, scope: Scope, holder: Holder, tier: int, keys: Iterable[BlockKey]) -> None:
        """A holder has blocks in a tier no more. Blocks that are not there are fine."""
        blocks = self._scopes.get(scope, {})
        for key in keys:
            holders = blocks.get(key, {})
            left = holders.get(holder, 0) & ~(1 << tier)
            if left:
                holders[holder] = left
            elif holders.pop(holder, None) is not None and not holders:
                del blocks[key]
        if not blocks:
            self._scopes.pop(scope, None)

    def match(self, scope: Scope, keys: Sequence[BlockKey]) -> dict[str, InstanceMatch]:
        """Leading tokens of a chain at each instance that holds the first block."""
        blocks, size = self._scopes.get(scope, {}), scope.block_size
        found: dict[str, InstanceMatch] = {}
        for before, key in enumerate(keys):
            tokens = before * size
            tiers: dict[str, int] = {}
            for holder, mask in blocks.get(key, {}).items():
                match = found.setdefault(holder.instance, InstanceMatch()) if not before else found.get(holder.instance)
                if match is None:
                    continue
                # Only what continues without a gap counts, by rank, by tier and at all.
                if match.ranks.get(holder.rank, 0) == tokens:
                    match.ranks[holder.rank] = tokens + size
                tiers[holder.instance] = tiers.get(holder.instance, 0) | mask
            if not tiers:
                break
            for instance, mask in tiers.items():
                match = found[instance]
                if match.longest == tokens:
                    match.longest = tokens + size
                for tier in range(len(TIERS)):
                    if mask >> tier & 1 and match.tiers[tier] == tokens:
                        match.tiers[tier] = tokens + size
        return found

    def check_invariants(self) -> None:
        """Assert that nothing empty is kept."""
        for blocks in self._scopes.values():
            assert blocks
            assert all(holders and all(holders.values()) for holders in blocks.values())
