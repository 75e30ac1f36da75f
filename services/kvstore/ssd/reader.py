"""Verified reads of records: nothing is returned but the block and the layers that were asked for, intact."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey
from moonpool.kv.reading import Span, aligned_memory
from services.kvstore.ssd.catalogue import Segment
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordHeader, data_size, header_bytes_of, unpack_header


class SsdReader:
    """Reads one block's record, its header together with the first slices; the segment stays until `release`."""

    def __init__(self, files: Files, segment: Segment, slot: int) -> None:
        self.key: BlockKey = segment.keys[slot]
        self.format = segment.kind(slot).format
        self.segment = segment
        self.slot = slot
        self.files = files
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

    def read_layers(self, first: int, out: memoryview) -> None:
        """As `read_bands`, of one block; raises what keeps it from being read."""
        failure = read_bands(first, [(self, out)])
        if failure is not None:
            raise failure[1]

    def spans(self, first: int, out: memoryview, start: memoryview) -> list[Span]:
        """Where layers from `first` on lie, and the header if it is unread; `start` is memory for it."""
        size = self.format.layout.slice_bytes
        layers = Span(self._offset + self._header_bytes + first * size, out, size)
        return [Span(self._offset, start), layers] if start else [layers]

    @property
    def unread_bytes(self) -> int:
        """Of the header."""
        return max(0, self._header_bytes) if self._header is None else 0

    def check(self, first: int, out: memoryview, hashes: Sequence[int], start: memoryview) -> None:
        """Verifies what was read, with its hashes; raises BadRecordError."""
        if self._header is None:  # several threads may read it at once; they find the same
            self._header = self._check(start)
        if self.deleted:
            raise BadRecordError("the block was deleted")
        self.hashes.update(enumerate(self._header.check_slices(first, out, hashes), first))

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
            self.files.later(self.files.close, self.segment.path)


Band = tuple[SsdReader, memoryview]
"""A block, and memory for some consecutive layers."""


def read_bands(first: int, bands: Sequence[Band]) -> tuple[int, Exception] | None:
    """Blocking. Reads verified layers of blocks, as many of each, from `first` on, up to the first block that fails.

    Returns which that is and why, if any. BadRecordError: the bytes read are not what was written, or were deleted;
    they never will be. OSError: reading failed, which says nothing of the record.
    """
    done = 0
    for segment, group in itertools.groupby(bands, lambda band: band[0].segment):
        together = list(group)
        try:
            failure = _read_together(segment.path, first, together)
        except Exception as error:  # of whatever kind, these blocks were not read
            failure = 0, error
        if failure is not None:
            return done + failure[0], failure[1]
        done += len(together)
    return None


def _read_together(path: Path, first: int, bands: Sequence[Band]) -> tuple[int, Exception] | None:
    """As `read_bands`, of blocks in one segment: in one call, so that those one behind the other are one read."""
    memory = aligned_memory(sum(reader.unread_bytes for reader, _ in bands))
    starts, spans = list[memoryview](), list[Span]()
    for reader, out in bands:
        starts.append(memory[: reader.unread_bytes])
        memory = memory[len(starts[-1]) :]
        spans += reader.spans(first, out, starts[-1])
    outcome = reader.files.read(path, spans)
    layers = len(bands[0][1]) // reader.format.layout.slice_bytes
    for number, ((reader, out), start) in enumerate(zip(bands, starts, strict=True)):
        values = outcome.hashes[number * layers : (number + 1) * layers]
        if len(values) < layers:
            return number, outcome.error or BadRecordError("the segment ends inside the record")
        try:
            reader.check(first, out, values, start)
        except BadRecordError as error:
            return number, error
    return None


def read_whole(files: Files, path: Path, out: memoryview, offset: int) -> None:
    """Blocking. Fills `out` from `offset` on. BadRecordError when the file ends before, OSError when the read fails."""
    outcome = files.read(path, [Span(offset, out)])
    if not outcome.spans:
        raise outcome.error or BadRecordError("the segment ends inside the record")


def read_record(files: Files, path: Path, key: BlockKey, offset: int, nbytes: int) -> bytearray:
    """Blocking. A whole record of the block `key`, as it lies in its file. BadRecordError unless it is intact."""
    record = bytearray(nbytes)
    view = memoryview(record)
    read_whole(files, path, view, offset)
    header = unpack_header(record)
    if header.info.key != key or header.record_bytes != nbytes:
        raise BadRecordError("the record is another block's")
    header.check_slices(0, view[header.header_bytes : header.header_bytes + header.info.nbytes])
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

    Behind a broken header the search goes on at the next possible place. Records of another segment, whose the file
    was before, are passed over. The data are not verified.
    """
    pieces, offset, own = _Pieces(files, path, piece_bytes), start, (0, int(path.stem))
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
        if header.segment in own:
            yield found
        offset = found.end
        pieces.size = piece_bytes if found.nbytes <= SMALL_BYTES else header.header_bytes
