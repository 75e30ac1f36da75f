"""`MatchPrefix` over 2,000 keys in a store of a million blocks, memory per indexed block, and how long a restart takes.

The store is started on a data folder that was made beforehand, beside one on an empty folder.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import TINY, Memory, StoreClient, chain, connected, namespace_of
from benchmarks.processes import Child
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
    """Make a data folder with `chains` chains of `CHAIN_BLOCKS`; return the number of blocks."""
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


CALLS = 200
KEY_BYTES = 32.0
SEED = 1


def start(folder: Path, blocks: int) -> tuple[Child, float]:
    """A store on a folder, and the seconds until serving."""
    budget = max(1 << 30, 2 * blocks * record_bytes())
    arguments = ("--data-dir", str(folder), "--ssd-bytes", str(budget), "--dram-bytes", str(64 << 20))
    begin = time.perf_counter()
    process = Child("moonpool.kvstore", *arguments, "--log-level", "warning")
    return process, time.perf_counter() - begin


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


async def latencies(client: StoreClient, chains: Sequence[int], keys: int) -> list[float]:
    """Milliseconds per call for the first `keys` of each chain.

    Raises:
        RuntimeError: the store does not have them.
    """
    found = []
    for number in chains:
        asked = chain_keys(number)[:keys]
        begin = time.perf_counter()
        blocks = await client.match(asked)
        found.append(1e3 * (time.perf_counter() - begin))
        if blocks != keys:
            raise RuntimeError(f"the store has {blocks} of {keys} blocks")
    return found


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows of this part."""
    chains = max(1, options.blocks // CHAIN_BLOCKS)
    restarts: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    calls: list[tuple[list[float], list[float]]] = []
    generator = random.Random(SEED)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        blocks = build(folder / "full", chains)
        progress(f"an index of {blocks:,} blocks was made")
        for number in range(options.runs):
            empty, empty_s = start(folder / f"empty-{number}", blocks)
            empty_bytes = empty.resident_bytes()
            empty.stop()
            full, full_s = start(folder / "full", blocks)
            try:
                memory.append(((full.resident_bytes() - empty_bytes) / blocks, KEY_BYTES))
                restarts.append((full_s, empty_s))
                asked = [generator.randrange(chains) for _ in range(CALLS)]
                async with connected(full.address, TINY, Memory(TINY.block_bytes)) as client:
                    await latencies(client, asked[:10], CHAIN_BLOCKS)
                    calls.append((await latencies(client, asked, CHAIN_BLOCKS), await latencies(client, asked, 1)))
            finally:
                full.stop()
            progress(f"restart {number + 1} of {options.runs}: {full_s:.2f} s, empty {empty_s:.2f} s")
    where = f"in {blocks:,} blocks on SSD (index made, not put)"
    match = f"MatchPrefix over {CHAIN_BLOCKS:,} keys {where}"
    p50 = [(statistics.median(whole), statistics.median(single)) for whole, single in calls]
    p99 = [(percentile(whole, 99), percentile(single, 99)) for whole, single in calls]
    return [
        paired(f"{match}, p50", "ms", p50, "over 1 key", less_is_better=True),
        paired(f"{match}, p99", "ms", p99, "over 1 key", less_is_better=True),
        paired(f"memory of a block {where}", "B", memory, "its key", less_is_better=True),
        paired(f"restart with {blocks:,} blocks", "s", restarts, "of an empty store", less_is_better=True),
    ]
