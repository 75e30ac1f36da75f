"""The kvstore's SSD tier: blocks read from a cold disk beside plain reads, and put until durable beside plain appends.

Sustained Put: the tier is full before the clock starts, and several times what it holds is put, so that space is
reclaimed all the time (`--ssd-put-gigabytes 20 --ssd-tier-gigabytes 2` for a long stretch). A disk's speed depends on
the work just before. So a gigabyte is put at a time, in turns with as much of plain appends and of Put to DRAM, every
second time in reverse order. Each portion counts until durable, and is a separate pair. Plain appends sync as often as
the store does.

Cold Get: the store was restarted, so that its DRAM is empty, and its files were dropped from the page cache. Plain
reads are `preadv` of the same sizes in the same order by as many threads, from a file like a segment, through the page
cache with the kernel's reading ahead, each thread into the same few bytes. They are read once more in whole blocks,
and directly in such pieces as the store reads.
"""

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import Memory, chain, connected, layout_of, some_at_once, split
from benchmarks.limits import Piece, append_seconds, drop_cache, layer_major, make_file, read_seconds, whole_blocks
from benchmarks.processes import Child, child, own_cpu_s
from moonpool.kvstore.layer_reader import PIECE_BYTES

READ_TARGET = 0.8
WRITE_TARGET = 0.8
Call = Callable[[], Awaitable[None]]
LAYOUT = layout_of(1 << 20)
CHAIN_BLOCKS = 32
AT_ONCE = 2
DEPTH = 4
"""Reading threads by default; the store's own number of them."""
SYNC_BYTES = 32 << 20
"""Bytes per store commit."""
HEADER_BYTES = 4096
"""Of a record on disk: as far apart are the blocks in the file of plain reads."""
DRAM_BYTES = 192 << 20
"""Of the SSD tier's store: much less than what is put."""
SEGMENT_BYTES = 32 << 20
"""Least of a segment, as much as a commit; for small tiers it is more than the default, which is a 64th of the tier."""
TIMES_PUT = 3
"""Sustained Put moves this multiple of the tier's capacity by default."""
PORTION_BYTES = 1 << 30
"""Least that is put, or appended, at a time, unless less is put in all."""
MEMORY_BYTES = 64 << 20
PARTS = 10
"""Of a stretch, after each of which it is told how far it has come."""
MIN_BLOCKS = 288


@contextlib.contextmanager
def store(folder: Path, ssd_bytes: int, dram_bytes: int = DRAM_BYTES, threads: int = DEPTH) -> Iterator[Child]:
    """A kvstore with an SSD tier in `folder`, which so many threads read."""
    sizes = ("--ssd-bytes", str(ssd_bytes), "--set", f"segment_bytes={max(SEGMENT_BYTES, ssd_bytes // 64)}")
    tier = ("--data-dir", str(folder), *sizes, "--set", f"read_threads={threads}")
    with child("moonpool.kvstore", "--dram-bytes", str(dram_bytes), *tier, "--log-level", "warning") as process:
        yield process


def chains(seed: object, blocks: int) -> list[tuple[list[bytes], int]]:
    """Keys for chains with `blocks` blocks together, and each chain's first place."""
    counts = split(blocks, CHAIN_BLOCKS)
    return [(chain((seed, at), count), at * CHAIN_BLOCKS) for at, count in enumerate(counts)]


def told(calls: Sequence[Call], what: str, progress: Progress) -> Iterator[Call]:
    """The same calls; each tenth of them that has begun is told."""
    begin = time.perf_counter()
    for done, call in enumerate(calls, 1):
        yield call
        if done * PARTS // len(calls) > (done - 1) * PARTS // len(calls):
            progress(f"SSD: {what}: {done} of {len(calls)} chains, {time.perf_counter() - begin:.1f} s")


async def put_seconds(
    address: str, memory: Memory, seed: object, blocks: int, what: str, progress: Progress, *, durable: bool
) -> float:
    """Seconds until chains are VISIBLE, or DURABLE."""
    async with connected(address, LAYOUT, memory) as client:
        begin = time.perf_counter()
        calls = [functools.partial(client.put, keys, first) for keys, first in chains(seed, blocks)]
        await some_at_once(told(calls, what, progress), AT_ONCE)
        if durable:
            await client.durable()
        return time.perf_counter() - begin


class Cost(NamedTuple):
    """One stretch: seconds, and processor seconds over all participants."""

    seconds: float
    cpu_s: float


