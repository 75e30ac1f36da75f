"""An engine's KV cache according to the engine's events, under Moonpool's block keys.

The rule: a key is told only if the engine would find the block. What is not certain is not told.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from moonpool.base.kv.blocks import KeyChanges, NetChanges
from moonpool.base.kv.keys import BlockKey, block_keys
from moonpool.base.kv.media import DIGEST_BYTES, MediaItem
from moonpool.interop.kv_events.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    ExtraKeys,
)

DEVICE_MEDIA = ("", "GPU")
"""Media from which an engine computes at once, in the words of vLLM and SGLang."""
HOST_MEDIA = ("CPU", "CPU_PINNED")
DISK_MEDIA = ("STORAGE", "DISK", "EXTERNAL")
"""Media below the host's memory. SGLang calls storage of another process EXTERNAL."""
WHOLE_KINDS = ("", "full_attention", "mla_attention", "sink_full_attention")
WINDOWED_KINDS = ("sliding_window", "sliding_window_mla", "chunked_local_attention")
"""Kinds of groups whose blocks have the hashes of whole chains."""

RootOf = Callable[[ExtraKeys | None, str], BlockKey | None]
"""Root for the chain whose first block has these extra keys, computed by the LoRA adapter of this name ("" = none).

None = a chain unknown here.
"""
KeysOf = Callable[[bytes, Sequence[int], int, str, Sequence[MediaItem]], Sequence[BlockKey]]
"""Keys of the blocks behind a root or a key: parent, tokens, tokens per block, the LoRA adapter's name, and the
pictures that begin there."""


def _chain_keys(
    parent: bytes, token_ids: Sequence[int], block_size: int, lora: str, media: Sequence[MediaItem]
) -> Sequence[BlockKey]:
    """Moonpool's own keys, of which the root knows the adapter."""
    return block_keys(parent, token_ids, block_size, media)


NO_RANK = -1
"""No rank holds anything of a chain."""


