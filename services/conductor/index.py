"""The prefix index: which instance holds which KV blocks, as far as its events say.

Follows each instance's sequence numbers and asks for a resync when one is missing; doubtful keys are dropped, as that
is only a cache miss. Pure; knows instances by id.

Each key maps to a bit mask of instances, so one walk along a chain gives the longest prefix of every instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice


class Applied(Enum):
    """Result of an event message."""

    DONE = auto()
    """The index has it."""
    RESYNC = auto()
    """A message before it is missing; the instance's keys were dropped and a snapshot is wanted."""
    IGNORED = auto()
    """A snapshot is awaited and this was not its beginning."""


@dataclass(slots=True)
class _Holder:
    """One instance's part of the index."""

    bit: int
    keys: dict[bytes, int] = field(default_factory=dict)  # version of the last report; oldest key first
    next_sequence: int = 0  # 0 = a snapshot is awaited
    synced: bool = False  # the snapshot was complete


class PrefixIndex:
    """Key -> instances, bounded per instance: beyond the bound an instance's oldest keys are forgotten."""

    def __init__(self, max_keys_per_instance: int = 4_000_000) -> None:
        if max_keys_per_instance < 1:
            raise ValueError("max_keys_per_instance must be positive")
        self._limit = max_keys_per_instance
        self._holders: dict[str, _Holder] = {}
        self._masks: dict[bytes, int] = {}
        self._by_bit: dict[int, str] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Messages applied so far."""
        return self._version

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._masks)

    def add_instance(self, instance_id: str) -> None:
        """Add an instance, empty; its first message must begin a snapshot. An earlier one of that id is removed."""
        self.remove_instance(instance_id)
        position = next(i for i in range(len(self._by_bit) + 1) if 1 << i not in self._by_bit)
        self._by_bit[1 << position] = instance_id
        self._holders[instance_id] = _Holder(bit=1 << position)

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance and everything it held; unknown ids are fine."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            self._forget(holder, list(holder.keys))
            del self._by_bit[holder.bit]

    def apply(
        self,
        instance_id: str,
        sequence: int,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
        *,
        snapshot_begin: bool = False,
        snapshot_end: bool = False,
    ) -> Applied:
        """Apply one message of an instance. A key that is both stored and removed counts as removed.

        Raises:
            KeyError: the instance was not added.
        """
        holder = self._holders[instance_id]
        self._version += 1
        if snapshot_begin:
            self._forget(holder, list(holder.keys))
            holder.synced = False
        elif holder.next_sequence == 0:
            return Applied.IGNORED
        elif sequence != holder.next_sequence:
            self._forget(holder, list(holder.keys))
            holder.next_sequence = 0
            holder.synced = False
            return Applied.RESYNC
        holder.next_sequence = sequence + 1
        self._remember(holder, stored)
        self._forget(holder, removed)
        if snapshot_end:
            holder.synced = True
        return Applied.DONE

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return for each instance how many leading keys of the chain it holds; those with none are left out."""
        lengths: dict[str, int] = {}
        alive = -1
        masks = self._masks
        for position, key in enumerate(keys):
            now = alive & masks.get(key, 0)
            if position and now != alive:
                self._note(lengths, alive & ~now, position)
            alive = now
            if not alive:
                break
        else:
            if keys:
                self._note(lengths, alive, len(keys))
        return lengths

    def forget(self, instance_id: str, keys: Iterable[bytes], version: int) -> None:
        """Drop keys that an instance was found not to hold, until it reports them again.

        Those that it reported after `version`, the state of the index that promised them, are kept. Unknown instances
        and keys are fine.
        """
        holder = self._holders.get(instance_id)
        if holder is not None:
            self._forget(holder, [key for key in keys if holder.keys.get(key, version) <= version])

    def held(self, instance_id: str) -> int:
        """Keys listed for an instance; 0 for an unknown one."""
        holder = self._holders.get(instance_id)
        return len(holder.keys) if holder is not None else 0

    def synced(self, instance_id: str) -> bool:
        """Whether an instance's snapshot is complete and no message was missed since."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.synced

    def check_invariants(self) -> None:
        """Raise AssertionError when masks and instances contradict each other."""
        masks: dict[bytes, int] = {}
        for instance_id, holder in self._holders.items():
            assert self._by_bit[holder.bit] == instance_id
            assert holder.bit.bit_count() == 1
            assert len(holder.keys) <= self._limit
            assert holder.next_sequence or not (holder.keys or holder.synced)
            for key in holder.keys:
                masks[key] = masks.get(key, 0) | holder.bit
        assert len(self._by_bit) == len(self._holders)
        assert masks == self._masks

    def _remember(self, holder: _Holder, keys: Iterable[bytes]) -> None:
        masks, bit, version = self._masks, holder.bit, self._version
        for key in keys:
            if key not in holder.keys:
                masks[key] = masks.get(key, 0) | bit
            holder.keys[key] = version
        if len(holder.keys) > self._limit:
            # Several at once: finding the first key of a dict is slow after many were deleted before it.
            spare = max(1, self._limit // 16) - 1
            surplus = min(len(holder.keys) - self._limit + spare, len(holder.keys))
            self._forget(holder, list(islice(holder.keys, surplus)))

    def _forget(self, holder: _Holder, keys: Iterable[bytes]) -> None:
        masks, bit = self._masks, holder.bit
        for key in keys:
            if key not in holder.keys:
                continue
            del holder.keys[key]
            rest = masks[key] & ~bit
            if rest:
                masks[key] = rest
            else:
                del masks[key]

    def _note(self, lengths: dict[str, int], bits: int, length: int) -> None:
        while bits:
            lowest = bits & -bits
            lengths[self._by_bit[lowest]] = length
            bits ^= lowest