async def get_cost(process: Child, memory: Memory, seed: int, blocks: int, progress: Progress) -> Cost:
    """The cost of reading all chains.

    Raises:
        RuntimeError: the data read differs from the data put.
    """
    memory.clear_target()
    async with connected(process.address, LAYOUT, memory) as client:
        begin, cpu_s = time.perf_counter(), process.cpu_s() + own_cpu_s()
        calls = [functools.partial(client.get, keys, first) for keys, first in chains(seed, blocks)]
        await some_at_once(told(calls, "cold Get", progress), AT_ONCE)
        cost = Cost(time.perf_counter() - begin, process.cpu_s() + own_cpu_s() - cpu_s)
    if wrong := memory.differs(min(blocks, MEMORY_BYTES // LAYOUT.block_bytes), LAYOUT.block_bytes):
        raise RuntimeError(f"{wrong} blocks that were read differ from those put")
    return cost


def read_cost(path: Path, pieces: Sequence[Piece], threads: int, *, direct: bool = False) -> Cost:
    """What plain reads cost."""
    cpu_s = own_cpu_s()
    seconds = read_seconds(path, pieces, threads, direct=direct)
    return Cost(seconds, own_cpu_s() - cpu_s)


class Figures:
    """Seconds for each portion or run, or the cost; the store's and the references'."""

    def __init__(self) -> None:
        self.put: list[float] = []
        self.put_dram: list[float] = []
        self.append: list[float] = []
        self.get: list[Cost] = []
        self.read: list[Cost] = []
        self.read_whole: list[Cost] = []
        self.read_direct: list[Cost] = []

    def rows(self, sizes: "Sizes") -> list[Row]:
        """The figures as GB/s."""

        def row(
            name: str, blocks: int, own: Sequence[float], limit: Sequence[float], beside: str, target: float | None
        ) -> Row:
            gigabytes = blocks * LAYOUT.block_bytes / 1e9
            pairs = [(gigabytes / a, gigabytes / b) for a, b in zip(own, limit, strict=True)]
            return paired(name, "GB/s", pairs, beside, target=target)

        slower = [max(both) for both in zip(self.append, self.put_dram, strict=True)]
        put, moved = f"SSD, sustained Put until durable, {sizes.put / sizes.held:.0f} times the tier", sizes.portion
        get, read, plain = "SSD, cold Get", sizes.read, "plain reads of the same size, order and depth"
        gigabytes = read * LAYOUT.block_bytes / 1e9
        cpu = [(a.cpu_s / gigabytes, b.cpu_s / gigabytes) for a, b in zip(self.get, self.read, strict=True)]

        beside: tuple[tuple[Sequence[Cost], str, float | None], ...] = (
            (self.read, plain, READ_TARGET),
            (self.read_whole, "plain reads of whole blocks", None),
            (self.read_direct, f"direct reads of {PIECE_BYTES >> 10} KiB", None),
        )
        return [
            row(put, moved, self.put, slower, "the lesser of append with the same sync and Put to DRAM", WRITE_TARGET),
            row(put, moved, self.put, self.append, "append with the same sync", None),
            row(put, moved, self.put, self.put_dram, "Put to DRAM", None),
            *(row(get, read, _seconds(self.get), _seconds(costs), name, target) for costs, name, target in beside),
            paired(f"{get}, processors", "s/GB", cpu, plain, less_is_better=True),
        ]


def _seconds(costs: Sequence[Cost]) -> list[float]:
    return [cost.seconds for cost in costs]


class Sizes(NamedTuple):
    """Blocks that are read, that are put, and that the tier holds into which they are put; threads that read."""

    read: int
    put: int
    held: int
    threads: int = DEPTH

    @property
    def portions(self) -> int:
        """In how many portions they are put."""
        return max(1, self.put * LAYOUT.block_bytes // PORTION_BYTES)

    @property
    def portion(self) -> int:
        """Blocks of one."""
        return self.put // self.portions


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Of the flags; never less than `MIN_BLOCKS`, or for a tier a third of the tier's blocks."""

    def blocks(gigabytes: float | None, default: int, least: int) -> int:
        return default if gigabytes is None else max(least, int(gigabytes * 1e9) // LAYOUT.block_bytes)

    read = blocks(options.ssd_gigabytes, 0, MIN_BLOCKS)
    put = blocks(options.ssd_put_gigabytes, read, MIN_BLOCKS)
    held = blocks(options.ssd_tier_gigabytes, put // TIMES_PUT, MIN_BLOCKS // TIMES_PUT)
    return Sizes(read, put, held, options.ssd_threads)


async def put_in_turns(
    seed: int, figures: Figures, folder: Path, memory: Memory, sizes: Sizes, dram: str, progress: Progress
) -> None:
    """Put to a store in `folder` whose tier is full, append to a file there, and put to the store at `dram`."""
    nbytes = sizes.portion * LAYOUT.block_bytes

    async def put(address: str, portion: int, *, durable: bool) -> float:
        blocks = sizes.portion
        return await put_seconds(address, memory, (seed, portion), blocks, "", lambda words: None, durable=durable)

    async def append() -> float:
        return append_seconds(folder / "append", memory.source, 1 << 20, nbytes, SYNC_BYTES)

    with store(folder / "put", blocks_bytes(sizes.held)) as process:
        await put_seconds(process.address, memory, seed, 2 * sizes.held, "filling the tier", progress, durable=True)
        for portion in range(sizes.portions):
            ways = (
                (figures.put, functools.partial(put, process.address, portion, durable=True)),
                (figures.append, append),
                (figures.put_dram, functools.partial(put, dram, portion, durable=False)),
            )
            for seconds, way in ways if (seed + portion) % 2 == 0 else reversed(ways):
                seconds.append(await way())
            rates = ", ".join(f"{nbytes / 1e9 / seconds[-1]:.2f}" for seconds, _ in ways)
            progress(f"SSD: {portion + 1} of {sizes.portions}: sustained Put, appends, Put to DRAM: {rates} GB/s")


async def get_cold(folder: Path, memory: Memory, seed: int, sizes: Sizes, progress: Progress) -> Cost:
    """The cost of reading blocks that a store held before being restarted and dropped from the page cache."""
    blocks = sizes.read
    with store(folder, 2 * blocks_bytes(blocks)) as process:
        await put_seconds(process.address, memory, seed, blocks, "Put of what is read", progress, durable=True)
    with store(folder, 2 * blocks_bytes(blocks), threads=sizes.threads) as process:
        drop_cache(folder)
        return await get_cost(process, memory, seed, blocks, progress)


def blocks_bytes(blocks: int) -> int:
    """Bytes of `blocks` records on disk."""
    return blocks * (LAYOUT.block_bytes + HEADER_BYTES)


async def one_run(
    seed: int, figures: Figures, folder: Path, memory: Memory, sizes: Sizes, dram: str, progress: Progress
) -> None:
    """Every figure once, those of sustained Put once per portion, in a new folder with the file of plain reads.

    `seed` differs from other runs'.
    """
    blocks = sizes.read
    figures.get.append(await get_cold(folder / "get", memory, seed, sizes, progress))
    pitch = LAYOUT.block_bytes + HEADER_BYTES
    bands = LAYOUT.block_bytes // PIECE_BYTES
    orders = (
        (figures.read, layer_major(blocks, LAYOUT.layers, LAYOUT.slice_bytes(0), pitch, CHAIN_BLOCKS), False),
        (figures.read_whole, whole_blocks(blocks, LAYOUT.block_bytes, pitch), False),
        (figures.read_direct, layer_major(blocks, bands, PIECE_BYTES, pitch, CHAIN_BLOCKS), True),
    )
    for costs, pieces, direct in orders:
        drop_cache(folder)
        costs.append(read_cost(folder / "plain", pieces, sizes.threads, direct=direct))
    await put_in_turns(seed, figures, folder, memory, sizes, dram, progress)


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows of this part."""
    sizes = sizes_of(options)
    memory = Memory(MEMORY_BYTES)
    figures = Figures()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as shared,
        child("moonpool.kvstore", "--dram-bytes", str(2 * DRAM_BYTES), "--log-level", "warning") as dram,
    ):
        make_file(Path(shared) / "plain", blocks_bytes(sizes.read))
        for number in range(options.runs):
            with tempfile.TemporaryDirectory(dir=shared) as name:
                folder = Path(name)
                (folder / "plain").hardlink_to(Path(shared) / "plain")
                await one_run(number, figures, folder, memory, sizes, dram.address, progress)
            progress(f"SSD: run {number + 1} of {options.runs}")
    rows = figures.rows(sizes)
    for row in rows:
        progress(f"{row.name}: {row.value:.2f} {row.unit}, {row.ratio:.2f} of {row.limit_name}")
    return rows
