"""Reads records from segment files, and verifies them."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from moonpool.base.kv.blocks import BlockInfo
from moonpool.base.kv.file_io import FileSpan, aligned_memory
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.encryption import (
    Keyring,
)
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.records import BadRecordError, OpenedRecord, RecordHeader, data_size, unpack_header
from moonpool.kvstore.ssd.segment import Segment


class SsdReader:
    """Reads one block's record, the header together with the first slices; the segment stays until `release`."""

    def __init__(self, files: FileLayer, segment: Segment, row: int, keyring: Keyring | None = None) -> None:
        self._keyring = keyring
        self.key: BlockKey = segment.keys[row]
        self.format = segment.kind(row).format
        self.segment = segment
        self.row = row
        self.files = files
        self._offset = segment.offset(row)
        self._header_bytes = segment.nbytes(row) - data_size(self.format)
        self._header: RecordHeader | None = None
        self._opened: OpenedRecord | None = None
        self.hashes: dict[int, int] = {}  # of layers that were read, bound to the block
        self._released = False
        segment.readers += 1

    @property
    def deleted(self) -> bool:
        """Whether the block was deleted since the reading began."""
        return self.row in self.segment.erased

    @property
    def info(self) -> BlockInfo | None:
        return self._header.info if self._header is not None else None

    def read_layers(self, first: int, out: memoryview) -> None:
        """As `read_bands`, for one block; raises the error that prevents reading."""
        failure = read_bands(first, [(self, out)])
        if failure is not None:
            raise failure[1]

    def spans(self, first: int, out: memoryview, start: memoryview) -> list[FileSpan]:
        """Places of the layers from `first` on, and of an unread header; `start` is memory for the header."""
        layout, data = self.format.layout, self._offset + self._header_bytes
        found = [FileSpan(self._offset, start)] if start else []
        for layers, size in layout.equal_slices(layout.layers_in(first, len(out))):
            begin = layout.place(layers.start, first).start
            span = out[begin : begin + len(layers) * size]
            found.append(FileSpan(data + layout.place(layers.start).start, span, size))
        return found

    @property
    def unread_bytes(self) -> int:
        """Of the header."""
        return max(0, self._header_bytes) if self._header is None else 0

    def check(self, first: int, out: memoryview, hashes: Sequence[int], start: memoryview) -> None:
        """Verify read bytes with their hashes, and decrypt them in place; raise BadRecordError."""
        if self._header is None:  # several threads may read the header at once; they find the same
            self._header = self._check(start)
        if self.deleted:
            raise BadRecordError("the block was deleted")
        bound = self._header.check_slices(first, out, hashes)
        if self._header.seal is not None:
            if self._opened is None:
                self._opened = OpenedRecord(self._header, self._keyring)
            bound = self._opened.decrypt(first, out)
        self.hashes.update(enumerate(bound, first))

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
    """Blocking.

    Reads verified layers from blocks, equally many from each, from `first` on, up to the first failing block.

    Returns which that is and why, if any. BadRecordError: the bytes read are not what was written, or were deleted;
    they never will be. OSError: reading failed, which tells nothing about the record.
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
    """As `read_bands`, for blocks in one segment: in one call, so that adjacent blocks are one read."""
    memory = aligned_memory(sum(reader.unread_bytes for reader, _ in bands))
    starts, spans = list[memoryview](), list[FileSpan]()
    for reader, out in bands:
        starts.append(memory[: reader.unread_bytes])
        memory = memory[len(starts[-1]) :]
        spans += reader.spans(first, out, starts[-1])
    outcome = reader.files.read(path, spans)
    layers = len(reader.format.layout.layers_in(first, len(bands[0][1])))
    for number, ((reader, out), start) in enumerate(zip(bands, starts, strict=True)):
        values = outcome.hashes[number * layers : (number + 1) * layers]
        if len(values) < layers:
            return number, outcome.error or BadRecordError("the segment ends inside the record")
        try:
            reader.check(first, out, values, start)
        except BadRecordError as error:
            return number, error
    return None


def read_whole(files: FileLayer, path: Path, out: memoryview, offset: int) -> None:
    """Blocking. Fills `out` from `offset` on. BadRecordError when the file ends before, OSError when the read fails."""
    outcome = files.read(path, [FileSpan(offset, out)])
    if not outcome.spans:
        raise outcome.error or BadRecordError("the segment ends inside the record")


def read_record(files: FileLayer, path: Path, key: BlockKey, offset: int, nbytes: int) -> bytearray:
    """Blocking. Reads the whole record with block `key` from the record's file.

    Raises:
        BadRecordError: the record is damaged, or another block's.
    """
    record = bytearray(nbytes)
    view = memoryview(record)
    read_whole(files, path, view, offset)
    header = unpack_header(record)
    if header.info.key != key or header.record_bytes != nbytes:
        raise BadRecordError("the record is another block's")
    header.check_slices(0, view[header.header_bytes : header.header_bytes + header.info.nbytes])
    return record
