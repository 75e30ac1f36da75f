"""What the SSD tier holds, in memory: which record of which segment is which block.

Built to be small: per block one entry of a dict, its key, one integer and 21 bytes in arrays.

A block's *place* is its segment's number and its *slot*, the index of its record within that segment. A slot is dead
when its key has another place, or none: its bytes are free once the segment is reclaimed.
"""

import collections
import dataclasses
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.parts import PartTable
from services.kvstore.ssd.id_table import IdTable
from services.kvstore.ssd.records import ALIGN
from services.kvstore.tenancy.protection import TierAccount

ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, id of the format, id of the tenant."""

Row = tuple[BlockKey, int, int, int, int]
"""The same, unpacked."""

Slot = tuple[int, int]
"""Number of a segment, and index of a record within it."""

MAX_SEGMENT_BYTES = ALIGN << 32
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1


def _column() -> "array[int]":
    return array("I")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment as the event loop knows it. The columns, from `keys` on, have one item per slot.

    Attributes:
        number: its id; ascending with age.
        size: committed bytes.
        live_bytes: of records whose block has its place here.
        readers: of its records; it is not reclaimed while there are any.
        going: it is being reclaimed.
        removed: the index has forgotten it and the file has no name; the last reader closes it.
        kept_bytes, asked_at: how much of it must stay, as found for the plan with that number.
        starts, lengths: where the records lie, in units of `ALIGN`.
        used: 1 for blocks that were used since they were written here.
    """

    number: int
    path: Path
    size: int = 0
    live_bytes: int = 0
    readers: int = 0
    going: bool = False
    removed: bool = False
    kept_bytes: int = 0
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    formats: "array[int]" = dataclasses.field(default_factory=_column)
    tenants: "array[int]" = dataclasses.field(default_factory=_column)
    used: bytearray = dataclasses.field(default_factory=bytearray)

    def offset(self, slot: int) -> int:
        return self.starts[slot] * ALIGN

    def nbytes(self, slot: int) -> int:
        return self.lengths[slot] * ALIGN

    def row(self, slot: int) -> Row:
        return self.keys[slot], self.starts[slot], self.lengths[slot], self.formats[slot], self.tenants[slot]


