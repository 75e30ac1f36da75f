"""What the SSD tier holds, in memory: which record of which segment is which block.

Per block that is one entry of a dict, its key, one integer and 21 bytes in arrays.
A block's *place* is its segment's id and its *slot*, the index of its record within that segment. A slot is dead
when its key has another place, or none: its bytes are free once the segment is reclaimed.
"""

import collections
import dataclasses
import struct
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.parts import PartTable
from moonpool.kv.selection import Selection, ttl_of
from services.kvstore.ssd.records import ALIGN
from services.kvstore.tenancy.tenants import Account, TenantBytes

T = TypeVar("T")


class Kind(NamedTuple):
    """What many blocks have in common."""

    format: BlockFormat
    tenant: str


ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, number of its kind in its segment, `written_at`.
"""

Row = tuple[BlockKey, int, int, int, int]  # the same, unpacked
Slot = tuple[int, int]  # number of a segment of one disk, and index of a record within it
MAX_SEGMENT_BYTES = ALIGN << 32
_SLOT_BITS = 24
_NUMBER_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


def _column() -> "array[int]":
    return array("I")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment as the event loop knows it. The columns, from `keys` on, have one item per slot."""

    number: int  # on its disk, ascending: older segments have lower ones
    path: Path
    size: int = 0  # committed bytes
    disk: int = 0
    room: int = 0  # bytes of its file, if that was an older segment's, whose records may lie behind `size` still
    overwritable: bool = False  # its records say that they are of it, and no block in them looks like a record
    live: TenantBytes = dataclasses.field(default_factory=TenantBytes)  # of records whose block has its place here
    readers: int = 0  # of its records; it is not reclaimed while there are any
    going: bool = False  # it is being reclaimed
    removed: bool = False  # the index has forgotten it and the file has no name; the last reader closes it
    kept_share: float = 0.0  # of it must stay (0 to 1), as found for the plan number `asked_at`
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)  # in units of `ALIGN`, as the lengths
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    kinds: "array[int]" = dataclasses.field(default_factory=_column)  # numbers of them
    written: "array[int]" = dataclasses.field(default_factory=_column)  # seconds since 1970
    erased: set[int] = dataclasses.field(default_factory=set)  # slots whose records are, or are to be, overwritten
    used: bytearray = dataclasses.field(default_factory=bytearray)  # 1: the block was used since it was written here
    named: list[Kind] = dataclasses.field(default_factory=list)  # kinds by number; they go with the segment
    numbers: dict[Kind, int] = dataclasses.field(init=False)
    id: int = dataclasses.field(init=False)  # no other segment has it, on whatever disk

    def __post_init__(self) -> None:
        self.id = self.disk << _NUMBER_BITS | self.number
        self.numbers = {kind: number for number, kind in enumerate(self.named)}

    def offset(self, slot: int) -> int:
        return self.starts[slot] * ALIGN

    def nbytes(self, slot: int) -> int:
        return self.lengths[slot] * ALIGN

    def kind(self, slot: int) -> Kind:
        return self.named[self.kinds[slot]]

    def number_of(self, kind: Kind) -> int:
        """The number of a kind in this segment; a new one if it has none."""
        number = self.numbers.setdefault(kind, len(self.named))
        if number == len(self.named):
            self.named.append(kind)
        return number


Place = tuple[Segment, int]  # and a slot of it
Wanted = Callable[[Segment, int], bool]


