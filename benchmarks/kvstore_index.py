"""Makes a data folder of a kvstore with very many tiny blocks, without putting them.

The index is written by the store's own code; the segment files have the right sizes and are holes, since the benchmark
reads no block. Putting a million blocks would write 8 GB: a record takes 8 KiB, however small.
"""

from pathlib import Path

from benchmarks.kvstore_shape import TINY, chain, namespace_of
from moonpool.base.kv.blocks import BlockFormat
from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.index import Index, IndexChange
from moonpool.kvstore.ssd.segment import ENTRY, RecordKind
from moonpool.kvstore.ssd.segment_files import segment_path

CHAIN_BLOCKS = 2000
RECORD_UNITS = 2
"""A header and the data, each rounded up."""
ROWS_PER_VALUE = 2000
"""As the store's commits would leave them: some thousand records each."""
SEGMENT_ROWS = 16_000


def chain_keys(number: int) -> list[bytes]:
    """One chain's keys."""
    return chain(("index", number), CHAIN_BLOCKS)


def record_bytes() -> int:
    """Of a tiny block on disk."""
    return RECORD_UNITS * ALIGN


def build(folder: Path, chains: int) -> int:
    """Makes a data folder with `chains` chains of `CHAIN_BLOCKS`; returns the number of blocks."""
    (folder / "segments").mkdir(parents=True)
    index = Index(FileLayer(), folder / "index", 256 << 20, sync=False)
    try:
        kinds = [RecordKind(BlockFormat(namespace_of(TINY), TINY), "")]
        keys = (key for number in range(chains) for key in chain_keys(number))
        left, segment = chains * CHAIN_BLOCKS, 0
        while left:
            segment += 1
            rows = min(SEGMENT_ROWS, left)
            left -= rows
            entries = {}
            for first in range(0, rows, ROWS_PER_VALUE):
                slots = range(first, min(first + ROWS_PER_VALUE, rows))
                packed = [ENTRY.pack(next(keys), slot * RECORD_UNITS, RECORD_UNITS, 0, 0) for slot in slots]
                entries[segment, first] = b"".join(packed)
            change = IndexChange(entries=entries, segments={segment: rows * record_bytes()}, kinds={segment: kinds})
            index.commit(change)
            with segment_path(folder / "segments", segment).open("wb") as file:
                file.truncate(rows * record_bytes())
        index.sync()
    finally:
        index.close()
    return chains * CHAIN_BLOCKS
