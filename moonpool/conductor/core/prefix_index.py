"""Which instances hold which KV blocks: a block trie with a set of instances per block, fed by KV events.

Gaps in an instance's events are found by sequence number and healed by a snapshot; a doubtful block is dropped, which
costs a cache miss.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush

from moonpool.base.kv.keys import window_key
from moonpool.base.scheduling.state_machine import digest_of

LRU_END = -1
"""No number."""


class LruList:
    """A list of numbers from the oldest to the newest, linked both ways in two arrays."""

    def __init__(self) -> None:
        self.oldest = LRU_END
        """The first; `NONE` when there is none."""
        self._newest = LRU_END
        self._older, self._newer = array("i"), array("i")

    def grow(self, more: int) -> None:
        """Makes room for so many larger numbers."""
        for column in (self._older, self._newer):
            column.frombytes(bytes(more * column.itemsize))

    def add(self, number: int, *, oldest: bool = False) -> None:
        """Adds a number that is not in the list, as the newest or the oldest."""
        before, after = (LRU_END, self.oldest) if oldest else (self._newest, LRU_END)
        self._older[number], self._newer[number] = before, after
        self._join(before, number)
        self._join(number, after)

    def remove(self, number: int) -> None:
        """Takes a number out."""
        self._join(self._older[number], self._newer[number])

    def renew(self, number: int) -> None:
        """Makes a number of the list the newest."""
        if number != self._newest:
            self.remove(number)
            self.add(number)

    def in_order(self) -> list[int]:
        """All numbers, from the oldest.

        Raises:
            AssertionError: the two directions contradict each other.
        """
        numbers, before, number = [], LRU_END, self.oldest
        while number != LRU_END:
            assert self._older[number] == before
            numbers.append(number)
            before, number = number, self._newer[number]
        assert self._newest == before
        return numbers

    def digest(self) -> bytes:
        """Hash of the order."""
        return digest_of(array("i", self.in_order()))

    def _join(self, older: int, newer: int) -> None:
        if older == LRU_END:
            self.oldest = newer
        else:
            self._newer[older] = newer
        if newer == LRU_END:
            self._newest = older
        else:
            self._older[newer] = older


EMPTY_SET = 0
"""Number of the set without members."""
_MAX_REMEMBERED = 1 << 18


class InstanceSets:
    """Interned bit masks with remembered transitions."""

    def __init__(self) -> None:
        self.masks = [0]
        """Bit mask of each set, by number."""
        self._numbers = {0: EMPTY_SET}
        self._with: list[dict[int, int]] = []
        self._without: list[dict[int, int]] = []
        self._common: dict[tuple[int, int], int] = {}
        self._remembered = 0

    def __len__(self) -> int:
        """Sets that have a number."""
        return len(self.masks)

    def number(self, mask: int) -> int:
        """The number of the set with this mask."""
        found = self._numbers.get(mask)
        if found is None:
            found = self._numbers[mask] = len(self.masks)
            self.masks.append(mask)
        return found

    def additions(self, slot: int) -> dict[int, int]:
        """Set -> the set with `slot`, as far as `add` was asked; for loops that look up often."""
        return _set_table(self._with, slot)

    def removals(self, slot: int) -> dict[int, int]:
        """Set -> the set without `slot`, as far as `remove` was asked."""
        return _set_table(self._without, slot)

    def add(self, number: int, slot: int) -> int:
        """The set with `slot`."""
        self._remember()
        return _set_table(self._with, slot).setdefault(number, self.number(self.masks[number] | 1 << slot))

    def remove(self, number: int, slot: int) -> int:
        """The set without `slot`."""
        self._remember()
        return _set_table(self._without, slot).setdefault(number, self.number(self.masks[number] & ~(1 << slot)))

    def common(self, one: int, other: int) -> int:
        """The set of what both have."""
        if one == other:
            return one
        found = self._common.get((one, other))
        if found is None:
            self._remember()
            found = self._common[one, other] = self.number(self.masks[one] & self.masks[other])
        return found

    def keep(self, used: Iterable[int]) -> dict[int, int]:
        """Forgets all sets but these and the empty one; returns the new number of each."""
        kept = sorted({EMPTY_SET, *used})
        self.masks = [self.masks[number] for number in kept]
        self._numbers = {mask: number for number, mask in enumerate(self.masks)}
        self._forget()
        return {before: number for number, before in enumerate(kept)}

    def check_invariants(self) -> None:
        """Asserts that every mask has one number."""
        assert self.masks[EMPTY_SET] == 0
        assert self._numbers == {mask: number for number, mask in enumerate(self.masks)}

    def _remember(self) -> None:
        """Keeps what is remembered within bounds."""
        self._remembered += 1
        if self._remembered > _MAX_REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        for table in (*self._with, *self._without):
            table.clear()
        self._common.clear()
        self._remembered = 0


def slots_in(mask: int) -> Iterator[int]:
    """The slots of a mask, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _set_table(tables: list[dict[int, int]], slot: int) -> dict[int, int]:
    while len(tables) <= slot:
        tables.append({})
    return tables[slot]


