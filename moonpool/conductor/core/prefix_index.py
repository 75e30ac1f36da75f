"""Which instances hold which KV blocks, fed by KV events.

Gaps in an instance's events are found by sequence number and healed by a snapshot; a doubtful block is dropped, which
costs a cache miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.base.kv.keys import window_key
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.block_trie import BlockTrie
from moonpool.conductor.core.instance_sets import slots_in

NO_SLOT = -1
SWEEP_NODES = 2048
"""Nodes looked at with each message: some 0.2 ms."""


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
        return len(self._trie)

    def add_instance(self, instance_id: str, *, reports_ssd: bool = False) -> None:
        """Add an empty instance; the first message must begin a snapshot.

        An earlier instance with the id is removed.

        With `reports_ssd`, the instance has a second slot for the blocks in memory.
        """
        self.remove_instance(instance_id)
        self._holders[instance_id] = holder = _Holder(self._trie.open_slot())
        self._owners[holder.slot] = instance_id
        if reports_ssd:
            holder.memory = self._trie.open_slot()

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance with all blocks; unknown ids are fine."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            del self._owners[holder.slot]
            self._trie.close_slot(holder.slot)
            if holder.memory != NO_SLOT:
                self._trie.close_slot(holder.memory)
            self.sweep()

    def slot(self, instance_id: str) -> int:
        """Return an instance's current slot in the masks from `match`.

        Raises:
            KeyError: the instance was not added.
        """
        return self._holders[instance_id].slot

    def memory(self, instance_id: str) -> int:
        """Return the slot for blocks in memory, NO_SLOT if the instance does not tell.

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
        """Apply one message from an instance. A key that is both stored and removed counts as removed.

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
        elif sequence != holder.next_sequence:  # a block that left unseen would be promised for ever
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
        """Return the instances by length of the prefix they hold, as `BlockTrie.match` gives them."""
        return self._trie.match(keys)

    def continuable(
        self, keys: Sequence[bytes], prefixes: Sequence[tuple[int, int]], window_blocks: int
    ) -> list[tuple[int, int]]:
        """Return the prefixes (from `match`) cut to what a chain can be continued behind at each instance.

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
        """Return all blocks of each instance, `places` places of the index at a time; and those of them on SSD only.

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
        """Return how many leading blocks of the chain each instance holds; those with none are left out."""
        owners = self._owners
        return {owners[slot]: blocks for blocks, mask in self.match(keys) for slot in slots_in(mask) if slot in owners}

    def forget(self, instance_id: str, keys: Iterable[bytes], version: int) -> None:
        """Drop blocks that an instance was found to lack, until the instance reports them again.

        Those that were reported after `version`, the state of the index that promised them, are kept. Unknown instances
        and blocks are fine.
        """
        holder = self._holders.get(instance_id)
        if holder is not None:
            keys = list(keys)
            for slot in (holder.slot, holder.memory)[: 2 if holder.memory != NO_SLOT else 1]:
                self._trie.drop(slot, keys, version)

    def held(self, instance_id: str) -> int:
        """Return the number of blocks of an instance; 0 for an unknown one."""
        holder = self._holders.get(instance_id)
        return self._trie.held(holder.slot) if holder is not None else 0

    def holds(self, instance_id: str, key: bytes) -> bool:
        """Return whether an instance holds a block."""
        holder = self._holders.get(instance_id)
        return holder is not None and self._trie.holds(holder.slot, key)

    def is_cold(self, instance_id: str, key: bytes) -> bool:
        """Return whether an instance has a block on SSD only, as far as it tells."""
        holder = self._holders.get(instance_id)
        if holder is None or holder.memory == NO_SLOT:
            return False
        return self._trie.holds(holder.slot, key) and not self._trie.holds(holder.memory, key)

    def synced(self, instance_id: str) -> bool:
        """Return whether an instance's snapshot is complete and no message was missed since."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.synced

    def sweep(self, max_nodes: int = SWEEP_NODES) -> bool:
        """Go on removing what lost instances left in the trie; False if the trie is clean.

        Every message does a part of the sweep; without messages the sweep may wait.
        """
        self._trie.sweep(max_nodes)
        return self._trie.unswept

    def digest(self) -> bytes:
        return digest_of(self._holders, self._version, self._trie)

    def check_invariants(self) -> None:
        """Assert that instances, slots and the trie agree."""
        self._trie.check_invariants()
        assert self._owners == {holder.slot: instance_id for instance_id, holder in self._holders.items()}
        for holder in self._holders.values():
            assert holder.next_sequence or not (self._trie.held(holder.slot) or holder.synced)
            assert holder.memory == NO_SLOT or self._trie.held(holder.memory) <= self._trie.held(holder.slot)

    def _drop_all(self, instance_id: str, holder: _Holder) -> None:
        """Drop all knowledge about an instance at once, by giving the instance other slots."""
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
