"""Segment files by name, and their records one after the other, as recovery finds them."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moonpool.base.kv.blocks import BlockInfo
from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.records import BadRecordError, header_bytes_of, unpack_header
from moonpool.kvstore.ssd.segment import RecordKind

PIECE_BYTES = 1 << 20
SMALL_BYTES = 32 << 10  # records up to this size are read whole: many at once cost less than each one's header alone
_NAME = re.compile(r"\d{16}\.seg")


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:016d}.seg"


def list_segments(folder: Path) -> dict[int, int]:
    """Segments in a folder: number -> bytes in the file, ascending by number."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()]
    return {int(path.stem): path.stat().st_size for path in sorted(found)}


class ScannedRecord(NamedTuple):
    """A record with an intact header, at `offset` bytes into the file and with `nbytes`, padding included."""

    offset: int
    nbytes: int
    info: BlockInfo
    kind: RecordKind

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclasses.dataclass(slots=True)
class _Pieces:
    """A file's bytes, read when they are needed, `size` at a time; `data` begins at `begin`."""

    files: FileLayer
    path: Path
    size: int
    begin: int = 0
    data: bytes = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        if not self.begin <= offset <= self.begin + len(self.data) - nbytes:
            self.data, self.begin = self.files.peek(self.path, max(nbytes, self.size), offset), offset
        return self.data[offset - self.begin : offset - self.begin + nbytes]


def scan_segment(
    files: FileLayer, path: Path, size: int, start: int = 0, piece_bytes: int = PIECE_BYTES
) -> Iterator[ScannedRecord]:
    """All records with intact headers that lie wholly between `start` and the file's end, `size`.

    Behind a broken header the search goes on at the next possible place. Records from another segment, which had the
    file before, are skipped. The data are not verified.
    """
    pieces, offset, own = _Pieces(files, path, piece_bytes), start, (0, int(path.stem))
    while offset + ALIGN <= size:
        try:
            header = unpack_header(pieces.read(offset, header_bytes_of(pieces.read(offset, ALIGN))))
        except BadRecordError:
            offset += ALIGN
            pieces.size = piece_bytes
            continue
        found = ScannedRecord(offset, header.record_bytes, header.info, header.kind)
        if found.end > size:
            break
        if header.segment in own:
            yield found
        offset = found.end
        pieces.size = piece_bytes if found.nbytes <= SMALL_BYTES else header.header_bytes
