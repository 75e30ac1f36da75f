"""One record of the SSD tier being read, and the segment it lies in.

Owns verification: nothing leaves here that is not the block and the layer that were asked for, intact. Must not know of
the index or of budgets.
"""

import dataclasses

from moonpool.kv.keys import BlockKey
from services.kvstore.blocks import BlockFormat, BlockInfo
from services.kvstore.records import BadRecordError, RecordHeader
from services.kvstore.segments import SegmentFile


@dataclasses.dataclass(slots=True)
class Segment:
    """One segment as the event loop knows it.

    Attributes:
        number: its id; ascending with age.
        file: its file.
        size: committed bytes.
        keys: of the records in it, in order; some may have been dropped since.
        readers: who reads from it; it is not reclaimed while there are any.
    """

    number: int
    file: SegmentFile
    size: int = 0
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    readers: int = 0


class SsdReader:
    """Reads one block's record. The header is read and verified with the first slice."""

    def __init__(self, segment: Segment, key: BlockKey, block_format: BlockFormat, offset: int) -> None:
        self.key = key
        self.format = block_format
        self.segment = segment
        self.offset = offset
        self._header: RecordHeader | None = None
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
        header = self._header
        if header is None:  # several threads may do this at once; they find the same
            header = self.segment.file.read_header(self.offset)
            if header.info.key != self.key or header.info.format != self.format:
                raise BadRecordError("the record is another block's")
            self._header = header
        size = self.format.layout.slice_bytes
        self.segment.file.read_into(out, self.offset + header.header_bytes + layer * size)
        header.check_slice(layer, out)

    def release(self) -> None:
        """Lets the segment be reclaimed again."""
        assert not self._released
        self._released = True
        self.segment.readers -= 1
