"""What the SSD tier holds, in memory: which record of which segment is which block.

Owns the table of blocks and the books of bytes that follow from it, built to be small: per block one entry of a dict,
its key, one integer and 21 bytes in arrays. Must not know of LMDB, files' contents, threads or budgets.

A block's *place* is its segment's number and its *slot*, the how-manieth record of that segment it is. A slot whose key
has its place elsewhere, or nowhere, is dead: its bytes are free once the segment goes.
"""

import collections
import dataclasses
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping

from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.parts import PartTable
from services.kvstore.ssd.interned import Interned
from services.kvstore.ssd.records import ALIGN
from services.kvstore.ssd.segments import SegmentFile
from services.kvstore.tenancy.tenants import Account

ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, id of the format, id of the tenant."""

Row = tuple[BlockKey, int, int, int, int]
"""The same, unpacked."""

MAX_SEGMENT_BYTES = ALIGN << 32
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment as the event loop knows it. The columns have one item per slot.

    Attributes:
        number: its id; ascending with age.
        file: its file.
        size: committed bytes.
        live_bytes: of records whose block has its place here.
        readers: who reads from it; it is not reclaimed while there are any.
        going: it is being reclaimed.
        kept_bytes, asked_at: how much of it must stay, as was found for the plan of that number.
        nameless: its file's name is gone; the file is closed with the last reader.
        keys: of the records.
        starts, lengths: where the records lie, in units of `ALIGN`.
        formats, tenants: their ids.
        read: 1 for blocks that were used since they were written here.
    """

    number: int
    file: SegmentFile
    size: int = 0
    live_bytes: int = 0
    readers: int = 0
    going: bool = False
    kept_bytes: int = 0
    asked_at: int = -1 << 30
    nameless: bool = False
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=lambda: array("I"))
    lengths: "array[int]" = dataclasses.field(default_factory=lambda: array("I"))
    formats: "array[int]" = dataclasses.field(default_factory=lambda: array("I"))
    tenants: "array[int]" = dataclasses.field(default_factory=lambda: array("I"))
    read: bytearray = dataclasses.field(default_factory=bytearray)

    def offset(self, slot: int) -> int:
        """Where a record begins, in bytes."""
        return self.starts[slot] * ALIGN

    def nbytes(self, slot: int) -> int:
        """Length of a record."""
        return self.lengths[slot] * ALIGN

    def release(self) -> None:
        """Ends one reading."""
        assert self.readers > 0
        self.readers -= 1
        if self.nameless and not self.readers:
            self.file.close()

    def drop_file(self) -> None:
        """Its name is gone: closes the file as soon as nobody reads it."""
        self.nameless = True
        if not self.readers:
            self.file.close()


