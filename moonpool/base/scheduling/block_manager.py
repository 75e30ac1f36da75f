"""One KV pool's block manager: reference counts, prefix keys, eviction, deletion and lending.

Each block is in exactly one state:

    free    no references, no key      -> allocated first, the most recently freed block before others
    cached  no references, has a key   -> evicted only when no block is free, least recently used first; replicas
                                          unused for `COLD_S` are evicted before
    used    referenced, with or without a key

Layers with a window or a recurrent state have window slots of their own. A block with a slot is whole; a block without
one lacks those layers' slices. A chain is continued behind a block if the last `window_blocks` blocks up to there are
whole. Each slot is in exactly one state:

    free     no block has the slot
    needed   a request refers to the block and may still read these slices
    passed   all requests that refer to the block are past the block's window; taken first, oldest first
    cached   no request refers to the block, and the block has a key; taken next, least recently used first

Prefill and decode share the rules here for deleting KV from the pool and for lending blocks to other instances.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from moonpool.base.errors import MoonpoolError
from moonpool.base.frozen import frozen
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey, window_key
from moonpool.base.kv.layout import NO_SLOT
from moonpool.base.scheduling.state_machine import digest_of

NO_KEY_CHANGES = KeyChanges()
COLD_S = 60.0
"""Seconds after which an unused replicated block is evicted first."""


class OutOfBlocks(MoonpoolError):  # noqa: N818 - named like its kind in the field
    """Fewer blocks are free or cached than asked for; the pool is unchanged."""


@dataclass(slots=True, eq=False)
class KVOwner:
    """Owner of the KV that a request computes; shared by all code that registers the request's blocks.

    Attributes:
        transient: the KV was deleted while the request was on the way: no block gets a key any more.
    """

    tenant: str = ""
    transient: bool = False


NO_OWNER = KVOwner()


class BlockManager:
    """One pool's blocks.

    Each block from `allocate` or `acquire` must be given to `release` once.

    Args:
        num_blocks: blocks in the pool.
        window_blocks: full blocks that layers with a window need before a token; 0 = no layer has a window.
        num_slots: window slots in the pool; only if a layer has a window.

    Attributes:
        now: time of the current event, seconds; set by the scheduler that owns the manager.
    """

    def __init__(self, num_blocks: int, window_blocks: int = 0, num_slots: int = 0) -> None:
        assert (window_blocks > 0) == (num_slots > 0), "slots are of layers with a window"
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._window_blocks = window_blocks
        self._slot_of = [NO_SLOT if window_blocks else 0] * num_blocks
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._past = [0] * num_blocks  # references from requests that are past the block's window
        self._passed_slots: OrderedDict[int, None] = OrderedDict()  # by block, first = next to be taken
        self._cached_slots: OrderedDict[int, None] = OrderedDict()
        self._moved_slots: dict[int, int] = {}
        # A stack: the block freed last is used first, so that a lightly loaded pool touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # first = next to be evicted
        self._copies: OrderedDict[int, float] = OrderedDict()  # cached replicas that were not used, and when they came
        self._refs = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._owned: list[tuple[str, float]] = [("", 0.0)] * num_blocks  # tenant, and when the key was registered
        self.now = 0.0
        # Net key changes. Dicts keep the order of insertion and delete in constant time.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    def take_over(self, former: "BlockManager") -> None:
        """Take all that another manager of the same pool holds: keys, cached blocks and window slots, in their order.

        No block is referenced there, and that manager is not used any more. Key changes begin anew: whoever follows
        this pool begins with `keys`.
        """
        assert not former.num_used, f"{former.num_used} blocks are referenced"
        sizes = self.num_blocks, self.num_slots, self._window_blocks
        assert sizes == (former.num_blocks, former.num_slots, former._window_blocks), "not the same pool"
        self._slot_of, self._free_slots, self._past = former._slot_of, former._free_slots, former._past
        self._passed_slots, self._cached_slots = former._passed_slots, former._cached_slots
        self._free, self._cached, self._copies = former._free, former._cached, former._copies
        self._refs, self._key_of, self._block_of = former._refs, former._key_of, former._block_of
        self._owned, self.now = former._owned, former.now
        self._moved_slots, self._stored, self._removed = former._moved_slots, {}, {}

    @property
    def num_free(self) -> int:
        """Blocks without references and without a key."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references that keep their key for reuse."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now: free and cached."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks for the longest run of leading keys in the pool behind which the chain can be continued.

        The blocks are not acquired: call `acquire` before any other method.
        """
        found = self.find(keys)
        # The next token reads the windows of the last blocks: a chain goes on behind whole blocks only (ADR 65).
        del found[self.continuable(found) :]
        return found

    def match_behind(self, keys: Sequence[BlockKey], blocks: int) -> list[int]:
        """As `match`, if all further KV arrives: the chain is continued behind `blocks` blocks."""
        found, first = self.find(keys), max(0, blocks - self._window_blocks)
        end = next((index for index in range(first, len(found)) if self.is_partial(found[index])), len(found))
        return found[:end]

    def match_whole(self, keys: Iterable[BlockKey]) -> list[int]:
        """As `match`, but only whole blocks."""
        found = self.find(keys)
        return found[: next((index for index, block in enumerate(found) if self.is_partial(block)), len(found))]

    def continuable(self, blocks: Sequence[int]) -> int:
        """The most leading blocks behind which a chain with these blocks can be continued."""
        end = len(blocks)
        for index in reversed(range(end)):
            if end - index > self._window_blocks:
                break
            if self.is_partial(blocks[index]):
                end = index
        return end

    def is_partial(self, block: int) -> bool:
        """Whether a block has no window slot, and so lacks the slices of layers with a window."""
        return self._slot_of[block] == NO_SLOT

    def is_lacking(self, blocks: Sequence[int], whole_from: int) -> bool:
        """Whether one of the blocks from index `whole_from` on lacks the slices of layers with a window."""
        return any(map(self.is_partial, blocks[whole_from:]))

    # --- window slots ----------------------------------------------------------------------------------------------

    @property
    def num_slots_available(self) -> int:
        """Window slots that `give_slots` could give now: free slots, and slots that no request needs."""
        return len(self._free_slots) + len(self._passed_slots) + len(self._cached_slots)

    @property
    def num_slots_idle(self) -> int:
        """Window slots with nothing worth keeping: free slots, and slots that all requests have passed."""
        return len(self._free_slots) + len(self._passed_slots)

    def is_spare(self, block: int) -> bool:
        """Whether the block has a window slot that no request needs: acquiring the block takes an available slot."""
        return block in self._passed_slots or block in self._cached_slots

    def give_slots(self, blocks: Iterable[int]) -> None:
        """Give each used block without key a window slot if the block lacks a slot; take slots not needed.

        Raises:
            OutOfBlocks: Too few slots are available; the pool is unchanged.
        """
        if not self._window_blocks:
            return
        lacking = [block for block in blocks if self.is_partial(block)]
        if len(lacking) > self.num_slots_available:
            raise OutOfBlocks(f"{len(lacking)} window slots wanted, {self.num_slots_available} available")
        for block in lacking:
            assert self._refs[block] > self._past[block], f"nobody needs the window of block {block}"
            assert self._key_of[block] is None, f"block {block} is complete without"
            self._put_slot(block, self._take_slot())

    def take_slots_back(self, blocks: Iterable[int]) -> None:
        """Free the window slots of used blocks without key, in which nothing was written that counts."""
        if not self._window_blocks:
            return
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is not used"
            assert self._key_of[block] is None, f"block {block} is complete with its slot"
            self._drop_slot(block)

    def pass_windows(self, blocks: Iterable[int], kept: Container[int] = ()) -> None:
        """Note that a request is past the blocks' window: the request reads no windowed slices there any more.

        `kept`: blocks at places where others may continue; their slots are taken as those of cached blocks.
        """
        if not self._window_blocks:
            return
        for block in blocks:
            self._past[block] += 1
            assert self._past[block] <= self._refs[block], f"block {block} is passed more often than referenced"
            if self._past[block] == self._refs[block]:
                self._spare_slot(block, self._cached_slots if block in kept else self._passed_slots)

    def need_windows(self, blocks: Iterable[int]) -> None:
        """Take `pass_windows` back, where blocks have not lost their slots."""
        if not self._window_blocks:
            return
        for block in blocks:
            self._past[block] -= 1
            assert self._past[block] >= 0, f"nobody has passed block {block}"
            self._passed_slots.pop(block, None)
            self._cached_slots.pop(block, None)

    def take_slot_moves(self) -> "list[MoveSlots]":
        """An action for blocks with a window slot that has changed since the last call, if any."""
        if not self._moved_slots:
            return []
        moved, self._moved_slots = self._moved_slots, {}
        return [MoveSlots(tuple(moved.items()))]

    def _put_slot(self, block: int, slot: int) -> None:
        self._slot_of[block] = self._moved_slots[block] = slot

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        # Passed slots first: behind a cached block, another request may continue (ADR 65).
        block = next(iter(self._passed_slots or self._cached_slots))
        key = self._key_of[block]
        assert key is not None, "a block without key keeps no slot that nobody needs"
        self._note_name(window_key(key), now=self._removed, before=self._stored)
        self._drop_slot(block)
        return self._free_slots.pop()

    def _drop_slot(self, block: int) -> None:
        """Free the block's slot, if any. The caller has noted what the block is called without the slot."""
        if self._window_blocks and not self.is_partial(block):
            self._passed_slots.pop(block, None)
            self._cached_slots.pop(block, None)
            self._free_slots.append(self._slot_of[block])
            self._put_slot(block, NO_SLOT)

    def _spare_slot(self, block: int, queue: OrderedDict[int, None]) -> None:
        """Note that no request needs the block's windowed slices; without a key, no request ever will."""
        if self._key_of[block] is None:
            self._drop_slot(block)
        elif not self.is_partial(block) and not self.is_spare(block):
            queue[block] = None

    # --- references ------------------------------------------------------------------------------------------------

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks for the longest run of leading keys in the pool, whole or not. Not acquired."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_cached(self, block: int) -> bool:
        """Whether the block is cached, so that acquiring the block makes one block fewer available."""
        return block in self._cached

    def key_of(self, block: int) -> BlockKey | None:
        return self._key_of[block]

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def acquire(self, blocks: Sequence[int], past: int = 0) -> None:
        """Add a reference to blocks that are cached or used (`match` finds such blocks).

        `past`: leading blocks whose window the new reference has passed (`pass_windows`).
        """
        refs, cached = self._refs, self._cached
        for block in blocks:
            if refs[block] == 0:
                assert block in cached, f"block {block} is free and cannot be acquired"
                del cached[block]
                self._copies.pop(block, None)
            refs[block] += 1
        if self._window_blocks:
            for block in blocks[:past]:
                self._past[block] += 1
            for block in blocks[past:]:
                self._passed_slots.pop(block, None)
                self._cached_slots.pop(block, None)

    def can_allocate(self, n: int) -> bool:
        return n <= self.num_available

    def allocate(self, n: int) -> list[int]:
        """Take n blocks without key, each with one reference; without window slots.

        Evicts cached blocks if too few are free.

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

    def register(self, block: int, key: BlockKey, owner: KVOwner = NO_OWNER) -> bool:
        """Give a used block a key; the block's KV must be complete, but for windowed slices of a partial block.

        If another block has this key already, that block keeps the key and this block gets none: `match` needs a single
        block, and others may reference the older block. But a whole block takes the key from a partial block. A block
        of a transient owner gets no key.

        Returns:
            Whether the block has the key now.
        """
        assert self._refs[block] > 0, f"block {block} is not used"
        own = self._key_of[block]
        assert own is None or own == key, f"block {block} has another key"
        # The KV was deleted while the request was on the way: nobody may find it again.
        if owner.transient:
            return False
        held = self._block_of.get(key, block)
        if held != block:
            # A whole block serves all that a partial block serves, and not the other way round.
            if not self.is_partial(held) or self.is_partial(block):
                return False
            self.forget([key])
        self._block_of[key] = block
        if own is None:
            self._key_of[block] = key
            self._owned[block] = owner.tenant, self.now
            self._note(key, block, now=self._stored, before=self._removed)
        return True

    def release(self, blocks: Sequence[int], past: int = 0) -> None:
        """Drop a reference to blocks, given in the order of their chain.

        Blocks without further references become cached if they have a key, else free. The tail of the chain is evicted
        before the head: a chain without head is useless. `past`: as the reference was acquired, or passed them since.
        """
        refs, keys, cached = self._refs, self._key_of, self._cached
        if self._window_blocks:
            self._release_windows(blocks, past)
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

    def _release_windows(self, blocks: Sequence[int], past: int) -> None:
        """To be called before references are dropped. Other requests continue a chain with the chain's last windows."""
        for index, block in enumerate(blocks):
            self._past[block] -= index < past
            assert 0 <= self._past[block] < self._refs[block], f"block {block} was not passed so often"
            if self._past[block] == self._refs[block] - 1:
                self._spare_slot(block, self._cached_slots)

    def note_copies(self, blocks: Sequence[int]) -> None:
        """Mark blocks, in the order of their chain, as replicas that no request has used yet."""
        for block in reversed(blocks):
            if block in self._cached:
                self._copies[block] = self.now

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Take the keys from blocks that are damaged or deleted, so `match` does not find them any more."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is None:
                continue
            self._key_of[block] = None
            self._note(key, block, now=self._removed, before=self._stored)
            if self.is_spare(block):
                self._drop_slot(block)
            if block in self._cached:
                del self._cached[block]
                self._copies.pop(block, None)
                self._free.append(block)

    def held(self, takes: Callable[[BlockKey, str, float], bool]) -> list[BlockKey]:
        """Keys for which `takes(key, tenant, seconds since registration)` is true."""
        now, owned = self.now, self._owned
        return [key for key, block in self._block_of.items() if takes(key, owned[block][0], now - owned[block][1])]

    def keys(self) -> list[BlockKey]:
        """All keys held, by used and cached blocks; with those of windowed slices, if layers have windows."""
        if not self._window_blocks:
            return list(self._block_of)
        return [name for key, block in self._block_of.items() for name in self._names(key, block)]

    def take_events(self) -> KeyChanges:
        """Net change of `keys()` since the last call."""
        if not (self._stored or self._removed):
            return NO_KEY_CHANGES
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
        self._note(key, block, now=self._removed, before=self._stored)
        self._drop_slot(block)
        return block

    def _coldest(self) -> int:
        if self._copies:
            block, came_at = next(iter(self._copies.items()))
            if self.now - came_at >= COLD_S:
                return block
        return next(iter(self._cached))

    def _names(self, key: BlockKey, block: int) -> tuple[BlockKey, ...]:
        """Keys by which other instances know a block."""
        return (key, window_key(key)) if self._window_blocks and not self.is_partial(block) else (key,)

    def _note(self, key: BlockKey, block: int, *, now: dict[BlockKey, None], before: dict[BlockKey, None]) -> None:
        for name in self._names(key, block):
            self._note_name(name, now=now, before=before)

    def _note_name(self, name: BlockKey, *, now: dict[BlockKey, None], before: dict[BlockKey, None]) -> None:
        if name in before:  # stored and removed, or removed and stored, since the last call: no change
            del before[name]
        else:
            now[name] = None

    def digest(self) -> bytes:
        owned = [self._owned[block] for block in self._block_of.values()]
        slots: list[object] = []
        if self._window_blocks:
            slots = [self._slot_of, self._past, list(self._passed_slots), list(self._cached_slots), self._free_slots]
        cached = list(self._cached), self._copies, slots
        return digest_of(self._free, *cached, self._refs, self._key_of, owned, self._stored, self._removed)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
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
        self._check_slots()
        assert self._copies.keys() <= cached, "a copy that is not cached"
        assert len(self._block_of) == sum(key is not None for key in self._key_of)
        told = set(self.keys())
        assert not self._stored.keys() & self._removed.keys()
        assert self._stored.keys() <= told
        assert not self._removed.keys() & told

    def _check_slots(self) -> None:
        assert all(0 <= past <= refs for past, refs in zip(self._past, self._refs, strict=True))
        if not self._window_blocks:
            return
        held = [slot for slot in self._slot_of if slot != NO_SLOT]
        assert sorted([*held, *self._free_slots]) == list(range(self.num_slots)), "a slot is lost, or of two blocks"
        assert not self._passed_slots.keys() & self._cached_slots.keys()
        for block, slot in enumerate(self._slot_of):
            needed = self._refs[block] > self._past[block]
            assert self.is_spare(block) == (slot != NO_SLOT and not needed), f"slot of block {block}"
            assert slot == NO_SLOT or needed or self._key_of[block] is not None


@frozen
class MoveSlots:
    """From now on blocks have these window slots in the pool: block, and slot or `NO_SLOT`. Not answered.

    Comes before the event's other actions.
    """

    moves: tuple[tuple[int, int], ...]
