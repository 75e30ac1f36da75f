"""Which blocks are worth writing to the SSD tier: hit shares and bytes written under each rule, on traces.

`python -m benchmarks.admission` replays traces through the store's own two tiers, with blocks of a few bytes: each
request reads the leading blocks that are there, and puts the others. A replay is deterministic. The hit share covers
all block references, a request's hits stop at the first miss; written are records, those carried over included.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.eviction import of_traces, trace_flags
from benchmarks.frame import Absent, Progress, Row, run
from moonpool.base.kv.blocks import NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.policies import LRU
from moonpool.kvstore.ssd.admission import ADMIT_ALL, ADMIT_REUSED, SsdAdmission
from moonpool.kvstore.ssd.records import record_size
from moonpool.kvstore.ssd.tier import open_tier

FORMAT = BlockFormat(bytes(32), KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="float32"))
BLOCK = FORMAT.layout.block_bytes
RECORD = record_size(BlockInfo(BlockKey(bytes(32)), NO_PARENT, "", FORMAT))
DATA = memoryview(bytes(BLOCK))
HASH = slice_hash(DATA)
SIZES = ((1_000, 10_000), (3_000, 30_000), (10_000, 100_000))


class Outcome(NamedTuple):
    """Of one replay. `written_share`: records written per block put."""

    hit_share: float
    written_share: float


def replay(chains: Sequence[Sequence[BlockKey]], admission: SsdAdmission, dram: int, ssd: int, folder: Path) -> Outcome:
    """Replays requests through a store with tiers of so many blocks; `folder` is empty."""
    tier = open_tier([folder], ssd * RECORD, ssd * RECORD // 64, durability="process", admission=admission)
    store = BlockStore(DramTier(dram * BLOCK, LRU()), tier)
    hits = 0
    try:
        for chain in chains:
            hits += read(store, chain)
            put(store, chain)
            write(store)
        put_blocks = store.writes.blocks_put
        written = tier.written_bytes / RECORD
    finally:
        tier.abandon()
    return Outcome(hits / sum(map(len, chains)), written / put_blocks)


def read(store: BlockStore, chain: Sequence[BlockKey]) -> int:
    """Reads the leading blocks that are there, which brings cold ones into DRAM as far as there is room; how many."""
    lease = store.reads.open(chain, FORMAT, promote=True)
    for source in lease.sources:
        if source.reader is not None:
            source.reader.read_layers(0, source.memory(range(1), FORMAT.layout))
            source.filled = 1
    store.reads.close(lease)
    return lease.blocks


def put(store: BlockStore, chain: Sequence[BlockKey]) -> None:
    """Puts blocks that are not there, as far as DRAM has room for them."""
    parent = NO_PARENT
    for key in chain:
        if key not in store.tiers:
            while not store.tiers.reserve({"": BLOCK}):
                write(store)
            block = DramBlock(BlockInfo(key, parent, "", FORMAT), DATA, [bind(HASH, key, 0)])
            store.tiers.insert([block])
            store.writes.blocks_put += 1
            store.writes.arrived([block])
        parent = key
    store.tiers.dram.arrived(chain)


def write(store: BlockStore) -> None:
    """Commits all that is queued."""
    while (plan := store.writes.queue.next_plan()) is not None:
        assert store.tiers.ssd is not None
        store.tiers.ssd.commit(plan)
        store.writes.queue.plan_done(None)
        if plan.idle and not plan.blocks:
            return


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    return of_traces(options, "rules", ADMIT_ALL, lambda trace, chains: rows_of(trace, chains, options, progress))


def rows_of(
    trace: str, chains: Sequence[Sequence[BlockKey]], options: argparse.Namespace, progress: Progress
) -> Iterator[Row]:
    """Hit share and records written with `ADMIT_REUSED` at each size of the tiers, beside those with `ADMIT_ALL`."""
    for dram, ssd in options.sizes:
        where = f"{trace}, {dram} blocks in DRAM, {ssd} on SSD, {ADMIT_REUSED}"
        outcomes = {}
        for rule in (ADMIT_ALL, ADMIT_REUSED):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                outcomes[rule] = replay(chains, SsdAdmission(rule), dram, ssd, Path(folder))
            progress(f"{trace}, {dram} and {ssd} blocks, {rule}: {outcomes[rule]}")
        every, reused = outcomes[ADMIT_ALL], outcomes[ADMIT_REUSED]
        hits = reused.hit_share / every.hit_share if every.hit_share else 1.0
        yield Row(where, reused.hit_share, "hit share", 0.0, ADMIT_ALL, every.hit_share, hits)
        spared = every.written_share / reused.written_share if reused.written_share else 1.0
        written = reused.written_share, "records per block put", 0.0, ADMIT_ALL, every.written_share
        yield Row(f"{where}, written", *written, spared)


def sizes(text: str) -> list[tuple[int, int]]:
    """Sizes of both tiers: 1000/10000,3000/30000."""
    try:
        return [(int(dram), int(ssd)) for dram, ssd in (part.split("/") for part in text.split(","))]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be DRAM/SSD in blocks, comma-separated: {error}") from error


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    trace_flags(parser)
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="DRAM/SSD in blocks, comma-separated")
    parser.add_argument("--folder", type=Path, help="where the tiers lie meanwhile (default: the temporary folder)")


if __name__ == "__main__":
    run("admission", measure, flags=flags)
