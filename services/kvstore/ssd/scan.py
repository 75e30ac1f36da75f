"""Finding the records of a segment file by what they say of themselves.

Owns the walk from one record to the next, and in which pieces it reads. Must not know of the index or of what is found.
Small records are read whole, many at once; of large ones only the headers are, each alone: that is less to read.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordKind, header_bytes_of, identify

PIECE_BYTES = 1 << 20
SMALL_BYTES = 32 << 10
"""Records up to this size are read whole: many in one piece cost the device less than each one's header alone."""


class Found(NamedTuple):
    """An intact record: where it begins, whose it is, and all else that its header says."""

    offset: int
    key: BlockKey
    kind: RecordKind


class _Pieces:
    """A file's bytes, read in pieces when they are wanted; `data` begins at `begin`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.begin = 0
        self.data = b""
        self.size = PIECE_BYTES

    def at(self, offset: int, nbytes: int) -> int:
        """Where in `data` those bytes begin; there are fewer of them only where the file ends."""
        if not self.begin <= offset <= self.begin + len(self.data) - nbytes:
            self.data, self.begin = os.pread(self._fd, max(nbytes, self.size), offset), offset
        return offset - self.begin


def scan(fd: int) -> Iterator[Found]:
    """All intact records that lie wholly inside an open file.

    Behind a broken header the search goes on at the next possible place. The data are not verified: reading does.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    pieces, kinds = _Pieces(fd), dict[bytes, RecordKind]()
    offset = 0
    while offset + ALIGN <= size:
        at = pieces.at(offset, ALIGN)
        try:
            header_bytes = header_bytes_of(pieces.data, at)
            if header_bytes > ALIGN:
                at = pieces.at(offset, header_bytes)
            key, kind = identify(pieces.data, at, kinds)
        except BadRecordError:
            offset += ALIGN
            pieces.size = PIECE_BYTES
            continue
        if offset + kind.record_bytes > size:
            break
        yield Found(offset, key, kind)
        offset += kind.record_bytes
        pieces.size = PIECE_BYTES if kind.record_bytes <= SMALL_BYTES else header_bytes