ROOT = -1
"""Parent of a chain's first block."""
UNLINKED = -2
"""Parent of a block without a known chain."""
_MIN_SETS = 1 << 14


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
        """Number of blocks, with those that no instance holds."""
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, bytes) else None
        return node is not None and self._sets.masks[self._raw[node]] & ~self._lost != 0

    # --- holders ---------------------------------------------------------------------------------------------------

    def open_slot(self) -> int:
        """Opens a slot for a holder without blocks."""
        if self._free_slots:
            return heappop(self._free_slots)
        self._held.append(0)
        return len(self._held) - 1

    def close_slot(self, slot: int) -> None:
        """Forgets a holder with all blocks, at once; `sweep` makes the slot usable again."""
        if self._held[slot]:
            self._lost |= 1 << slot
            self._held[slot] = 0
        else:
            heappush(self._free_slots, slot)

    def held(self, slot: int) -> int:
        """Blocks of a holder."""
        return self._held[slot]

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether a holder holds a block."""
        node = self._nodes.get(key)
        return node is not None and bool(self._sets.masks[self._raw[node]] >> slot & 1)

    def part(self, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
        """Blocks at the places from `begin` up to `end`, with the mask of their holders."""
        for node in range(begin, min(end, len(self._keys))):
            key, mask = self._keys[node], self._sets.masks[self._raw[node]] & ~self._lost
            if key is not None and mask:
                yield key, mask

    @property
    def places(self) -> int:
        """Places for blocks, in use or not."""
        return len(self._keys)

    def store(self, slot: int, keys: Iterable[bytes], version: int) -> None:
        """Notes that a holder holds these blocks, as reported at `version`."""
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
        """Notes that a holder lacks these blocks; blocks reported after `version` stay, unknown ones are fine."""
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
        """How much of a chain everyone holds.

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
        """Links the chain as far as the blocks are known; returns how many are linked."""
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
        """Computes a block's closed set anew, and all sets below as far as they change."""
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
        """Removes a leaf that no instance holds, and ancestors that become such leaves."""
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
        """Forgets the leaf that was unused longest."""
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
        """Clears the bits of closed slots in some nodes; after a whole round the slots can be used again."""
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
        """Forgets sets that no block has when there are many."""
        if len(self._sets) < self._max_sets:
            return
        kept = self._sets.keep({*self._raw, *self._closed})
        self._raw = array("i", map(kept.__getitem__, self._raw))
        self._closed = array("i", map(kept.__getitem__, self._closed))
        self._max_sets = max(_MIN_SETS, 2 * len(self._sets))

    def digest(self) -> bytes:
        """Hash of the state."""
        nodes = list(self._nodes.items())
        arrays = (self._parent, self._child, self._raw, self._closed, self._told)
        slots = (self._held, self._free_slots, self._lost, self._sweeping, self._cursor)
        return digest_of(nodes, *arrays, self._leaves, self._sets.masks, *slots)

    def check_invariants(self) -> None:
        """Asserts that nodes, links, sets, counts and the list of leaves agree."""
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


NO_SLOT = -1
SWEEP_NODES = 2048
"""Nodes looked at with each message: some 0.2 ms."""


class KeyEventResult(Enum):
    """Result of an event message."""

    DONE = auto()
    """The index has taken the message."""
    RESYNC = auto()
    """An earlier message is missing: the instance's blocks were dropped, and a snapshot must be ordered."""
    IGNORED = auto()
    """A snapshot is awaited and this message did not begin a snapshot."""


