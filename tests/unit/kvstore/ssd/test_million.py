"""Opening a tier that holds a million blocks."""

import hashlib
import time
from pathlib import Path

import pytest

from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.index import Index, IndexChange
from moonpool.kvstore.ssd.segment import ENTRY, RecordKind
from moonpool.kvstore.ssd.segment_files import segment_path
from moonpool.kvstore.ssd.tier import open_tier
from tests.unit.kvstore.helpers import FORMAT

SEGMENTS, PER_SEGMENT, PAGES, BATCH = 64, 15_625, 17, 625


def make(path: Path) -> None:
    """A tier whose segments are holes: opening it reads none of them."""
    (path / "segments").mkdir(parents=True)
    index = Index(FileLayer(), path / "index", sync=False)
    for number in range(1, SEGMENTS + 1):
        rows = [
            ENTRY.pack(hashlib.blake2b(b"%d.%d" % (number, n), digest_size=32).digest(), n * PAGES, PAGES, n % 3, 0)
            for n in range(PER_SEGMENT)
        ]
        entries = {(number, at): b"".join(rows[at : at + BATCH]) for at in range(0, PER_SEGMENT, BATCH)}
        kinds = {number: [RecordKind(FORMAT, tenant) for tenant in "abc"]}
        index.commit(IndexChange(entries=entries, segments={number: PER_SEGMENT * PAGES * ALIGN}, kinds=kinds))
        with segment_path(path / "segments", number).open("wb") as file:
            file.truncate(PER_SEGMENT * PAGES * ALIGN)
    index.close()


@pytest.mark.slow
def test_a_million_blocks_are_there_within_seconds(tmp_path: Path) -> None:
    make(tmp_path)
    wall, cpu = time.perf_counter(), time.process_time()
    tier = open_tier([tmp_path], 128 << 30, 1 << 30)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{len(tier.catalogue)} blocks in {wall:.2f} s, {cpu:.2f} s of them computing")
    assert len(tier.catalogue) == SEGMENTS * PER_SEGMENT
    assert cpu < 5
    tier.close()
