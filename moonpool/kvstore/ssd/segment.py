"""A segment of the SSD tier in memory: one row for each record, in columns of integers.

A block costs one dict entry in the catalogue (catalogue.py), the key and 21 bytes here.
"""

import dataclasses
import struct
import sys
from array import array
from pathlib import Path
from typing import NamedTuple

from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import KEY_BYTES, BlockKey
from moonpool.kvstore.eviction.tenants import TenantBytes
from moonpool.kvstore.ssd.files import ALIGN

ENTRY = struct.Struct("<32sIIII")
"""One record in an index: key, offset and length in units of `ALIGN`, kind number in the segment, `written_at`."""
MAX_SEGMENT_BYTES = ALIGN << 32
ROW_BITS = 24
"""A block's place is one integer: the segment's id, shifted by so many bits, and the record's row in the segment.

An integer takes less memory than a pair, and there are millions of blocks. A segment's id has the disk above
`NUMBER_BITS` bits for the segment's number on the disk.
"""
ROW_MASK = (1 << ROW_BITS) - 1
NUMBER_BITS = 32


class RecordKind(NamedTuple):
    """What many blocks have in common."""

    format: BlockFormat
    tenant: str
    key_id: str = ""  # of the key that encrypts; "" for plaintext

    @property
    def account(self) -> str:
        """Whose quotas and guarantees the blocks count to."""
        return self.format.account(self.tenant)


IndexEntry = tuple[BlockKey, int, int, int, int]  # the same, unpacked
RowId = tuple[int, int]  # a segment's number on one disk, and the record's row there


def _column() -> "array[int]":
    return array("I")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment on the event loop's side. The columns, from `keys` on, have one item per row."""

    number: int  # on the disk, ascending: older segments have lower numbers
    path: Path
    size: int = 0  # committed bytes
    disk: int = 0
    room: int = 0  # the file's bytes, if taken over from an older segment, whose records may still lie behind `size`
    overwritable: bool = False  # the records name this segment, and no block inside looks like a record
    live: TenantBytes = dataclasses.field(default_factory=TenantBytes)  # for records that are their blocks' places
    readers: int = 0  # readers of records; the segment is not reclaimed while readers are there
    going: bool = False  # being reclaimed
    removed: bool = False  # the index has forgotten the segment and the file has no name; the last reader closes it
    kept_share: float = 0.0  # share that must stay (0 to 1), as found for plan number `asked_at`
    asked_at: int = -1 << 30
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    starts: "array[int]" = dataclasses.field(default_factory=_column)  # in units of `ALIGN`, as the lengths
    lengths: "array[int]" = dataclasses.field(default_factory=_column)
    kinds: "array[int]" = dataclasses.field(default_factory=_column)  # numbers of them
    written: "array[int]" = dataclasses.field(default_factory=_column)  # seconds since 1970
    erased: set[int] = dataclasses.field(default_factory=set)  # rows with overwritten records, now or soon
    used: bytearray = dataclasses.field(default_factory=bytearray)  # 1: the block was used since written here
    named: list[RecordKind] = dataclasses.field(default_factory=list)  # kinds by number; they go with the segment
    numbers: dict[RecordKind, int] = dataclasses.field(init=False)
    id: int = dataclasses.field(init=False)  # unique over all disks

    def __post_init__(self) -> None:
        self.id = self.disk << NUMBER_BITS | self.number
        self.numbers = {kind: number for number, kind in enumerate(self.named)}

    def offset(self, row: int) -> int:
        return self.starts[row] * ALIGN

    def nbytes(self, row: int) -> int:
        return self.lengths[row] * ALIGN

    def kind(self, row: int) -> RecordKind:
        return self.named[self.kinds[row]]

    def number_of(self, kind: RecordKind) -> int:
        """The number of a kind in this segment; a new number for a new kind."""
        number = self.numbers.setdefault(kind, len(self.named))
        if number == len(self.named):
            self.named.append(kind)
        return number


def unpack_columns(packed: bytes) -> "tuple[list[BlockKey], array[int], array[int], array[int], array[int]]":
    """Packed entries' keys, starts, lengths, kind numbers and `written_at`."""
    keys = [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), ENTRY.size)]
    numbers = array("I", packed)
    if sys.byteorder != "little":
        numbers.byteswap()
    starts, lengths, kinds, written = (
        numbers[word :: ENTRY.size // 4] for word in range(KEY_BYTES // 4, ENTRY.size // 4)
    )
    return keys, starts, lengths, kinds, written