@dataclass(slots=True)
class _Holder:
    """One instance. `next_sequence` is 0 while a snapshot is awaited; `synced` when the last one was complete.

    `memory` is the slot for blocks that are not on SSD only; NO_SLOT for an instance that does not tell.
    """

    slot: int
    memory: int = NO_SLOT
    next_sequence: int = 0
    synced: bool = False


class PrefixIndex:
    """KV blocks of instances by id. An instance has a slot, which changes when all blocks are dropped."""

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._trie = BlockTrie(max_blocks)
        self._holders: dict[str, _Holder] = {}
        self._owners: dict[int, str] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Messages applied so far."""
        return self._version

    def __len__(self) -> int:
        """Blocks."""
        return len(self._trie)

    def add_instance(self, instance_id: str, *, reports_ssd: bool = False) -> None:
        """Adds an empty instance; the first message must begin a snapshot.

        An earlier instance with the id is removed.

        With `reports_ssd`, the instance has a second slot for the blocks in memory.
        """
        self.remove_instance(instance_id)
        self._holders[instance_id] = holder = _Holder(self._trie.open_slot())
        self._owners[holder.slot] = instance_id
        if reports_ssd:
            holder.memory = self._trie.open_slot()

    def remove_instance(self, instance_id: str) -> None:
        """Forgets an instance with all blocks; unknown ids are fine."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            del self._owners[holder.slot]
            self._trie.close_slot(holder.slot)
            if holder.memory != NO_SLOT:
                self._trie.close_slot(holder.memory)
            self.sweep()

    def slot(self, instance_id: str) -> int:
        """An instance's current slot in the masks from `match`.

        Raises:
            KeyError: the instance was not added.
        """
        return self._holders[instance_id].slot

    def memory(self, instance_id: str) -> int:
        """The slot for blocks in memory, NO_SLOT if the instance does not tell.

        Raises:
            KeyError: the instance was not added.
        """
        return self._holders[instance_id].memory

    def apply(
        self,
        instance_id: str,
        sequence: int,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
        cooled: Iterable[bytes] = (),
        *,
        snapshot_begin: bool = False,
        snapshot_end: bool = False,
    ) -> KeyEventResult:
        """Applies one message from an instance. A key that is both stored and removed counts as removed.

        `cooled` are on SSD only, until stored again.

        Raises:
            KeyError: the instance was not added.
        """
        holder = self._holders[instance_id]
        self._version += 1
        self.sweep()
        if snapshot_begin:
            self._drop_all(instance_id, holder)
        elif holder.next_sequence == 0:
            return KeyEventResult.IGNORED
        elif sequence != holder.next_sequence:
            self._drop_all(instance_id, holder)
            return KeyEventResult.RESYNC
        holder.next_sequence = sequence + 1
        self._trie.store(holder.slot, stored, self._version)
        self._trie.drop(holder.slot, removed)
        if holder.memory != NO_SLOT:
            self._trie.store(holder.memory, stored, self._version)
            self._trie.drop(holder.memory, cooled)
            self._trie.drop(holder.memory, removed)
        holder.synced = holder.synced or snapshot_end
        return KeyEventResult.DONE

    def match(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Instances by length of the prefix they hold, as `BlockTrie.match` gives them."""
        return self._trie.match(keys)

    def continuable(
        self, keys: Sequence[bytes], prefixes: Sequence[tuple[int, int]], window_blocks: int
    ) -> list[tuple[int, int]]:
        """Prefixes (from `match`) cut to what a chain can be continued behind at each instance.

        The windowed slices of the last `window_blocks` blocks must be there, too, by keys of their own (`window_key`).
        """
        lengths = {slot: blocks for blocks, mask in prefixes for slot in slots_in(mask)}
        found: dict[int, int] = {}
        for holder in self._holders.values():
            end = self._last_border(holder.slot, keys[: lengths.get(holder.slot, 0)], window_blocks)
            found[holder.slot] = end
            if holder.memory != NO_SLOT:
                found[holder.memory] = min(end, lengths.get(holder.memory, 0))
        every = sorted({blocks for blocks in found.values() if blocks})
        return [(least, sum(1 << slot for slot, blocks in found.items() if blocks >= least)) for least in every]

    def _last_border(self, slot: int, keys: Sequence[bytes], window_blocks: int) -> int:
        end = len(keys)
        for index in reversed(range(end)):
            if end - index > window_blocks:
                break
            if not self._trie.holds(slot, window_key(keys[index])):
                end = index
        return end

    def parts(self, places: int) -> Iterator[dict[str, tuple[list[bytes], list[bytes]]]]:
        """All blocks of each instance, `places` places of the index at a time; and those of them on SSD only.

        The index may change between two parts.
        """
        memory_of = {holder.slot: holder.memory for holder in self._holders.values() if holder.memory != NO_SLOT}
        begin = 0
        while begin < self._trie.places:
            found: dict[str, tuple[list[bytes], list[bytes]]] = {}
            for key, mask in self._trie.part(begin, begin + places):
                for slot in slots_in(mask):
                    if slot in self._owners:
                        held, cold = found.setdefault(self._owners[slot], ([], []))
                        held.append(key)
                        if slot in memory_of and not mask >> memory_of[slot] & 1:
                            cold.append(key)
            yield found
            begin += places

    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the chain each instance holds; those with none are left out."""
        owners = self._owners
        return {owners[slot]: blocks for blocks, mask in self.match(keys) for slot in slots_in(mask) if slot in owners}

    def forget(self, instance_id: str, keys: Iterable[bytes], version: int) -> None:
        """Drops blocks that an instance was found to lack, until the instance reports them again.

        Those that were reported after `version`, the state of the index that promised them, are kept. Unknown instances
        and blocks are fine.
        """
        holder = self._holders.get(instance_id)
        if holder is not None:
            keys = list(keys)
            for slot in (holder.slot, holder.memory)[: 2 if holder.memory != NO_SLOT else 1]:
                self._trie.drop(slot, keys, version)

    def held(self, instance_id: str) -> int:
        """Blocks of an instance; 0 for an unknown one."""
        holder = self._holders.get(instance_id)
        return self._trie.held(holder.slot) if holder is not None else 0

    def holds(self, instance_id: str, key: bytes) -> bool:
        """Whether an instance holds a block."""
        holder = self._holders.get(instance_id)
        return holder is not None and self._trie.holds(holder.slot, key)

    def is_cold(self, instance_id: str, key: bytes) -> bool:
        """Whether an instance has a block on SSD only, as far as it tells."""
        holder = self._holders.get(instance_id)
        if holder is None or holder.memory == NO_SLOT:
            return False
        return self._trie.holds(holder.slot, key) and not self._trie.holds(holder.memory, key)

    def synced(self, instance_id: str) -> bool:
        """Whether an instance's snapshot is complete and no message was missed since."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.synced

    def sweep(self, max_nodes: int = SWEEP_NODES) -> bool:
        """Goes on removing what lost instances left in the trie; False if the trie is clean.

        Every message does a part of the sweep; without messages the sweep may wait.
        """
        self._trie.sweep(max_nodes)
        return self._trie.unswept

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._holders, self._version, self._trie)

    def check_invariants(self) -> None:
        """Asserts that instances, slots and the trie agree."""
        self._trie.check_invariants()
        assert self._owners == {holder.slot: instance_id for instance_id, holder in self._holders.items()}
        for holder in self._holders.values():
            assert holder.next_sequence or not (self._trie.held(holder.slot) or holder.synced)
            assert holder.memory == NO_SLOT or self._trie.held(holder.memory) <= self._trie.held(holder.slot)

    def _drop_all(self, instance_id: str, holder: _Holder) -> None:
        """Drops all knowledge about an instance at once, by giving the instance other slots."""
        holder.next_sequence, holder.synced = 0, False
        if self._trie.held(holder.slot):
            del self._owners[holder.slot]
            holder.slot = self._another(holder.slot)
            self._owners[holder.slot] = instance_id
            if holder.memory != NO_SLOT:
                holder.memory = self._another(holder.memory)
            self.sweep()

    def _another(self, slot: int) -> int:
        self._trie.close_slot(slot)
        return self._trie.open_slot()
