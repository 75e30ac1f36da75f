"""The kvstore's SSD tier: blocks read from a cold disk beside plain reads, and put until durable beside plain appends.

Sustained Put: the tier is full before the clock starts, and three times what it holds is put, so that space is
reclaimed all the time. Cold Get: the store was restarted, so that its DRAM is empty, and its files were dropped from
the page cache. Plain reads are `preadv` of the same sizes in the same order by as many threads, from a file like a
segment, and once more with whole blocks. Plain appends sync as often as the store does.
"""

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.disk import append_seconds, drop_cache, layer_major, make_file, read_seconds, whole_blocks
from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import connected, some_at_once
from benchmarks.kvstore_shape import Memory, chain, layout_of, split
from benchmarks.processes import Child, child

READ_TARGET = 0.8
WRITE_TARGET = 0.8
LAYOUT = layout_of(1 << 20)
CHAIN_BLOCKS = 32
AT_ONCE = 2
DEPTH = 4
"""Threads that read; the store's own number of them."""
SYNC_BYTES = 32 << 20
"""Bytes of one of the store's commits."""
HEADER_BYTES = 4096
"""Of a record on disk: as far apart are the blocks in the file of plain reads."""
DRAM_BYTES = 192 << 20
"""Of the SSD tier's store: much less than what is put."""
SEGMENT_BYTES = 16 << 20
"""Of the store's segments: more than the default for such small tiers."""
TIMES_PUT = 3
"""Sustained Put moves this many times what its tier holds."""
MEMORY_BYTES = 64 << 20
MIN_BLOCKS = 288


@contextlib.contextmanager
def store(folder: Path, ssd_bytes: int, dram_bytes: int = DRAM_BYTES) -> Iterator[Child]:
    """A kvstore with an SSD tier in `folder`."""
    sizes = ("--ssd-bytes", str(ssd_bytes), "--segment-bytes", str(SEGMENT_BYTES))
    tier = ("--data-dir", str(folder), *sizes, "--read-threads", str(DEPTH))
    with child("services.kvstore", "--dram-bytes", str(dram_bytes), *tier, "--log-level", "warning") as process:
        yield process


def chains(seed: object, blocks: int) -> list[tuple[list[bytes], int]]:
    """Keys of chains of `blocks` blocks together, and the place of the first block of each."""
    counts = split(blocks, CHAIN_BLOCKS)
    return [(chain((seed, at), count), at * CHAIN_BLOCKS) for at, count in enumerate(counts)]


async def put_seconds(address: str, memory: Memory, seed: int, blocks: int, *, durable: bool) -> float:
    """Seconds until chains are VISIBLE, or DURABLE."""
    async with connected(address, LAYOUT, memory) as client:
        begin = time.perf_counter()
        await some_at_once(
            [functools.partial(client.put, keys, first) for keys, first in chains(seed, blocks)], AT_ONCE
        )
        if durable:
            await client.durable()
        return time.perf_counter() - begin