class Catalogue:
    """All segments and all blocks.

    Args:
        formats: format id -> format.
        tenants: tenant id -> name.

    Attributes:
        segments: segment id -> segment, ascending.
        live_bytes: of all records that are blocks' places.
    """

    def __init__(self, formats: Mapping[int, BlockFormat], tenants: Mapping[int, str]) -> None:
        self.formats = Interned(formats)
        self.tenants = Interned(tenants)
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self._places = PartTable[int]()
        self._account: Account | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._places.parts[key[0]]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._places)

    def part(self, number: int) -> Iterable[BlockKey]:
        """Keys of one part of all blocks."""
        return self._places.parts[number]

    def keep_account(self, account: Account | None) -> None:
        """From now on `account` is told of every record that comes or goes; of those that are here, at once."""
        self._account = account
        if account is not None:
            for tenant, nbytes in self.tenant_bytes().items():
                account.add(tenant, nbytes)

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of live records by tenant, counted anew: slow."""
        sums: collections.Counter[int] = collections.Counter()
        for segment in self.segments.values():
            if segment.live_bytes == sum(segment.lengths) * ALIGN:  # all of them live: no need to look each one up
                for tenant, length in zip(segment.tenants, segment.lengths, strict=True):
                    sums[tenant] += length
            else:
                for slot in self.live_slots(segment):
                    sums[segment.tenants[slot]] += segment.lengths[slot]
        return {self.tenants[number]: length * ALIGN for number, length in sums.items()}

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        """A block's segment and slot; None when it is not here."""
        place = self._places.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> _SLOT_BITS], place & _SLOT_MASK)

    def lives(self, segment: Segment, slot: int) -> bool:
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
                if self.lives(segment, slot):
                    found.append(segment.keys[slot])
        yield found

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Those of the blocks that are here were used."""
        for key in keys:
            place = self._places.get(key)
            if place is not None:
                self.segments[place >> _SLOT_BITS].read[place & _SLOT_MASK] = 1

    def add(self, segment: Segment, rows: Iterable[Row]) -> int:
        """Records were appended to a segment; their blocks have their places there from now on.

        Returns:
            Slot of the first of them.
        """
        first = len(segment.keys)
        rows = list(rows)
        self.formats.use(row[3] for row in rows)
        self.tenants.use(row[4] for row in rows)
        for key, start, length, block_format, tenant in rows:
            self.forget(key)
            slot = len(segment.keys)
            assert slot <= _SLOT_MASK
            segment.keys.append(key)
            segment.starts.append(start)
            segment.lengths.append(length)
            segment.formats.append(block_format)
            segment.tenants.append(tenant)
            segment.read.append(0)
            segment.live_bytes += length * ALIGN
            self.live_bytes += length * ALIGN
            self._places[key] = segment.number << _SLOT_BITS | slot
            if self._account is not None:
                self._account.add(self.tenants[tenant], length * ALIGN)
        return first

    def load(self, segment: Segment, packed: bytes) -> None:
        """As `add` for a new segment and packed entries, quickly; no account is kept yet.

        Raises:
            struct.error: those are no entries.
        """
        assert self._account is None
        assert not segment.keys
        self.segments[segment.number] = segment
        if not packed:
            return
        if len(packed) % ENTRY.size:
            raise struct.error("a part of an entry")
        keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
        segment.keys = keys
        numbers = array("I", packed)
        if sys.byteorder != "little":
            numbers.byteswap()
        words, first = ENTRY.size // 4, KEY_BYTES // 4
        segment.starts, segment.lengths, segment.formats, segment.tenants = (
            numbers[column::words] for column in range(first, words)
        )
        segment.read = bytearray(len(keys))
        self.formats.use(segment.formats)
        self.tenants.use(segment.tenants)
        place = segment.number << _SLOT_BITS
        if self._places.add_new(keys, range(place, place + len(keys))):
            segment.live_bytes = sum(segment.lengths) * ALIGN
            self.live_bytes += segment.live_bytes
        else:
            self._load_again(segment)

    def _load_again(self, segment: Segment) -> None:
        """Some keys come twice: one after the other, later ones win."""
        for slot, key in enumerate(segment.keys):
            if self.lives(segment, slot):  # the quick way came so far
                del self._places[key]
        for slot, key in enumerate(segment.keys):
            self.forget(key)
            self._places[key] = segment.number << _SLOT_BITS | slot
            segment.live_bytes += segment.nbytes(slot)
            self.live_bytes += segment.nbytes(slot)

    def forget(self, key: BlockKey) -> tuple[Segment, int] | None:
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
        return found

    def bury(self, number: int, slot: int) -> None:
        """A slot is dead; if it was the place of its block, the block is forgotten."""
        segment = self.segments[number]
        if slot < len(segment.keys) and self.lives(segment, slot):
            self.forget(segment.keys[slot])

    def remove(self, segment: Segment) -> None:
        """A segment is gone, with all that still had its place there; once for each."""
        for slot in list(self.live_slots(segment)):
            self.forget(segment.keys[slot])
        self.segments.pop(segment.number, None)
        self.formats.unuse(segment.formats)
        self.tenants.unuse(segment.tenants)

    def row(self, segment: Segment, slot: int) -> Row:
        """What an index holds of a record."""
        return (
            segment.keys[slot],
            segment.starts[slot],
            segment.lengths[slot],
            segment.formats[slot],
            segment.tenants[slot],
        )

    def check_invariants(self) -> None:
        """Every place is a slot of its key, inside the committed part, and the bytes add up."""
        for number, segment in self.segments.items():
            assert segment.number == number
            assert segment.readers >= 0
            slots = list(self.live_slots(segment))
            assert segment.live_bytes == sum(segment.nbytes(slot) for slot in slots)
            assert all(segment.offset(slot) + segment.nbytes(slot) <= segment.size for slot in slots)
            assert all(number in self.formats.by_number for number in segment.formats)
            assert all(number in self.tenants.by_number for number in segment.tenants)
            columns = (segment.starts, segment.lengths, segment.formats, segment.tenants, segment.read)
            assert all(len(column) == len(segment.keys) for column in columns)
        for key, place in self._places.items():
            assert self.segments[place >> _SLOT_BITS].keys[place & _SLOT_MASK] == key
        assert self.live_bytes == sum(segment.live_bytes for segment in self.segments.values())
        assert self.live_bytes == sum(self.tenant_bytes().values())
