"""Scrubbing: reads all blocks on SSD in the background, at a bounded rate, and drops or rewrites damaged ones.

A pass reads each record once, oldest segments first, and compares the record with the checksums and with the index's
entry. Then each disk's index is checked, too. So damage is found before a reader asks, while DRAM or another copy may
have the block still.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.core.read_leases import LeasedBlock
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.ssd.reader import SsdReader, read_record
from moonpool.kvstore.ssd.records import BadRecordError, unpack_header
from moonpool.kvstore.ssd.segment import Segment
from moonpool.kvstore.ssd.tier import SsdTier

log = get_logger(__name__)
FIRST_AFTER_S = 600.0
BETWEEN_S = 3600.0
SCRUB_BYTES_PER_S = 8 << 20
"""Bytes read in a second, on average: a terabyte in 35 hours."""


@dataclasses.dataclass(eq=False)
class Scrubber:
    """Scrubs the SSD tier of a store; `run` until cancelled, or one pass by `scrub`.

    Attributes:
        bytes_per_s: most bytes that are read in a second, on average.
        pool: reads.
        sleep: waits so many seconds.
    """

    store: BlockStore
    ssd: SsdTier
    pool: Executor
    bytes_per_s: int = SCRUB_BYTES_PER_S
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        await self.sleep(FIRST_AFTER_S)
        while True:
            await self.scrub()
            await self.sleep(BETWEEN_S)

    async def scrub(self) -> None:
        """Read all blocks once, and then have the indexes checked."""
        for segment in self.ssd.catalogue.by_age():
            bad = 0
            for row in list(self.ssd.catalogue.live_rows(segment)):
                if self.ssd.catalogue.segments.get(segment.id) is not segment:
                    break  # reclaimed meanwhile
                if self.ssd.catalogue.is_live(segment, row):
                    bad += await self._check(segment, row)
            if bad:
                log.warning(
                    "damaged blocks were found on disk and dropped",
                    path=str(segment.path),
                    blocks=bad,
                    command=f"moonpool kvstore verify {self.ssd.disks[segment.disk].folder.path}",
                )
        self.ssd.scrub_passes += 1
        self.ssd.check_indexes()
        self.store.tiers.listener.work()

    async def _check(self, segment: Segment, row: int) -> bool:
        """Check one block; return whether the block was damaged. An unreadable block is left alone."""
        reader = SsdReader(self.ssd.disks[segment.disk].folder.files, segment, row)
        try:
            await asyncio.get_running_loop().run_in_executor(self.pool, _compare, reader)
        except BadRecordError:
            before = self.store.reads.bad_blocks
            self.store.reads.lost(LeasedBlock(reader=reader))
            self.store.writes.queue.add(filter(None, [self.store.tiers.dram.get(reader.key)]), used=True)
            return self.store.reads.bad_blocks > before
        except (OSError, MemoryError):
            return False
        finally:
            reader.release()
            self.ssd.scrubbed_bytes += segment.nbytes(row)
            await self.sleep(segment.nbytes(row) / self.bytes_per_s)
        return False


def _compare(reader: SsdReader) -> None:
    """Blocking.

    Raises BadRecordError if a record is damaged, or is not what the index says; OSError if the disk is away.
    """
    segment, row = reader.segment, reader.row
    where = segment.path, reader.key, segment.offset(row), segment.nbytes(row)
    header = unpack_header(read_record(reader.files, *where))
    if header.kind != segment.kind(row):
        raise BadRecordError("the index names another format, tenant or key")
