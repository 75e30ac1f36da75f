"""When the first layer of a prefix with a hundred blocks is whole, beside all layers: from DRAM, and from a cold SSD.

The sooner, the earlier a computation can begin that needs layer after layer.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import Memory, chain, connected, layout_of
from benchmarks.kvstore_ssd import store
from benchmarks.limits import drop_cache

BLOCKS = 100
LAYOUT = layout_of(1 << 20)
DRAM_BYTES = 256 << 20
SSD_BYTES = 256 << 20

Sample = tuple[float, float]
"""Milliseconds to the first layer, and to all."""


async def timed(address: str, memory: Memory) -> Sample:
    """Read the prefix once."""
    began = [0.0, 0.0]

    def on_layer(layer: int) -> None:
        if not layer:
            began[1] = time.perf_counter()

    async with connected(address, LAYOUT, memory) as client:
        await client.match(chain("prefix", BLOCKS))  # the connection is there before the clock runs
        began[0] = time.perf_counter()
        await client.get(chain("prefix", BLOCKS), on_layer=on_layer)
        ended = time.perf_counter()
    return 1e3 * (began[1] - began[0]), 1e3 * (ended - began[0])


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows of this part."""
    nbytes = BLOCKS * LAYOUT.block_bytes
    memory = Memory(nbytes)
    warm: list[Sample] = []
    cold: list[Sample] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        with store(folder, SSD_BYTES, DRAM_BYTES) as process:
            async with connected(process.address, LAYOUT, memory) as client:
                await client.put(chain("prefix", BLOCKS))
                await client.durable()
            warm += [await timed(process.address, memory) for _ in range(options.runs)]
        for _ in range(options.runs):
            with store(folder, SSD_BYTES, DRAM_BYTES) as process:
                drop_cache(folder)
                cold.append(await timed(process.address, memory))
    rows = []
    for where, samples in (("DRAM", warm), ("cold SSD", cold)):
        name = f"first of {LAYOUT.layers} layers of {BLOCKS} blocks of 1 MiB, from {where}"
        rows.append(paired(name, "ms", samples, "all layers", less_is_better=True))
        progress(f"{name}: {rows[-1].value:.1f} ms, all {rows[-1].limit_value:.1f} ms")
    return rows
