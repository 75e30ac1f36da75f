"""Segment files: their names, and the walk over the records of one by what these say of themselves.

Small records are read whole, many at once. Of large ones only the headers are read, each alone: that is less to read.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordKind, header_bytes_of, identify

PIECE_BYTES = 1 << 20
SMALL_BYTES = 32 << 10
"""Records up to this size are read whole: many in one piece cost the device less than each one's header alone."""

_NAME = re.compile(r"(\d{16})\.seg")


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:016d}.seg"


def list_segments(folder: Path) -> dict[int, int]:
    """Segments in a folder: number -> bytes in the file, ascending by number."""
    with os.scandir(folder) as entries:
        found = {
            int(match[1]): entry.stat().st_size
            for entry in entries
            if (match := _NAME.fullmatch(entry.name)) and entry.is_file()
        }
    return dict(sorted(found.items()))


class Found(NamedTuple):
    """A record with an intact header.

    Attributes:
        offset: where it begins, in bytes.
        key: of its block.
        kind: all else that its header says.
    """

    offset: int
    key: BlockKey
    kind: RecordKind

    @property
    def end(self) -> int:
        return self.offset + self.kind.record_bytes


class _Pieces:
    """A file's bytes, read in pieces when they are needed; `data` begins at `begin`."""

    def __init__(self, files: Files, path: Path, piece_bytes: int) -> None:
        self._files = files
        self._path = path
        self.begin = 0
        self.data = b""
        self.size = piece_bytes

    def at(self, offset: int, nbytes: int) -> int:
        """Position in `data` of these bytes; they are fewer only where the file ends."""
        if not self.begin <= offset <= self.begin + len(self.data) - nbytes:
            self.data, self.begin = self._files.peek(self._path, max(nbytes, self.size), offset), offset
        return offset - self.begin


def scan(
    files: Files,
    path: Path,
    size: int,
    start: int = 0,
    *,
    piece_bytes: int = PIECE_BYTES,
    small_bytes: int = SMALL_BYTES,
) -> Iterator[Found]:
    """All records with intact headers that lie wholly between `start` and the file's end, `size`.

    Behind a broken header the search goes on at the next possible place. The data are not verified.
    """
    pieces, kinds = _Pieces(files, path, piece_bytes), dict[bytes, RecordKind]()
    offset = start
    while offset + ALIGN <= size:
        at = pieces.at(offset, ALIGN)
        try:
            header_bytes = header_bytes_of(pieces.data, at)
            if header_bytes > ALIGN:
                at = pieces.at(offset, header_bytes)
            found = Found(offset, *identify(pieces.data, at, kinds))
        except BadRecordError:
            offset += ALIGN
            pieces.size = piece_bytes
            continue
        if found.end > size:
            break
        yield found
        offset = found.end
        pieces.size = piece_bytes if found.kind.record_bytes <= small_bytes else header_bytes