class Catalogue(PartTable[int]):
    """All segments by id, those of one disk ascending, and the places of all blocks."""

    def __init__(self, account: Account | None = None) -> None:
        super().__init__()
        self.segments: dict[int, Segment] = {}
        self.account = account or Account()
        self.live = self.account.used  # bytes of the records that are places of blocks
        self.coming = TenantBytes()  # of new blocks in plans under way
        self.doubles: list[Place] = []  # copies that are dead for another one's sake; no index knows that they are

    def kind_of(self, key: BlockKey) -> Kind | None:
        found = self.find(key)
        return None if found is None else found[0].kind(found[1])

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        place = self.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> _SLOT_BITS], place & _SLOT_MASK)

    def is_live(self, segment: Segment, slot: int) -> bool:
        key = segment.keys[slot]
        return self.parts[key[0]].get(key) == segment.id << _SLOT_BITS | slot

    def live_slots(self, segment: Segment) -> Iterator[int]:
        """Slots of a segment that are places of blocks, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.id << _SLOT_BITS
        parts = self.parts
        for slot, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | slot:
                yield slot

    def by_age(self) -> list[Segment]:
        """Segments of all disks in the order in which their last blocks were put; those of one second as they came."""
        return sorted(self.segments.values(), key=lambda segment: segment.written[-1] if segment.written else 0)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, of at most `step` slots at a time; none that come meanwhile."""
        for segment in reversed(self.by_age()):
            if self.segments.get(segment.id) is not segment:
                continue
            for end in range(len(segment.keys), 0, -step):
                slots = range(end - 1, max(end - step, 0) - 1, -1)
                yield [segment.keys[slot] for slot in slots if self.is_live(segment, slot)]

    def oldest_of(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of a tenant but those that `stays`: `nbytes` of records at least, or all there are."""
        found: list[BlockKey] = []
        for segment in self.by_age():
            for slot in self.live_slots(segment) if tenant in segment.live else ():
                if nbytes <= 0:
                    return found
                key = segment.keys[slot]
                if segment.kind(slot).tenant == tenant and not stays(key):
                    found.append(key)
                    nbytes -= segment.nbytes(slot)
        return found

    def chosen(self, selection: Selection) -> Wanted:
        """Tells whether a record is of a chosen block."""
        of_kind = self._by_kind(
            lambda kind: kind.tenant in selection.tenants or kind.format.namespace in selection.namespaces
        )
        keys = selection.keys
        return lambda segment, slot: of_kind(segment, slot) or segment.keys[slot] in keys

    def expired(self, ttl_s: Mapping[str, float], now: float) -> Wanted:
        """Tells whether a record is here for longer than its tenant's blocks may be."""
        oldest = self._by_kind(lambda kind: now - ttl_of(ttl_s, kind.tenant))
        return lambda segment, slot: segment.written[slot] < oldest(segment, slot)

    def _by_kind(self, judge: Callable[[Kind], T]) -> Callable[[Segment, int], T]:
        """Judges each kind of a segment once, with its first record; segments and kinds may come later."""
        judged: dict[Segment, dict[int, T]] = collections.defaultdict(dict)

        def of_kind(segment: Segment, slot: int) -> T:
            known, number = judged[segment], segment.kinds[slot]
            if number not in known:
                known[number] = judge(segment.named[number])
            return known[number]

        return of_kind

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
        for segment, slot in filter(None, map(self.find, keys)):
            segment.used[slot] = 1

    def add(self, segment: Segment, packed: bytes, dead: Container[int] = ()) -> None:
        """Entries were appended to a segment; `dead` slots of it come dead.

        Of a key that is on another disk, that copy stays the block's place; else the later one is. Adds to `doubles`.
        """
        self.segments[segment.id] = segment
        first = len(segment.keys)
        keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
        numbers = array("I", packed)
        if sys.byteorder != "little":
            numbers.byteswap()
        columns = (segment.starts, segment.lengths, segment.kinds, segment.written)
        for word, column in enumerate(columns, KEY_BYTES // 4):
            column.extend(numbers[word :: ENTRY.size // 4])
        segment.keys += keys
        segment.used += bytes(len(keys))
        assert len(segment.keys) <= _SLOT_MASK
        sums: collections.Counter[int] = collections.Counter()
        for kind, length in zip(segment.kinds[first:], segment.lengths[first:], strict=True):
            sums[kind] += length * ALIGN
        for kind, nbytes in sums.items():
            self._count(segment, segment.named[kind].tenant, nbytes)
        parts = self.parts
        for place, key in enumerate(keys, segment.id << _SLOT_BITS | first):
            part, slot = parts[key[0]], place & _SLOT_MASK
            before = part.setdefault(key, place)
            if before == place and slot not in dead:
                continue  # nearly always
            if slot in dead or before >> _SLOT_BITS + _NUMBER_BITS != segment.disk:
                self._count(segment, segment.kind(slot).tenant, -segment.nbytes(slot))
                if slot not in dead:
                    self.doubles.append((segment, slot))
                elif before == place:
                    del part[key]
            elif (found := self.forget(key)) is not None:
                self.doubles.append(found)
                part[key] = place

    def _count(self, segment: Segment, tenant: str, nbytes: int) -> None:
        segment.live.add(tenant, nbytes)
        self.live.add(tenant, nbytes)

    def forget(self, key: BlockKey) -> Place | None:
        """A block has no place any more; returns the one it had."""
        found = self.find(key)
        if found is None:
            return None
        segment, slot = found
        del self[key]
        self._count(segment, segment.kind(slot).tenant, -segment.nbytes(slot))
        return found

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for slot in list(self.live_slots(segment)):
            self.forget(segment.keys[slot])
        self.segments.pop(segment.id, None)
