"""Records of the SSD tier being read.

Owns verification: nothing leaves here that is not the block and the layers that were asked for, intact. Must not know
of the index or of budgets.
"""

from collections.abc import Sequence

from moonpool.kv.blocks import BlockFormat, BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Segment
from services.kvstore.ssd.device import header_memory
from services.kvstore.ssd.records import BadRecordError, RecordHeader, data_size, unpack_header
from services.kvstore.ssd.segments import SegmentFile


class SsdReader:
    """Reads one block's record. The header is read and verified with the first slice, in one go where it is layer 0."""

    def __init__(self, segment: Segment, slot: int, block_format: BlockFormat) -> None:
        self.key: BlockKey = segment.keys[slot]
        self.format = block_format
        self.segment = segment
        self.slot = slot
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

    def read(self, layer: int, out: memoryview) -> None:
        """Blocking. Fills `out` with one layer's verified bytes.

        Raises:
            BadRecordError: the record is not the block's, or not intact.
            OSError: it cannot be read.
        """
        self.read_layers(layer, [out])

    def read_layers(self, first: int, outs: Sequence[memoryview]) -> None:
        """Blocking. Fills `outs` with the verified bytes of as many consecutive layers, from `first` on.

        Raises:
            BadRecordError: the record is not the block's, or not intact.
            OSError: it cannot be read.
        """
        file = self.segment.file
        header = self._header  # several threads may find it at once; they find the same
        if header is None and first == 0:
            start = header_memory(max(0, self._header_bytes))
            file.read([start, *outs], self._offset)
            header = self._header = self._check(unpack_header(bytes(start)))
        else:
            if header is None:
                header = self._header = self._check(file.read_header(self._offset))
            file.read(outs, self._offset + self._header_bytes + first * self.format.layout.slice_bytes)
        for layer, out in enumerate(outs, first):
            self._hashes[layer] = header.check_slice(layer, out)

    def hash_of(self, layer: int) -> int:
        """The hash of a layer that was read, bound to the block."""
        return self._hashes[layer]

    def _check(self, header: RecordHeader) -> RecordHeader:
        if header.info.key != self.key or header.info.format != self.format:
            raise BadRecordError("the record is another block's")
        if header.header_bytes != self._header_bytes:
            raise BadRecordError("the record's header is of another size")
        return header

    def release(self) -> None:
        """Lets the segment be reclaimed again."""
        assert not self._released
        self._released = True
        self.segment.release()


def read_record(file: SegmentFile, key: BlockKey, offset: int, nbytes: int) -> bytearray:
    """Blocking. A whole record as it lies in its file, verified.

    Args:
        file: where it lies.
        key: of its block.
        offset: where it begins, in bytes.
        nbytes: how long it is.

    Raises:
        BadRecordError: it is not intact, or another block's.
        OSError: it cannot be read.
    """
    record = bytearray(nbytes)
    view = memoryview(record)
    file.read([view], offset)
    header = unpack_header(record)
    if header.info.key != key or header.record_bytes != len(record):
        raise BadRecordError("the record is another block's")
    check_data(header, view[header.header_bytes :])
    return record


def check_data(header: RecordHeader, data: memoryview) -> None:
    """Verifies all layers of a record.

    Args:
        header: its header.
        data: what lies behind it; may be longer than the block.

    Raises:
        BadRecordError: a layer is not what was written.
    """
    size = header.info.format.layout.slice_bytes
    for layer in range(header.info.format.layout.layers):
        header.check_slice(layer, data[layer * size : (layer + 1) * size])
