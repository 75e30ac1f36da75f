"""A trie of KV blocks by key, with a set of holders for each block."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.instance_sets import EMPTY_SET, InstanceSets, slots_in
from moonpool.conductor.core.lru_list import LRU_END, LruList

Prefixes = Sequence[tuple[int, int]]
ROOT = -1
"""Parent of a chain's first block."""
_MIN_SETS = 1 << 14
UNLINKED = -2
"""Parent of a block without a known chain."""


class BlockTrie:
    """Blocks by key, and their holders as numbers ("slots")."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._limit = max_blocks
        self._sets = InstanceSets()
        self._max_sets = _MIN_SETS
        self._nodes: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self._parent, self._child, self._next, self._previous = (array("i") for _ in range(4))
        self._raw, self._closed = array("i"), array("i")
        self._told = array("Q")  # version at which a holder last reported the block
        self._leaves = LruList()
        self._free = LRU_END  # first of the unused nodes, chained by `_parent`
        self._held: list[int] = []
        self._free_slots: list[int] = []
        self._lost = 0  # mask of slots whose bits are no longer valid
        self._sweeping = 0  # those of them that the sweep under way removes
        self._cursor = 0

    def __len__(self) -> int:
        """Return the number of blocks, with those that no instance holds."""
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, bytes) else None
        return node is not None and self._sets.masks[self._raw[node]] & ~self._lost != 0

    # --- holders ---------------------------------------------------------------------------------------------------

    def open_slot(self) -> int:
        """Open a slot for a holder without blocks."""
        if self._free_slots:
            return heappop(self._free_slots)
        self._held.append(0)
        return len(self._held) - 1

    def close_slot(self, slot: int) -> None:
        """Forget a holder with all blocks, at once; `sweep` makes the slot usable again."""
        if self._held[slot]:
            self._lost |= 1 << slot
            self._held[slot] = 0
        else:
            heappush(self._free_slots, slot)

    def held(self, slot: int) -> int:
        """Return the number of blocks of a holder."""
        return self._held[slot]

    def holds(self, slot: int, key: bytes) -> bool:
        node = self._nodes.get(key)
        return node is not None and bool(self._sets.masks[self._raw[node]] >> slot & 1)

    def part(self, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
        """Return the blocks at the places from `begin` up to `end`, with the mask of their holders."""
        for node in range(begin, min(end, len(self._keys))):
            key, mask = self._keys[node], self._sets.masks[self._raw[node]] & ~self._lost
            if key is not None and mask:
                yield key, mask

    @property
    def places(self) -> int:
        """Places for blocks, in use or not."""
        return len(self._keys)

    def store(self, slot: int, keys: Iterable[bytes], version: int) -> None:
        """Note that a holder holds these blocks, as reported at `version`."""
        nodes, raw, sets, told = self._nodes, self._raw, self._sets, self._told
        additions, new = sets.additions(slot), 0
        for key in keys:
            node = nodes.get(key)
            if node is None:
                node = self._new(key)
            before = raw[node]
            after = additions.get(before)
            if after is None:
                after = sets.add(before, slot)
            told[node] = version
            if after != before:
                raw[node] = after
                new += 1
                if self._parent[node] != UNLINKED:
                    self._spread(node)
        self._held[slot] += new
        self._bound()

    def drop(self, slot: int, keys: Iterable[bytes], version: int | None = None) -> None:
        """Note that a holder lacks these blocks; blocks reported after `version` stay, unknown ones are fine."""
        raw, sets = self._raw, self._sets
        removals, gone = sets.removals(slot), 0
        for key in keys:
            node = self._nodes.get(key)
            if node is None or (version is not None and self._told[node] > version):
                continue
            before = raw[node]
            after = removals.get(before)
            if after is None:
                after = sets.remove(before, slot)
            if after != before:
                raw[node] = after
                gone += 1
                self._lessened(node)
        self._held[slot] -= gone

    # --- matching --------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return how much of a chain everyone holds.

        Args:
            keys: a chain's keys, from the first block on. A key follows the same keys in every call.

        Returns:
            (blocks, mask) with blocks ascending and each mask within the mask before: the slots that hold that many
            leading blocks. A slot's prefix is the largest entry with the slot.
        """
        linked = self._link(keys)
        if not linked:
            return []
        nodes, closed = self._nodes, self._closed
        end = nodes[keys[linked - 1]]
        if self._child[end] == LRU_END:
            self._leaves.renew(end)
        alive, masks, found = ~self._lost, self._sets.masks, []
        # Samples to the right of `low`, the nearest last: bisecting for one stretch's end also narrows the next
        # stretches' ends.
        samples = [(linked, EMPTY_SET), (linked - 1, closed[end])]
        low, number = 0, closed[nodes[keys[0]]]
        while number != EMPTY_SET:
            high, there = samples[-1]
            if there == number:
                low = high
                samples.pop()
                continue
            while high - low > 1:
                middle = (low + high) // 2
                there = closed[nodes[keys[middle]]]
                if there == number:
                    low = middle
                else:
                    high = middle
                    samples.append((middle, there))
            if mask := masks[number] & alive:
                found.append((high, mask))
            low, number = samples.pop()
        return found

    def _link(self, keys: Sequence[bytes]) -> int:
        """Link the chain as far as the blocks are known; return how many are linked."""
        find, parents = self._nodes.get, self._parent
        low, high = 0, len(keys)
        last = find(keys[-1]) if keys else None
        if last is not None and parents[last] != UNLINKED:
            return high
        while low < high:  # the linked blocks are the chain's first ones
            middle = (low + high) // 2
            node = find(keys[middle])
            if node is None or parents[node] == UNLINKED:
                high = middle
            else:
                low = middle + 1
        parent = self._nodes[keys[low - 1]] if low else ROOT
        for position in range(low, len(keys)):
            node = find(keys[position])
            if node is None:
                return position
            self._attach(node, parent)
            parent = node
        return len(keys)

    def _attach(self, node: int, parent: int) -> None:
        self._parent[node] = parent
        if parent == ROOT:
            self._closed[node] = self._raw[node]
            return
        first = self._child[parent]
        if first == LRU_END:
            self._leaves.remove(parent)
        else:
            self._previous[first] = node
        self._next[node], self._previous[node], self._child[parent] = first, LRU_END, node
        self._closed[node] = self._sets.common(self._raw[node], self._closed[parent])

    def _spread(self, node: int) -> None:
        """Compute a block's closed set anew, and all sets below as far as they change."""
        parent, child, following = self._parent, self._child, self._next
        raw, closed, common = self._raw, self._closed, self._sets.common
        waiting = [node]
        while waiting:
            node = waiting.pop()
            above = parent[node]
            now = raw[node] if above == ROOT else common(raw[node], closed[above])
            if now != closed[node]:
                closed[node] = now
                below = child[node]
                while below != LRU_END:
                    waiting.append(below)
                    below = following[below]

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _new(self, key: bytes) -> int:
        if len(self._nodes) >= self._limit:
            self._evict()
        if self._free == LRU_END:
            self._grow()
        node = self._free
        self._free = self._parent[node]
        self._nodes[key], self._keys[node] = node, key
        self._parent[node] = UNLINKED
        self._child[node] = self._next[node] = self._previous[node] = LRU_END
        self._leaves.add(node)
        return node

    def _grow(self) -> None:
        have = len(self._keys)
        more = max(64, have // 8)
        self._keys.extend([None] * more)
        for column in (self._child, self._next, self._previous, self._raw, self._closed, self._told):
            column.frombytes(bytes(more * column.itemsize))
        self._leaves.grow(more)
        self._parent.extend(range(have + 1, have + more + 1))
        self._parent[-1] = LRU_END
        self._free = have

    def _lessened(self, node: int, *, evicting: bool = False) -> None:
        """A block's raw set has shrunk: spreads the change, or removes an unneeded block."""
        if self._raw[node] == EMPTY_SET and self._child[node] == LRU_END:
            self._remove(node, evicting=evicting)
        elif self._parent[node] != UNLINKED:
            self._spread(node)

    def _remove(self, node: int, *, evicting: bool) -> None:
        """Remove a leaf that no instance holds, and ancestors that become such leaves."""
        self._leaves.remove(node)
        while True:
            parent, key = self._parent[node], self._keys[node]
            assert key is not None, "a node in use has a key"
            if parent >= 0:
                self._detach(node, parent)
            del self._nodes[key]
            self._keys[node] = None
            self._raw[node] = self._closed[node] = EMPTY_SET
            self._parent[node], self._free = self._free, node
            if parent < 0 or self._child[parent] != LRU_END:
                return
            if self._raw[parent] != EMPTY_SET:
                self._leaves.add(parent, oldest=evicting)
                return
            node = parent

    def _detach(self, node: int, parent: int) -> None:
        before, after = self._previous[node], self._next[node]
        if before == LRU_END:
            self._child[parent] = after
        else:
            self._next[before] = after
        if after != LRU_END:
            self._previous[after] = before

    def _evict(self) -> None:
        """Forget the leaf that was unused longest."""
        node = self._leaves.oldest
        for slot in slots_in(self._sets.masks[self._raw[node]] & ~self._lost):
            self._held[slot] -= 1
        self._raw[node] = EMPTY_SET
        self._lessened(node, evicting=True)

    # --- upkeep ----------------------------------------------------------------------------------------------------

    @property
    def unswept(self) -> bool:
        """Whether blocks still bear bits of closed slots."""
        return self._lost != 0

    def sweep(self, max_nodes: int) -> None:
        """Clear the bits of closed slots in some nodes; after a whole round the slots can be used again."""
        if not self._lost:
            return
        if not self._sweeping:
            self._sweeping, self._cursor = self._lost, 0
        end = min(len(self._keys), self._cursor + max_nodes)
        raw, closed, cleaned = self._raw, self._closed, dict[int, int]()
        for node in range(self._cursor, end):
            before = raw[node]
            after = cleaned.get(before)
            if after is None:
                after = cleaned[before] = self._clean(before)
            if after != before:
                raw[node], closed[node] = after, self._clean(closed[node])
                if after == EMPTY_SET and self._child[node] == LRU_END:
                    self._remove(node, evicting=True)
        self._cursor = end
        if end == len(self._keys):
            for slot in slots_in(self._sweeping):
                heappush(self._free_slots, slot)
            self._lost &= ~self._sweeping
            self._sweeping = 0

    def _clean(self, number: int) -> int:
        return self._sets.number(self._sets.masks[number] & ~self._sweeping)

    def _bound(self) -> None:
        """Forget sets that no block has when there are many."""
        if len(self._sets) < self._max_sets:
            return
        kept = self._sets.keep({*self._raw, *self._closed})
        self._raw = array("i", map(kept.__getitem__, self._raw))
        self._closed = array("i", map(kept.__getitem__, self._closed))
        self._max_sets = max(_MIN_SETS, 2 * len(self._sets))

    def digest(self) -> bytes:
        nodes = list(self._nodes.items())
        arrays = (self._parent, self._child, self._raw, self._closed, self._told)
        slots = (self._held, self._free_slots, self._lost, self._sweeping, self._cursor)
        return digest_of(nodes, *arrays, self._leaves, self._sets.masks, *slots)

    def check_invariants(self) -> None:
        """Assert that nodes, links, sets, counts and the list of leaves agree."""
        self._sets.check_invariants()
        assert len(self._nodes) <= self._limit
        held, leaves = [0] * len(self._held), set()
        children: dict[int, list[int]] = {}
        for key, node in self._nodes.items():
            assert self._keys[node] == key
            self._check_sets(node)
            for slot in slots_in(self._sets.masks[self._raw[node]] & ~self._lost):
                held[slot] += 1
            children.setdefault(self._parent[node], []).append(node)
            if self._child[node] == LRU_END:
                leaves.add(node)
                assert self._raw[node] != EMPTY_SET
        assert held == self._held
        for parent, found in children.items():
            assert parent < 0 or sorted(found) == sorted(self._chain(self._child[parent], self._next))
        listed = self._leaves.in_order()
        assert len(listed) == len(leaves)
        assert leaves == set(listed)
        unused = len(self._chain(self._free, self._parent))
        assert unused + len(self._nodes) == len(self._keys)

    def _check_sets(self, node: int) -> None:
        raw, closed, above = self._raw[node], self._closed[node], self._parent[node]
        if above == UNLINKED:
            assert closed == EMPTY_SET
            assert self._child[node] == LRU_END
        else:
            assert above == ROOT or self._keys[above] is not None
            want = raw if above == ROOT else self._sets.common(raw, self._closed[above])
            # During a sweep, a block behind the sweep is clean; the block's parent ahead of the sweep need not be.
            assert (self._sets.masks[want] ^ self._sets.masks[closed]) & ~self._lost == 0

    def _chain(self, node: int, following: Sequence[int]) -> list[int]:
        nodes = []
        while node != LRU_END:
            nodes.append(node)
            node = following[node]
        return nodes


def blocks_at(prefixes: Sequence[tuple[int, int]], slot: int) -> int:
    """Return the number of leading blocks that a slot holds, by the result of `BlockTrie.match`."""
    for blocks, mask in reversed(prefixes):  # the longest first
        if mask >> slot & 1:
            return blocks
    return 0