class RankCache:
    """One data-parallel rank's cache.

    A block counts as held if all layer groups hold the block. So a prefix is never reported longer than the windowed
    groups hold. Names of blocks outlive the blocks: a hash means the same chain as long as the engine lives.

    Args:
        block_size: tokens per block; blocks of other sizes are not told.
        root_of: finds the chain of a first block.
        changed: called with keys that are held from now on, and keys that are not any more.
        max_names: hashes that are remembered at most, beside those of held blocks.
        media: media whose blocks are told; blocks elsewhere only teach what hashes mean.
        keys_of: computes keys.
    """

    def __init__(
        self,
        block_size: int,
        root_of: RootOf,
        changed: Callable[[Sequence[BlockKey], Sequence[BlockKey]], None],
        max_names: int,
        media: Sequence[str] = DEVICE_MEDIA,
        keys_of: KeysOf = _chain_keys,
    ) -> None:
        self._block_size = block_size
        self._root_of = root_of
        self._changed = changed
        self._max_names = max_names
        self._media, self._keys_of = media, keys_of
        self._names: dict[BlockHash, BlockKey] = {}  # the oldest first
        self._groups_of: dict[BlockHash, int] = {}  # mask of the groups that hold a block
        self._groups = 0  # mask of all groups met so far
        self._opaque = False
        self._told: dict[BlockHash, BlockKey] = {}
        self._hash_of: dict[BlockKey, BlockHash] = {}  # the reverse of `_told`

    @property
    def opaque(self) -> bool:
        """Whether a layer group caches in an unknown way: then no block is reported."""
        return self._opaque

    @property
    def told(self) -> Iterable[BlockKey]:
        """Keys of the blocks that are told."""
        return self._hash_of

    def apply(self, event: EngineEvent) -> None:
        match event:
            case BlockStored():
                self._stored(event)
            case BlockRemoved():
                self._removed(event)
            case AllBlocksCleared():
                self.clear()

    def clear(self) -> None:
        """Forget all blocks. What hashes mean stays known."""
        self._groups_of.clear()
        self._retract(list(self._told))
        self._bound_names()

    def restart(self) -> None:
        """Clear, and forget all that was learnt: the engine is another one, or chains have other roots."""
        self._names.clear()
        self._groups, self._opaque = 0, False
        self.clear()

    def _stored(self, event: BlockStored) -> None:
        self._name(event)
        # Blocks elsewhere have taught what their hashes mean, and count for nothing else.
        if event.medium not in self._media:
            return
        if event.block_size != self._block_size or event.kind not in (*WHOLE_KINDS, *WINDOWED_KINDS):
            # Such a group may lack any block, so that no block is certain to be found (ADR 60).
            self._opaque = True
            self._retract(list(self._told))
            return
        bit = 1 << event.group
        for block in event.hashes:
            # A mask, no count: vLLM also tells blocks that are reused, so a count would drift upwards (ADR 60).
            self._groups_of[block] = self._groups_of.get(block, 0) | bit
        if not self._groups & bit:
            # A group that is met for the first time holds none of the blocks told so far.
            self._groups |= bit
            self._retract([block for block in self._told if self._groups_of[block] != self._groups])
        self._tell(event.hashes)

    def _name(self, event: BlockStored) -> None:
        """Note which keys the hashes mean; none if the blocks are not a chain's of the cluster."""
        whole = len(event.token_ids) == len(event.hashes) * event.block_size
        if event.block_size != self._block_size or not whole or not event.hashes:
            return
        extra, media = _without_pictures(_without(event.lora, event.extra_keys), event.block_size)
        salted = 0
        if event.parent is None:
            parent, salted = self._root_of(None if extra is None else extra[0], event.lora), 1
        else:
            parent = self._names.get(event.parent)
        if parent is None:
            return
        named = len(event.hashes)
        if extra is not None:  # from a block with something unknown on, hashes mean more than tokens and pictures
            named = next((at for at, keys in enumerate(extra) if keys and at >= salted), named)
        tokens = event.token_ids[: named * self._block_size]
        keys = self._keys_of(parent, tokens, self._block_size, event.lora, media)
        for block, key in zip(event.hashes, keys, strict=False):
            # Popped and put again, so that the oldest names come first. A hash with another key was told under the old.
            if self._names.pop(block, key) != key:
                self._retract([block])
            self._names[block] = key
        self._bound_names()

    def _bound_names(self) -> None:
        over = len(self._names) - len(self._groups_of) - self._max_names
        if over > 0:
            most = max(over, self._max_names // 4)  # some more, so that not each event looks for the oldest ones
            for block in [name for name in self._names if name not in self._groups_of][:most]:
                del self._names[block]

    def _tell(self, blocks: Sequence[BlockHash]) -> None:
        """Tell those blocks that have a name, are held whole, and are not told under another hash."""
        keys = list[BlockKey]()
        for block in blocks if not self._opaque else ():
            key = self._names.get(block)
            if key is not None and key not in self._hash_of and self._groups_of.get(block) == self._groups:
                self._told[block], self._hash_of[key] = key, block
                keys.append(key)
        if keys:
            self._changed(keys, ())

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in self._media:
            return
        gone = ~0 if event.group is None else 1 << event.group
        for block in event.hashes:
            left = self._groups_of.pop(block, 0) & ~gone
            if left:
                self._groups_of[block] = left
        self._retract([block for block in event.hashes if self._groups_of.get(block, 0) != self._groups])
        self._bound_names()

    def _retract(self, blocks: Sequence[BlockHash]) -> None:
        keys = [key for block in blocks if (key := self._told.pop(block, None)) is not None]
        for key in keys:
            del self._hash_of[key]
        if keys:
            self._changed((), keys)

    def check_invariants(self) -> None:
        """Assert that all that is told is named and held by every group."""
        assert not (self._opaque and self._told)
        assert {key: block for block, key in self._told.items()} == self._hash_of
        for block, key in self._told.items():
            assert self._names[block] == key
            assert self._groups_of[block] == self._groups
        assert len(self._names) <= len(self._groups_of) + self._max_names


def _without(lora: str, extra: tuple[ExtraKeys, ...] | None) -> tuple[ExtraKeys, ...] | None:
    """The blocks' extra keys without the LoRA adapter's name, which comes first."""
    if not lora or extra is None:
        return extra
    return tuple([keys[1:] if keys[:1] == (lora,) else keys for keys in extra])


def _without_pictures(
    extra: tuple[ExtraKeys, ...] | None, block_size: int
) -> tuple[tuple[ExtraKeys, ...] | None, list[MediaItem]]:
    """The blocks' extra keys without pictures, and the pictures that begin in the blocks, by place behind the first.

    A picture is told as the digest in hex, and where the picture begins behind the block's first token; that is before
    the block if the picture only continues there, which the block's parent knows. vLLM 0.32 puts "mm" in front.
    """
    media: list[MediaItem] = []
    found: list[ExtraKeys] = []
    for at, keys in enumerate(extra or ()):
        others = []
        for key in keys:
            picture = _picture(key, block_size)
            if picture is None:
                others.append(key)
            elif picture[1] >= 0:
                begin = at * block_size + picture[1]
                media.append(MediaItem(begin, begin + 1, picture[0]))
        found.append(tuple(others))
    return (None if extra is None else tuple(found)), sorted(media, key=lambda item: item.begin)


def _picture(key: object, block_size: int) -> tuple[bytes, int] | None:
    """Digest and place of a picture; None: the key is something else, or the hash has another length."""
    match key:
        case ["mm", str(digest), int(begin)] | [str(digest), int(begin)] if (
            len(digest) == 2 * DIGEST_BYTES and begin < block_size
        ):
            try:
                return bytes.fromhex(digest), begin
            except ValueError:
                return None
    return None


class EngineCache:
    """The caches of all an engine's data-parallel ranks: what any rank holds.

    Arguments as of `RankCache`.
    """

    def __init__(self, block_size: int, root_of: RootOf, max_names: int) -> None:
        self._block_size = block_size
        self._root_of = root_of
        self._max_names = max_names
        self._caches: dict[int, RankCache] = {}
        self._ranks_of: dict[BlockKey, int] = {}  # mask of the ranks that hold a key
        self._changes = NetChanges()

    def rank(self, rank: int) -> RankCache:
        """The cache of a rank; empty at first."""
        if rank not in self._caches:
            changed = partial(self._changed, 1 << rank)
            self._caches[rank] = RankCache(self._block_size, self._root_of, changed, self._max_names)
        return self._caches[rank]

    @property
    def held(self) -> Iterable[BlockKey]:
        """All keys that are told."""
        return self._ranks_of

    def __len__(self) -> int:
        return len(self._ranks_of)

    @property
    def opaque(self) -> bool:
        """Whether a rank caches in a way that is not understood here."""
        return any(cache.opaque for cache in self._caches.values())

    def take_changes(self) -> KeyChanges:
        """Return what has changed since the last call."""
        return self._changes.take()

    def matched_blocks(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Leading blocks of a chain that one rank holds, and the rank; `NO_RANK` without a block."""
        blocks, best, found = 0, 0, ~0
        for key in keys:
            # The same rank must hold the whole prefix: a prompt is computed at one rank.
            found &= self._ranks_of.get(key, 0)
            if not found:
                break
            blocks, best = blocks + 1, found
        return blocks, (best & -best).bit_length() - 1

    def restart(self) -> None:
        """Forget all blocks; blocks stored later behind today's blocks are ignored."""
        for cache in self._caches.values():
            cache.restart()

    def _changed(self, rank: int, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        ranks_of, new, gone = self._ranks_of, list[BlockKey](), list[BlockKey]()
        for key in stored:
            if key not in ranks_of:
                new.append(key)
            ranks_of[key] = ranks_of.get(key, 0) | rank
        for key in removed:
            ranks_of[key] &= ~rank
            if not ranks_of[key]:
                del ranks_of[key]
                gone.append(key)
        self._changes.note(new, gone)

    def check_invariants(self) -> None:
        """Assert that the ranks' keys are those of all together."""
        found: dict[BlockKey, int] = {}
        for rank, cache in self._caches.items():
            cache.check_invariants()
            for key in cache.told:
                found[key] = found.get(key, 0) | 1 << rank
        assert found == self._ranks_of
