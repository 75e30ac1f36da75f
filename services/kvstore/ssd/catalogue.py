"""What the SSD tier holds, in memory: which record of which segment is which block.

Built to be small: per block one entry of a dict, its key, one integer and 25 bytes in arrays.

A block's *place* is its segment's number and its *slot*, the index of its record within that segment. A slot is dead
when its key has another place, or none: its bytes are free once the segment is reclaimed.
"""

import collections
import dataclasses
import struct
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.parts import PartTable
from moonpool.kv.selection import Selection, ttl_of
from services.kvstore.ssd.records import ALIGN
from services.kvstore.tenancy.tenants import Account, TenantBytes

Name = TypeVar("Name", bound=Hashable)


class IdChange(NamedTuple, Generic[Name]):
    """Ids that the index does not have, and those that it need not have any more."""

    new: dict[int, Name]
    unused: frozenset[int]


NO_CHANGE: IdChange[Any] = IdChange({}, frozenset())


class IdTable(Generic[Name]):
    """Ids of names, as long as some record uses them. An id is given once.

    A name stays as long as a record uses it, live or dead; so the disk bounds the names, however many clients invent.
    `known` are the ids that the index has; `by_id` are names in use, and those new since the last `settle`.
    """

    def __init__(self, known: Mapping[int, Name]) -> None:
        self.by_id: dict[int, Name] = dict(known)
        self._ids = {name: number for number, name in known.items()}
        self._uses: collections.Counter[int] = collections.Counter()
        self._idle = set(known)  # without a use
        self._new: dict[int, Name] = {}  # the index does not have them
        self._surplus: set[int] = set()  # the index has them, and they have no use
        self._last = max(known, default=0)

    def __getitem__(self, number: int) -> Name:
        return self.by_id[number]

    def id_of(self, name: Name) -> int:
        """The id of `name`; a new one if it has none."""
        number = self._ids.get(name)
        if number is None:
            number = self._last = self._last + 1
            self._ids[name] = number
            self.by_id[number] = self._new[number] = name
            self._idle.add(number)
        return number

    def use(self, numbers: Iterable[int]) -> None:
        """Each of these is used once more, as often as it comes."""
        coming = collections.Counter(numbers)
        self._uses.update(coming)
        self._idle.difference_update(coming)

    def unuse(self, numbers: Iterable[int]) -> None:
        """The opposite of `use`."""
        for number, count in collections.Counter(numbers).items():
            self._uses[number] -= count
            assert self._uses[number] >= 0
            if not self._uses[number]:
                del self._uses[number]
                self._idle.add(number)

    def change(self) -> IdChange[Name]:
        """What the next transaction must say."""
        return IdChange(dict(self._new), frozenset(self._surplus))

    def settle(self, *, written: bool) -> None:
        """Forgets ids without a use, once the plan with the last `change` is over. `written`: the index has it."""
        if written:
            self._new.clear()
            self._surplus.clear()
        for number in self._idle:
            name = self.by_id.pop(number)
            if self._ids.get(name) == number:  # else the name got another id before the index forgot this one
                del self._ids[name]
            if self._new.pop(number, None) is None:
                self._surplus.add(number)
        self._idle.clear()

    def check_invariants(self, numbers: Iterable[int]) -> None:
        """Counts the uses anew; each used id has a name."""
        assert self._uses == collections.Counter(numbers)
        assert self._uses.keys() | self._idle == self.by_id.keys()
        assert all(self.by_id[number] == name for name, number in self._ids.items())


