"""Verified reads of records: nothing is returned but the block and the layers that were asked for, intact."""

from collections.abc import Sequence
from pathlib import Path

from moonpool.kv.blocks import BlockFormat, BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Segment
from services.kvstore.ssd.device import header_memory
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.records import BadRecordError, RecordHeader, data_size, unpack_header


class SsdReader:
    """Reads one block's record; the segment is not reclaimed until `release`.

    The header is read and verified with the first slice, in one read where that is layer 0.
    """

    def __init__(self, files: Files, segment: Segment, slot: int, block_format: BlockFormat) -> None:
        self.key: BlockKey = segment.keys[slot]
        self.format = block_format
        self.segment = segment
        self.slot = slot
        self._files = files
        self._offset = segment.offset(slot)
        self._header_bytes = segment.nbytes(slot) - data_size(block_format)
        self._header: RecordHeader | None = None
        self._hashes: dict[int, int] = {}
        self._released = False
        segment.readers += 1

    @property
    def info(self) -> BlockInfo | None:
        """The block as its record describes it, once a slice was read."""
        return self._header.info if self._header is not None else None

    def read_layers(self, first: int, outs: Sequence[memoryview]) -> None:
        """Blocking. Fills `outs` (`slice_bytes` each) with the verified bytes of consecutive layers, from `first` on.

        Raises:
            BadRecordError: the bytes read are not what was written; they never will be.
            OSError: the read failed, which says nothing of the record.
        """
        start = header_memory(max(0, self._header_bytes))
        header = self._header  # several threads may read it at once; they find the same
        if header is None and first == 0:
            read_whole(self._files, self.segment.path, [start, *outs], self._offset)
            header = self._header = self._check(start)
        else:
            if header is None:
                read_whole(self._files, self.segment.path, [start], self._offset)
                header = self._header = self._check(start)
            skipped = self._header_bytes + first * self.format.layout.slice_bytes
            read_whole(self._files, self.segment.path, outs, self._offset + skipped)
        for layer, out in enumerate(outs, first):
            self._hashes[layer] = header.check_slice(layer, out)

    def hash_of(self, layer: int) -> int:
        """The hash of a layer that was read, bound to the block."""
        return self._hashes[layer]

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