class Catalogue:
    """All segments, by number and ascending, and all blocks.

    `account` is told the tenant and the bytes of every record that becomes a block's place or stops being one.
    """

    def __init__(
        self, formats: Mapping[int, BlockFormat], tenants: Mapping[int, str], account: TierAccount | None = None
    ) -> None:
        self.formats = IdTable(formats)
        self.tenants = IdTable(tenants)
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self._account = account
        self._places = PartTable[int]()
        self._oldest: dict[str, int] = {}  # tenant -> the first segment that may have blocks of it

    def __contains__(self, key: bytes) -> bool:
        return key in self._places.parts[key[0]]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._places)

    def part(self, number: int) -> Iterable[BlockKey]:
        return self._places.parts[number]

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of live records by tenant, counted anew: slow."""
        sums: collections.Counter[str] = collections.Counter()
        for segment in self.segments.values():
            for slot in self.live_slots(segment):
                sums[self.tenants[segment.tenants[slot]]] += segment.nbytes(slot)
        return dict(sums)

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        """A block's segment and slot; None when it is not here."""
        place = self._places.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> _SLOT_BITS], place & _SLOT_MASK)

    def is_live(self, segment: Segment, slot: int) -> bool:
        """Whether that is the place of its block."""
        key = segment.keys[slot]
        return self._places.parts[key[0]].get(key) == segment.number << _SLOT_BITS | slot

    def live_slots(self, segment: Segment) -> Iterator[int]:
        """Slots of a segment that are places of blocks, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.number << _SLOT_BITS
        parts = self._places.parts
        for slot, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | slot:
                yield slot

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, those of at most `step` slots at a time; none that come meanwhile."""
        found: list[BlockKey] = []
        looked = 0
        for number in reversed(list(self.segments)):
            segment = self.segments.get(number)
            for slot in range(len(segment.keys) - 1, -1, -1) if segment is not None else ():
                if looked == step:
                    yield found
                    found, looked = [], 0
                assert segment is not None
                looked += 1
                if self.is_live(segment, slot):
                    found.append(segment.keys[slot])
        yield found

    def oldest_of(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of a tenant, together at least `nbytes` of records, without those that `stays`.

        They are fewer when there are no more. The search begins where the last one for the tenant found its first.
        """
        found: list[BlockKey] = []
        begin, seen = self._oldest.get(tenant, 0), False
        for segment in self.segments.values():
            if segment.number < begin:
                continue
            for slot in self.live_slots(segment):
                if self.tenants[segment.tenants[slot]] != tenant:
                    continue
                if not seen:
                    seen, self._oldest[tenant] = True, segment.number
                if nbytes <= 0:
                    return found
                if not stays(segment.keys[slot]):
                    found.append(segment.keys[slot])
                    nbytes -= segment.nbytes(slot)
        return found

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Those of the blocks that are here were used."""
        for key in keys:
            place = self._places.get(key)
            if place is not None:
                self.segments[place >> _SLOT_BITS].used[place & _SLOT_MASK] = 1

    def add(self, segment: Segment, rows: Iterable[Row]) -> None:
        """Records were appended to a segment; their blocks have their places there from now on."""
        first = len(segment.keys)
        for key, start, length, block_format, tenant in rows:
            segment.keys.append(key)
            segment.starts.append(start)
            segment.lengths.append(length)
            segment.formats.append(block_format)
            segment.tenants.append(tenant)
            segment.used.append(0)
        assert len(segment.keys) <= _SLOT_MASK
        self.formats.use(segment.formats[first:])
        self.tenants.use(segment.tenants[first:])
        for slot in range(first, len(segment.keys)):
            self._place(segment, slot)

    def _place(self, segment: Segment, slot: int) -> None:
        key, nbytes = segment.keys[slot], segment.nbytes(slot)
        self.forget(key)
        self._places[key] = segment.number << _SLOT_BITS | slot
        segment.live_bytes += nbytes
        self.live_bytes += nbytes
        if self._account is not None:
            self._account.add(self.tenants[segment.tenants[slot]], nbytes)

    def load(self, segment: Segment, packed: bytes) -> None:
        """As `add`, for a new segment and packed entries, quickly. Raises struct.error when those are no entries."""
        self.segments[segment.number] = segment
        if len(packed) % ENTRY.size:
            raise struct.error("a part of an entry")
        if not packed:
            return
        segment.keys = keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
        numbers = array("I", packed)
        if sys.byteorder != "little":
            numbers.byteswap()
        words, first = ENTRY.size // 4, KEY_BYTES // 4
        segment.starts, segment.lengths, segment.formats, segment.tenants = (
            numbers[column::words] for column in range(first, words)
        )
        segment.used = bytearray(len(keys))
        self.formats.use(segment.formats)
        self.tenants.use(segment.tenants)
        place = segment.number << _SLOT_BITS
        if not self._places.add_new(keys, range(place, place + len(keys))):
            for slot in list(self.live_slots(segment)):  # some keys were here before, or come twice: later ones win
                del self._places[keys[slot]]
            for slot in range(len(keys)):
                self._place(segment, slot)
            return
        segment.live_bytes = sum(segment.lengths) * ALIGN
        self.live_bytes += segment.live_bytes
        if self._account is not None:
            sums: collections.Counter[int] = collections.Counter()
            for tenant, length in zip(segment.tenants, segment.lengths, strict=True):
                sums[tenant] += length
            for tenant, length in sums.items():
                self._account.add(self.tenants[tenant], length * ALIGN)

    def forget(self, key: BlockKey) -> Slot | None:
        """A block has no place any more; returns the one it had."""
        found = self.find(key)
        if found is None:
            return None
        segment, slot = found
        nbytes = segment.nbytes(slot)
        segment.live_bytes -= nbytes
        self.live_bytes -= nbytes
        del self._places[key]
        if self._account is not None:
            self._account.remove(self.tenants[segment.tenants[slot]], nbytes)
        return segment.number, slot

    def mark_dead(self, number: int, slot: int) -> None:
        """A slot is dead; if it was the place of its block, the block is forgotten."""
        segment = self.segments[number]
        if slot < len(segment.keys) and self.is_live(segment, slot):
            self.forget(segment.keys[slot])

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for slot in list(self.live_slots(segment)):
            self.forget(segment.keys[slot])
        self.segments.pop(segment.number, None)
        self.formats.unuse(segment.formats)
        self.tenants.unuse(segment.tenants)

    def forget_tenants(self, tenants: Iterable[str]) -> None:
        for tenant in tenants:
            self._oldest.pop(tenant, None)

    def check_invariants(self, leaving: Iterable[Segment] = ()) -> None:
        """Places, bytes and ids agree with each other; the ids of `leaving` segments are in use too."""
        for number, segment in self.segments.items():
            assert segment.number == number
            assert segment.size
            assert not segment.going
            assert segment.readers >= 0
            slots = list(self.live_slots(segment))
            assert segment.live_bytes == sum(segment.nbytes(slot) for slot in slots)
            assert all(segment.offset(slot) + segment.nbytes(slot) <= segment.size for slot in slots)
            columns = (segment.starts, segment.lengths, segment.formats, segment.tenants, segment.used)
            assert all(len(column) == len(segment.keys) for column in columns)
        for key, place in self._places.items():
            assert self.segments[place >> _SLOT_BITS].keys[place & _SLOT_MASK] == key
        assert self.live_bytes == sum(segment.live_bytes for segment in self.segments.values())
        assert self.live_bytes == sum(self.tenant_bytes().values())
        segments = [*self.segments.values(), *leaving]
        self.formats.check_invariants(number for segment in segments for number in segment.formats)
        self.tenants.check_invariants(number for segment in segments for number in segment.tenants)
        assert self._oldest.keys() <= set(self.tenants.by_id.values())
