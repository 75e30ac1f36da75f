"""`MatchPrefix` over 2,000 keys in a store of a million blocks, memory per indexed block, and how long a restart takes.

The store is started on a data folder that was made beforehand (kvstore_index.py), beside one on an empty folder.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import StoreClient, connected
from benchmarks.kvstore_index import CHAIN_BLOCKS, build, chain_keys, record_bytes
from benchmarks.kvstore_shape import TINY, Memory
from benchmarks.processes import Child

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
    p50 = [(statistics.median(many), statistics.median(one)) for many, one in calls]
    p99 = [(percentile(many, 99), percentile(one, 99)) for many, one in calls]
    return [
        paired(f"{match}, p50", "ms", p50, "over 1 key", less_is_better=True),
        paired(f"{match}, p99", "ms", p99, "over 1 key", less_is_better=True),
        paired(f"memory of a block {where}", "B", memory, "its key", less_is_better=True),
        paired(f"restart with {blocks:,} blocks", "s", restarts, "of an empty store", less_is_better=True),
    ]