ENTRY = struct.Struct("<32sIIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, ids of format and tenant, `written_at`."""

Row = tuple[BlockKey, int, int, int, int, int]  # the same, unpacked
Slot = tuple[int, int]  # number of a segment, and index of a record within it
MAX_SEGMENT_BYTES = ALIGN << 32
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1


def _column() -> "array[int]":
    return array("I")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment as the event loop knows it. The columns, from `keys` on, have one item per slot."""

    number: int  # ascending: older segments have lower ones
    path: Path
    size: int = 0  # committed bytes
    live: TenantBytes = dataclasses.field(default_factory=TenantBytes)  # of records whose block has its place here
    readers: int = 0  # of its records; it is not reclaimed while there are any
    going: bool = False  # it is being reclaimed
    removed: bool = False  # the index has forgotten it and the file has no name; the last reader closes it
    kept_share: float = 0.0  # of it must stay (0 to 1), as found for the plan number `asked_at`
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)  # in units of `ALIGN`, as the lengths
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    formats: "array[int]" = dataclasses.field(default_factory=_column)  # ids, as the tenants
    tenants: "array[int]" = dataclasses.field(default_factory=_column)
    written: "array[int]" = dataclasses.field(default_factory=_column)  # seconds since 1970
    erased: set[int] = dataclasses.field(default_factory=set)  # slots whose records are, or are to be, overwritten
    used: bytearray = dataclasses.field(default_factory=bytearray)  # 1: the block was used since it was written here

    def offset(self, slot: int) -> int:
        return self.starts[slot] * ALIGN

    def nbytes(self, slot: int) -> int:
        return self.lengths[slot] * ALIGN

    def row(self, slot: int) -> Row:
        columns = (self.starts, self.lengths, self.formats, self.tenants, self.written)
        start, length, format_id, tenant_id, written = (column[slot] for column in columns)
        return self.keys[slot], start, length, format_id, tenant_id, written


Place = tuple[Segment, int]  # and a slot of it
Wanted = Callable[[Segment, int], bool]


class Catalogue(PartTable[int]):
    """All segments, by number and ascending, and the places of all blocks."""

    def __init__(
        self, formats: Mapping[int, BlockFormat], tenants: Mapping[int, str], account: Account | None = None
    ) -> None:
        super().__init__()
        self.formats = IdTable(formats)
        self.tenants = IdTable(tenants)
        self.segments: dict[int, Segment] = {}
        self.live = (account or Account()).used  # bytes of the records that are places of blocks

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """A block's format; None when it is not here."""
        found = self.find(key)
        return None if found is None else self.formats[found[0].formats[found[1]]]

    def tenant_of(self, key: BlockKey) -> str | None:
        """A block's tenant; None when it is not here."""
        found = self.find(key)
        return None if found is None else self.tenants[found[0].tenants[found[1]]]

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        """A block's segment and slot; None when it is not here."""
        place = self.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> _SLOT_BITS], place & _SLOT_MASK)

    def is_live(self, segment: Segment, slot: int) -> bool:
        """Whether that is the place of its block."""
        key = segment.keys[slot]
        return self.parts[key[0]].get(key) == segment.number << _SLOT_BITS | slot

    def live_slots(self, segment: Segment) -> Iterator[int]:
        """Slots of a segment that are places of blocks, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.number << _SLOT_BITS
        parts = self.parts
        for slot, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | slot:
                yield slot

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, those of at most `step` slots at a time; none that come meanwhile."""
        for number in reversed(list(self.segments)):
            segment = self.segments.get(number)
            if segment is None:
                continue
            for end in range(len(segment.keys), 0, -step):
                slots = range(end - 1, max(end - step, 0) - 1, -1)
                yield [segment.keys[slot] for slot in slots if self.is_live(segment, slot)]

    def oldest_of(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of a tenant but those that `stays`: `nbytes` of records at least, or all there are."""
        found: list[BlockKey] = []
        for segment in self.segments.values():
            for slot in self.live_slots(segment) if tenant in segment.live else ():
                if nbytes <= 0:
                    return found
                key = segment.keys[slot]
                if self.tenants[segment.tenants[slot]] == tenant and not stays(key):
                    found.append(key)
                    nbytes -= segment.nbytes(slot)
        return found

    def chosen(self, selection: Selection) -> Wanted:
        """Tells whether a record is of a chosen block."""
        tenants = {number for number, name in self.tenants.by_id.items() if name in selection.tenants}
        formats = {number for number, one in self.formats.by_id.items() if one.namespace in selection.namespaces}
        keys = selection.keys
        return lambda segment, slot: (
            segment.tenants[slot] in tenants or segment.formats[slot] in formats or segment.keys[slot] in keys
        )

    def expired(self, ttl_s: Mapping[str, float], now: float) -> Wanted:
        """Tells whether a record is here for longer than its tenant's blocks may be."""
        oldest = {number: now - ttl_of(ttl_s, name) for number, name in self.tenants.by_id.items()}
        return lambda segment, slot: segment.written[slot] < oldest[segment.tenants[slot]]

    def places(self, part: int, wanted: Wanted) -> list[Place]:
        """Places of those blocks of a part whose records are wanted."""
        found = ((self.segments[place >> _SLOT_BITS], place & _SLOT_MASK) for place in self.parts[part].values())
        return [(segment, slot) for segment, slot in found if wanted(segment, slot)]

    def dead(self, segment: Segment, slots: range, wanted: Wanted) -> list[Place]:
        """Dead slots among these whose records are wanted, and are not to be overwritten already."""
        return [
            (segment, slot)
            for slot in slots
            if wanted(segment, slot) and slot not in segment.erased and not self.is_live(segment, slot)
        ]

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Those of the blocks that are here were used."""
        for segment, slot in filter(None, map(self.find, keys)):
            segment.used[slot] = 1

    def add(self, segment: Segment, packed: bytes) -> None:
        """Entries were appended to a segment; of a key that was here before, or comes twice, the later one wins."""
        self.segments[segment.number] = segment
        first = len(segment.keys)
        keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
        numbers = array("I", packed)
        if sys.byteorder != "little":
            numbers.byteswap()
        columns = (segment.starts, segment.lengths, segment.formats, segment.tenants, segment.written)
        for word, column in enumerate(columns, KEY_BYTES // 4):
            column.extend(numbers[word :: ENTRY.size // 4])
        segment.keys += keys
        segment.used += bytes(len(keys))
        assert len(segment.keys) <= _SLOT_MASK
        lengths, tenants = segment.lengths[first:], segment.tenants[first:]
        self.formats.use(segment.formats[first:])
        self.tenants.use(tenants)
        sums: collections.Counter[int] = collections.Counter()
        for tenant, length in zip(tenants, lengths, strict=True):
            sums[tenant] += length * ALIGN
        for tenant, nbytes in sums.items():
            self._count(segment, tenant, nbytes)
        parts = self.parts
        for place, key in enumerate(keys, segment.number << _SLOT_BITS | first):
            if parts[key[0]].setdefault(key, place) != place:
                self.forget(key)
                parts[key[0]][key] = place

    def _count(self, segment: Segment, tenant: int, nbytes: int) -> None:
        """So many bytes of a segment and a tenant's are live now; or, where they are negative, no longer."""
        name = self.tenants[tenant]
        segment.live.add(name, nbytes)
        self.live.add(name, nbytes)

    def forget(self, key: BlockKey) -> Slot | None:
        """A block has no place any more; returns the one it had."""
        found = self.find(key)
        if found is None:
            return None
        segment, slot = found
        del self[key]
        self._count(segment, segment.tenants[slot], -segment.nbytes(slot))
        return segment.number, slot

    def mark_dead(self, number: int, slot: int) -> None:
        """A slot is dead, if it is there; if it was the place of its block, the block is forgotten."""
        segment = self.segments.get(number)
        if segment is not None and slot < len(segment.keys) and self.is_live(segment, slot):
            self.forget(segment.keys[slot])

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for slot in list(self.live_slots(segment)):
            self.forget(segment.keys[slot])
        self.segments.pop(segment.number, None)
        self.formats.unuse(segment.formats)
        self.tenants.unuse(segment.tenants)

    def check_invariants(self, leaving: Iterable[Segment] = ()) -> None:
        """Places, bytes and ids agree with each other; the ids of `leaving` segments are in use too."""
        live = TenantBytes()
        for number, segment in self.segments.items():
            assert segment.number == number
            assert segment.size
            assert not segment.going
            assert segment.readers >= 0
            slots = list(self.live_slots(segment))
            assert all(segment.offset(slot) + segment.nbytes(slot) <= segment.size for slot in slots)
            assert segment.live == TenantBytes.of(
                (self.tenants[segment.tenants[slot]], segment.nbytes(slot)) for slot in slots
            )
            columns = (segment.starts, segment.lengths, segment.formats, segment.tenants, segment.written, segment.used)
            assert {len(segment.keys)} == set(map(len, columns))
            for tenant, nbytes in segment.live.items():
                live.add(tenant, nbytes)
        for key, place in self.items():
            assert self.segments[place >> _SLOT_BITS].keys[place & _SLOT_MASK] == key
        assert self.live == live
        assert self.live.total_bytes == live.total_bytes
        segments = [*self.segments.values(), *leaving]
        self.formats.check_invariants(number for segment in segments for number in segment.formats)
        self.tenants.check_invariants(number for segment in segments for number in segment.tenants)
