"""The blocks of one instance's KV pool: reference counts, keys, reuse and the order of eviction.

A block is in exactly one of three states:

    free    no references, no key      -> allocated first, the most recently freed one before others
    cached  no references, has a key   -> evicted only when nothing is free, least recently used first; before them
                                          copies that nobody has used for `COLD_S`
    used    referenced, with or without a key
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonpool.core.digest import digest_of
from moonpool.errors import MoonpoolError
from moonpool.kv.changes import KeyChanges
from moonpool.kv.keys import BlockKey


class OutOfBlocks(MoonpoolError):  # noqa: N818 - named like its kind in the field
    """Fewer blocks are free or cached than were asked for; nothing was changed."""


UNCHANGED = KeyChanges()


@dataclass(slots=True, eq=False)
class Owner:
    """Whose KV a request computes; shared by all that registers blocks for it."""

    tenant: str = ""
    transient: bool = False
    """Its KV was deleted while it was on its way: none of its blocks gets a key any more."""


NOBODY = Owner()

COLD_S = 60.0
"""Seconds after which a copied block that nobody has used is the first to be evicted."""


class BlockManager:
    """The blocks of one pool.

    Who gets blocks from `allocate` or refers to them by `acquire` must `release` each of them once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is used first, so that a lightly loaded pool touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # first = next to be evicted
        self._copies: OrderedDict[int, float] = OrderedDict()  # cached ones that were copied and not used, and when
        self._refs = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._owned: list[tuple[str, float]] = [("", 0.0)] * num_blocks  # by whom and when its key was registered
        self.now = 0.0
        """Time of what is being done, seconds; set by the core that owns the manager."""
        # Net events. Dicts keep the order of insertion and forget in constant time.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references and without a key."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references that are kept for reuse under their key."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks of the longest run of leading keys that are held. Not acquired: do that before anything else."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_cached(self, block: int) -> bool:
        """Whether the block is cached, so that acquiring it makes one block fewer available."""
        return block in self._cached

    def key_of(self, block: int) -> BlockKey | None:
        """The block's key, if it has one."""
        return self._key_of[block]

    def ref_count(self, block: int) -> int:
        """How often the block is referred to."""
        return self._refs[block]

    def acquire(self, blocks: Sequence[int]) -> None:
        """Refers once more to blocks that are cached or used (as found by `match`)."""
        refs, cached = self._refs, self._cached
        for block in blocks:
            if refs[block] == 0:
                assert block in cached, f"block {block} is free and cannot be acquired"
                del cached[block]
                self._copies.pop(block, None)
            refs[block] += 1

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed."""
        return n <= self.num_available

    def allocate(self, n: int) -> list[int]:
        """Takes n blocks without key, each referred to once. Evicts cached blocks when not enough are free.

        Raises:
            OutOfBlocks: Fewer than n are free or cached.
        """
        assert n >= 0
        if not self.can_allocate(n):
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} free and {self.num_cached} cached")
        taken = []
        for _ in range(n):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: BlockKey, owner: Owner = NOBODY) -> bool:
        """Gives a used block, whose KV is complete in all layers, its identity.

        If another block has this key already, that one keeps it and this one stays anonymous: who matches next finds
        one of them, and the older has been referred to by others. So it does when its owner is transient.

        Returns:
            Whether the block has the key now.
        """
        assert self._refs[block] > 0, f"block {block} is not used"
        own = self._key_of[block]
        assert own is None or own == key, f"block {block} has another key"
        if owner.transient or self._block_of.setdefault(key, block) != block:
            return False
        if own is None:
            self._key_of[block] = key
            self._owned[block] = owner.tenant, self.now
            self._note(key, now=self._stored, before=self._removed)
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Refers once less to blocks, given in the order of their chain.

        Blocks without further references become cached if they have a key, else free. The chain's tail is put in the
        eviction order before its head: a chain without head is useless.
        """
        refs, keys, cached = self._refs, self._key_of, self._cached
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} is released more often than acquired"
            refs[block] = left
            if left:
                continue
            if keys[block] is None:
                self._free.append(block)
            else:
                cached[block] = None

    def note_copies(self, blocks: Sequence[int]) -> None:
        """Notes that blocks, in the order of their chain, are here because somebody may want them, not for a prompt."""
        for block in reversed(blocks):
            if block in self._cached:
                self._copies[block] = self.now

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Takes their identity from blocks that are damaged or to be deleted, so that nobody finds them any more."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is None:
                continue
            self._key_of[block] = None
            self._note(key, now=self._removed, before=self._stored)
            if block in self._cached:
                del self._cached[block]
                self._copies.pop(block, None)
                self._free.append(block)

    def held(self, takes: Callable[[BlockKey, str, float], bool]) -> list[BlockKey]:
        """Keys of which `takes(key, tenant, seconds since it was registered)` is true."""
        now, owned = self.now, self._owned
        return [key for key, block in self._block_of.items() if takes(key, owned[block][0], now - owned[block][1])]

    def keys(self) -> list[BlockKey]:
        """All keys held, by used and cached blocks."""
        return list(self._block_of)

    def take_events(self) -> KeyChanges:
        """Net change of `keys()` since the last call."""
        if not (self._stored or self._removed):
            return UNCHANGED
        events = KeyChanges(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def _evict(self) -> int:
        block = self._coldest()
        del self._cached[block]
        self._copies.pop(block, None)
        key = self._key_of[block]
        assert key is not None
        self._key_of[block] = None
        del self._block_of[key]
        self._note(key, now=self._removed, before=self._stored)
        return block

    def _coldest(self) -> int:
        if self._copies:
            block, came_at = next(iter(self._copies.items()))
            if self.now - came_at >= COLD_S:
                return block
        return next(iter(self._cached))

    @staticmethod
    def _note(key: BlockKey, *, now: dict[BlockKey, None], before: dict[BlockKey, None]) -> None:
        if key in before:  # stored and removed (or the other way round) since the last call: nothing has happened
            del before[key]
        else:
            now[key] = None

    def digest(self) -> bytes:
        """Hash of the whole state, for cores that own a manager."""
        owned = [self._owned[block] for block in self._block_of.values()]
        cached = list(self._cached), self._copies
        return digest_of(self._free, *cached, self._refs, self._key_of, owned, self._stored, self._removed)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is free and cached"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        for block in range(self.num_blocks):
            refs, key = self._refs[block], self._key_of[block]
            assert refs >= 0
            assert (refs > 0) == (block not in free and block not in cached), f"block {block} is in two states"
            assert block not in free or key is None, f"free block {block} has a key"
            assert block not in cached or key is not None, f"cached block {block} has no key"
            assert key is None or self._block_of[key] == block, f"block {block} and its key disagree"
        assert self._copies.keys() <= cached, "a copy that is not cached"
        assert len(self._block_of) == sum(key is not None for key in self._key_of)
        assert not self._stored.keys() & self._removed.keys()
        assert self._stored.keys() <= self._block_of.keys()
        assert not self._removed.keys() & self._block_of.keys()
