"""Which instance holds which KV blocks, as far as its events say: a replica that follows each instance's own list.

Follows sequence numbers and asks for a snapshot when a message is missing. Doubtful blocks are dropped: that is only a
cache miss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.core.digest import digest_of
from services.conductor.core.forest import Forest
from services.conductor.core.sets import members

NO_SLOT = -1
SWEEP_NODES = 2048
"""Nodes looked at with each message: some 0.2 ms."""


class Applied(Enum):
    """Result of an event message."""

    DONE = auto()
    """The index has it."""
    RESYNC = auto()
    """A message before it is missing; the instance's blocks were dropped and a snapshot is wanted."""
    IGNORED = auto()
    """A snapshot is awaited and this was not its beginning."""


@dataclass(slots=True)
class _Holder:
    """One instance. `next_sequence` is 0 while a snapshot is awaited; `synced` when the last one was complete.

    `memory` is the slot of what is not on its SSD only; NO_SLOT for an instance that does not tell.
    """

    slot: int
    memory: int = NO_SLOT
    next_sequence: int = 0
    synced: bool = False


class PrefixIndex:
    """Follows instances by id. Each has a slot, which changes when all it held is dropped."""

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._forest = Forest(max_blocks)
        self._holders: dict[str, _Holder] = {}
        self._owners: dict[int, str] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Messages applied so far."""
        return self._version

    def __len__(self) -> int:
        """Blocks."""
        return len(self._forest)

    def add_instance(self, instance_id: str, *, tells_cold: bool = False) -> None:
        """Adds an instance, empty; its first message must begin a snapshot. An earlier one of that id is removed.

        One that `tells_cold` has a second slot, for the blocks that are not on its SSD only.
        """
        self.remove_instance(instance_id)
        self._holders[instance_id] = holder = _Holder(self._forest.open_slot())
        self._owners[holder.slot] = instance_id
        if tells_cold:
            holder.memory = self._forest.open_slot()

    def remove_instance(self, instance_id: str) -> None:
        """Forgets an instance and everything it held; unknown ids are fine."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            del self._owners[holder.slot]
            self._forest.close_slot(holder.slot)
            if holder.memory != NO_SLOT:
                self._forest.close_slot(holder.memory)
            self.sweep()

    def slot(self, instance_id: str) -> int:
        """The slot of an instance in the masks of `match` now.

        Raises:
            KeyError: the instance was not added.
        """
        return self._holders[instance_id].slot

    def memory(self, instance_id: str) -> int:
        """The slot of what is in its memory, NO_SLOT where it does not tell.

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
    ) -> Applied:
        """Applies one message of an instance. A key that is both stored and removed counts as removed.

        `cooled` are on its SSD only, until they are stored again.

        Raises:
            KeyError: the instance was not added.
        """
        holder = self._holders[instance_id]
        self._version += 1
        self.sweep()
        if snapshot_begin:
            self._drop_all(instance_id, holder)
        elif holder.next_sequence == 0:
            return Applied.IGNORED
        elif sequence != holder.next_sequence:
            self._drop_all(instance_id, holder)
            return Applied.RESYNC
        holder.next_sequence = sequence + 1
        self._forest.store(holder.slot, stored, self._version)
        self._forest.drop(holder.slot, removed)
        if holder.memory != NO_SLOT:
            self._forest.store(holder.memory, stored, self._version)
            self._forest.drop(holder.memory, cooled)
            self._forest.drop(holder.memory, removed)
        holder.synced = holder.synced or snapshot_end
        return Applied.DONE

    def match(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Who holds how much of a chain, as `Forest.match` says it."""
        return self._forest.match(keys)

    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the chain each instance holds; those with none are left out."""
        owners = self._owners
        return {owners[slot]: blocks for blocks, mask in self.match(keys) for slot in members(mask) if slot in owners}

    def forget(self, instance_id: str, keys: Iterable[bytes], version: int) -> None:
        """Drops blocks that an instance was found not to hold, until it reports them again.

        Those that were reported after `version`, the state of the index that promised them, are kept. Unknown instances
        and blocks are fine.
        """
        holder = self._holders.get(instance_id)
        if holder is not None:
            keys = list(keys)
            for slot in (holder.slot, holder.memory)[: 2 if holder.memory != NO_SLOT else 1]:
                self._forest.drop(slot, keys, version)

    def held(self, instance_id: str) -> int:
        """Blocks of an instance; 0 for an unknown one."""
        holder = self._holders.get(instance_id)
        return self._forest.held(holder.slot) if holder is not None else 0

    def holds(self, instance_id: str, key: bytes) -> bool:
        """Whether an instance holds a block."""
        holder = self._holders.get(instance_id)
        return holder is not None and self._forest.holds(holder.slot, key)

    def synced(self, instance_id: str) -> bool:
        """Whether an instance's snapshot is complete and no message was missed since."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.synced

    def sweep(self, max_nodes: int = SWEEP_NODES) -> bool:
        """Goes on removing what lost instances left in the forest; False when nothing is left.

        Every message does a part of it; without messages it may wait.
        """
        self._forest.sweep(max_nodes)
        return self._forest.unswept

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._holders, self._version, self._forest)

    def check_invariants(self) -> None:
        """Asserts that instances, slots and the forest agree."""
        self._forest.check_invariants()
        assert self._owners == {holder.slot: instance_id for instance_id, holder in self._holders.items()}
        for holder in self._holders.values():
            assert holder.next_sequence or not (self._forest.held(holder.slot) or holder.synced)
            assert holder.memory == NO_SLOT or self._forest.held(holder.memory) <= self._forest.held(holder.slot)

    def _drop_all(self, instance_id: str, holder: _Holder) -> None:
        """Drops everything known of an instance at once, by giving it other slots."""
        holder.next_sequence, holder.synced = 0, False
        if self._forest.held(holder.slot):
            del self._owners[holder.slot]
            holder.slot = self._another(holder.slot)
            self._owners[holder.slot] = instance_id
            if holder.memory != NO_SLOT:
                holder.memory = self._another(holder.memory)
            self.sweep()

    def _another(self, slot: int) -> int:
        self._forest.close_slot(slot)
        return self._forest.open_slot()