async def get_seconds(address: str, memory: Memory, seed: int, blocks: int) -> float:
    """Seconds until all chains have been read.

    Raises:
        RuntimeError: the data read differs from the data put.
    """
    memory.clear_target()
    async with connected(address, LAYOUT, memory) as client:
        begin = time.perf_counter()
        await some_at_once(
            [functools.partial(client.get, keys, first) for keys, first in chains(seed, blocks)], AT_ONCE
        )
        seconds = time.perf_counter() - begin
    if wrong := memory.differs(min(blocks, MEMORY_BYTES // LAYOUT.block_bytes), LAYOUT.block_bytes):
        raise RuntimeError(f"{wrong} blocks that were read differ from those put")
    return seconds


class Figures:
    """Seconds of each run, the store's and the references'."""

    def __init__(self) -> None:
        self.put: list[float] = []
        self.put_dram: list[float] = []
        self.append: list[float] = []
        self.get: list[float] = []
        self.read: list[float] = []
        self.read_whole: list[float] = []

    def rows(self, gigabytes: float) -> list[Row]:
        """The figures as GB/s."""

        def row(name: str, own: Sequence[float], limit: Sequence[float], beside: str, target: float | None) -> Row:
            pairs = [(gigabytes / a, gigabytes / b) for a, b in zip(own, limit, strict=True)]
            return paired(name, "GB/s", pairs, beside, target=target)

        slower = [max(both) for both in zip(self.append, self.put_dram, strict=True)]
        put, get = f"SSD, sustained Put until durable, {TIMES_PUT} times the tier", "SSD, cold Get"
        return [
            row(put, self.put, slower, "the lesser of append with the same sync and Put to DRAM", WRITE_TARGET),
            row(put, self.put, self.append, "append with the same sync", None),
            row(put, self.put, self.put_dram, "Put to DRAM", None),
            row(get, self.get, self.read, "plain reads of the same size, order and depth", READ_TARGET),
            row(get, self.get, self.read_whole, "plain reads of whole blocks", None),
        ]


async def put_sustained(folder: Path, memory: Memory, seed: int, blocks: int) -> float:
    """Seconds to put blocks until they are durable into a full tier that holds a third of them."""
    held = blocks // TIMES_PUT
    with store(folder, blocks_bytes(held)) as process:
        await put_seconds(process.address, memory, ~seed, 2 * held, durable=True)
        return await put_seconds(process.address, memory, seed, blocks, durable=True)


async def get_cold(folder: Path, memory: Memory, seed: int, blocks: int) -> float:
    """Seconds to read blocks that a store held before it was restarted and its files left the page cache."""
    with store(folder, 2 * blocks_bytes(blocks)) as process:
        await put_seconds(process.address, memory, seed, blocks, durable=True)
    with store(folder, 2 * blocks_bytes(blocks)) as process:
        drop_cache(folder)
        return await get_seconds(process.address, memory, seed, blocks)


def blocks_bytes(blocks: int) -> int:
    """Bytes of `blocks` records on disk."""
    return blocks * (LAYOUT.block_bytes + HEADER_BYTES)


async def one_run(seed: int, figures: Figures, folder: Path, memory: Memory, blocks: int, dram: Child) -> None:
    """Every figure once, in a new folder with the file of plain reads; `seed` differs from other runs'."""
    nbytes = blocks * LAYOUT.block_bytes
    figures.put.append(await put_sustained(folder / "put", memory, seed, blocks))
    figures.append.append(append_seconds(folder / "append", memory.source, 1 << 20, nbytes, SYNC_BYTES))
    figures.put_dram.append(await put_seconds(dram.address, memory, seed, blocks, durable=False))
    figures.get.append(await get_cold(folder / "get", memory, seed, blocks))
    pitch = LAYOUT.block_bytes + HEADER_BYTES
    orders = (
        (figures.read, layer_major(blocks, LAYOUT.layers, LAYOUT.slice_bytes, pitch, CHAIN_BLOCKS)),
        (figures.read_whole, whole_blocks(blocks, LAYOUT.block_bytes, pitch)),
    )
    for seconds, pieces in orders:
        drop_cache(folder)
        seconds.append(read_seconds(folder / "plain", pieces, DEPTH))


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows of this part."""
    blocks = max(MIN_BLOCKS, int(options.ssd_gigabytes * 1e9) // LAYOUT.block_bytes)
    memory = Memory(MEMORY_BYTES)
    figures = Figures()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as shared,
        child("services.kvstore", "--dram-bytes", str(2 * DRAM_BYTES), "--log-level", "warning") as dram,
    ):
        make_file(Path(shared) / "plain", blocks_bytes(blocks))
        for number in range(options.runs):
            with tempfile.TemporaryDirectory(dir=shared) as name:
                folder = Path(name)
                (folder / "plain").hardlink_to(Path(shared) / "plain")
                await one_run(number, figures, folder, memory, blocks, dram)
            progress(f"SSD: run {number + 1} of {options.runs}")
    rows = figures.rows(blocks * LAYOUT.block_bytes / 1e9)
    for row in rows:
        progress(f"{row.name}: {row.value:.2f} GB/s, {row.ratio:.2f} of {row.limit_name}")
    return rows
