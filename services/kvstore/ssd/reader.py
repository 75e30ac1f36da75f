"""Verified reads of records: nothing is returned but the block and the layers that were asked for, intact."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Segment
from services.kvstore.ssd.files import Files, header_memory
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordHeader, data_size, header_bytes_of, unpack_header


class SsdReader:
    """Reads one block's record; the segment is not reclaimed until `release`.

    The header is read and verified with the first slice, in one read where that is layer 0.
    """

    def __init__(self, files: Files, segment: Segment, slot: int) -> None:
        self.key: BlockKey = segment.keys[slot]
        self.format = segment.kind(slot).format
        self.segment = segment
        self.slot = slot
        self._files = files
        self._offset = segment.offset(slot)
        self._header_bytes = segment.nbytes(slot) - data_size(self.format)
        self._header: RecordHeader | None = None
        self.hashes: dict[int, int] = {}  # of layers that were read, bound to the block
        self._released = False
        segment.readers += 1

    @property
    def deleted(self) -> bool:
        """Whether the block was deleted since the reading began."""
        return self.slot in self.segment.erased

    @property
    def info(self) -> BlockInfo | None:
        return self._header.info if self._header is not None else None

    def read_layers(self, first: int, outs: Sequence[memoryview]) -> None:
        """Blocking. Fills `outs` (`slice_bytes` each) with the verified bytes of consecutive layers, from `first` on.

        Raises:
            BadRecordError: the bytes read are not what was written, or were deleted; they never will be.
            OSError: the read failed, which says nothing of the record.
        """
        header = self._header  # several threads may read it at once; they find the same
        together = header is None and first == 0
        if header is None:
            start = header_memory(max(0, self._header_bytes))
            read_whole(self._files, self.segment.path, [start, *outs] if together else [start], self._offset)
            header = self._header = self._check(start)
        if not together:
            skipped = self._header_bytes + first * self.format.layout.slice_bytes
            read_whole(self._files, self.segment.path, outs, self._offset + skipped)
        if self.deleted:
            raise BadRecordError("the block was deleted")
        for layer, out in enumerate(outs, first):
            self.hashes[layer] = header.check_slice(layer, out)

    def _check(self, start: memoryview) -> RecordHeader:
        header = unpack_header(bytes(start))
        if header.info.key != self.key or header.info.format != self.format:
            raise BadRecordError("the record is another block's")
        if header.header_bytes != self._header_bytes:
            raise BadRecordError("the record's header has another size")
        return header

    def release(self) -> None:
        """Event loop. Ends the reading; once."""
        assert not self._released
        self._released = True
        self.segment.readers -= 1
        if self.segment.removed and not self.segment.readers:
            self._files.close_later(self.segment.path)


def read_whole(files: Files, path: Path, outs: Sequence[memoryview], offset: int) -> None:
    """Blocking. Fills `outs` from `offset` on. BadRecordError when the file ends before, OSError when a read fails."""
    if files.read(path, outs, offset) != sum(len(out) for out in outs):
        raise BadRecordError("the segment ends inside the record")


def read_record(files: Files, path: Path, key: BlockKey, offset: int, nbytes: int) -> bytearray:
    """Blocking. A whole record of the block `key`, as it lies in its file. BadRecordError unless it is intact."""
    record = bytearray(nbytes)
    view = memoryview(record)
    read_whole(files, path, [view], offset)
    header = unpack_header(record)
    if header.info.key != key or header.record_bytes != nbytes:
        raise BadRecordError("the record is another block's")
    size = header.info.format.layout.slice_bytes
    for layer in range(header.info.format.layout.layers):
        at = header.header_bytes + layer * size
        header.check_slice(layer, view[at : at + size])
    return record


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


class Found(NamedTuple):
    """A record with an intact header, which begins `offset` bytes into its file and has `nbytes`, padding included."""

    offset: int
    nbytes: int
    info: BlockInfo

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclasses.dataclass(slots=True)
class _Pieces:
    """A file's bytes, read when they are needed, `size` at a time; `data` begins at `begin`."""

    files: Files
    path: Path
    size: int
    begin: int = 0
    data: bytes = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        if not self.begin <= offset <= self.begin + len(self.data) - nbytes:
            self.data, self.begin = self.files.peek(self.path, max(nbytes, self.size), offset), offset
        return self.data[offset - self.begin : offset - self.begin + nbytes]


def scan(files: Files, path: Path, size: int, start: int = 0, piece_bytes: int = PIECE_BYTES) -> Iterator[Found]:
    """All records with intact headers that lie wholly between `start` and the file's end, `size`.

    Behind a broken header the search goes on at the next possible place. The data are not verified.
    """
    pieces, offset = _Pieces(files, path, piece_bytes), start
    while offset + ALIGN <= size:
        try:
            header = unpack_header(pieces.read(offset, header_bytes_of(pieces.read(offset, ALIGN))))
        except BadRecordError:
            offset += ALIGN
            pieces.size = piece_bytes
            continue
        found = Found(offset, header.record_bytes, header.info)
        if found.end > size:
            break
        yield found
        offset = found.end
        pieces.size = piece_bytes if found.nbytes <= SMALL_BYTES else header.header_bytes
