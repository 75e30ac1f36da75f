"""The kvstore's DRAM tier over gRPC beside raw TCP: Put and Get with several block sizes, in frames of 1 MiB.

Each measured pair is ours, then raw TCP in blocking writes of a frame's size, out of as much memory and into as much;
beside it both sides' processor seconds, which depend less on the machine's other work.
"""

import argparse
import functools
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.frame import Progress, Row, paired
from benchmarks.kvstore_client import Memory, StoreClient, chain, connected, layout_of, some_at_once, split
from benchmarks.limits import MEMORY_BYTES, tcp_seconds
from benchmarks.processes import Child, child, own_cpu_s
from moonpool.base.kv.frames import FRAME_BYTES

TARGET = 0.5
STORE_BYTES = 768 << 20
SOURCE_BYTES = 64 << 20
TRANSFER_BYTES = 32 << 20
AT_ONCE = 2
"""Transfers under way at once, so that the stream never waits for the next to open."""

Sample = tuple[float, float]
"""GB/s, and processor seconds per GB of both sides."""
Calls = Sequence[Callable[[], Awaitable[None]]]


async def ours(store: Child, calls: Calls, nbytes: int) -> Sample:
    """One stretch through the store."""
    cpu, begin = own_cpu_s() + store.cpu_s(), time.perf_counter()
    await some_at_once(calls, AT_ONCE)
    seconds = time.perf_counter() - begin
    return nbytes / seconds / 1e9, (own_cpu_s() + store.cpu_s() - cpu) / nbytes * 1e9


def raw(far: Child, memory: Memory, nbytes: int) -> Sample:
    """One stretch over raw TCP."""
    nbytes = max(1, nbytes // FRAME_BYTES) * FRAME_BYTES
    cpu = own_cpu_s() + far.cpu_s()
    seconds = tcp_seconds(far.address, memory.source, FRAME_BYTES, nbytes, MEMORY_BYTES)
    return nbytes / seconds / 1e9, (own_cpu_s() + far.cpu_s() - cpu) / nbytes * 1e9


def transfers(client: StoreClient, seed: object, nbytes: int) -> tuple[Calls, Calls, int]:
    """Return puts and gets of new chains, and the bytes of each side."""
    size = client.layout.block_bytes
    counts = split(max(1, nbytes // size), max(1, TRANSFER_BYTES // size))
    puts, gets, first = [], [], 0
    for number, count in enumerate(counts):
        keys = chain((seed, size, number), count)
        puts.append(functools.partial(client.put, keys, first))
        gets.append(functools.partial(client.get, keys, first))
        first += count
    return puts, gets, first * size


def rows_of(name: str, pairs: Sequence[tuple[Sample, Sample]], target: float | None) -> list[Row]:
    """One figure's speed and cost beside raw TCP."""
    speeds = [(own[0], limit[0]) for own, limit in pairs]
    costs = [(own[1], limit[1]) for own, limit in pairs]
    # The kernel counts processor time in hundredths of a second: a tiny stretch may have cost none.
    costs = [(max(own, 1e-6), max(limit, 1e-6)) for own, limit in costs]
    return [
        paired(name, "GB/s", speeds, "raw TCP", target=target),
        paired(f"{name}, processors", "s/GB", costs, "raw TCP", less_is_better=True),
    ]


async def size_rows(
    client: StoreClient, store: Child, far: Child, options: argparse.Namespace, progress: Progress
) -> list[Row]:
    """One block size's figures."""
    size = client.layout.block_bytes
    nbytes = int(options.gigabytes * 1e9)
    # The first touch of memory costs more; short stretches skip this.
    warm, _, _ = transfers(client, "warm", STORE_BYTES if nbytes >= STORE_BYTES // 8 else nbytes)
    await some_at_once(warm, AT_ONCE)
    raw(far, client.memory, nbytes)  # the far end touches its memory after beginning to listen
    puts: list[tuple[Sample, Sample]] = []
    gets: list[tuple[Sample, Sample]] = []
    client.memory.clear_target()
    for run in range(options.runs):
        writing, reading, total = transfers(client, run, nbytes)
        puts.append((await ours(store, writing, total), raw(far, client.memory, total)))
        gets.append((await ours(store, reading, total), raw(far, client.memory, total)))
        if not run and (wrong := client.memory.differs(min(total, SOURCE_BYTES) // size, size)):
            raise RuntimeError(f"{wrong} blocks that were read differ from those put")
    rows = []
    for verb, pairs in (("Put", puts), ("Get", gets)):
        rows += rows_of(f"DRAM, {verb}, blocks of {size >> 10} KiB", pairs, TARGET)
        progress(f"{rows[-2].name}: {rows[-2].value:.2f} GB/s, {rows[-2].ratio:.2f} of raw TCP")
    return rows


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows of this part."""
    if int(options.gigabytes * 1e9) > STORE_BYTES // 2:
        raise SystemExit(f"--gigabytes: at most {STORE_BYTES / 2e9:.2f}, so that all blocks put can be read")
    memory = Memory(SOURCE_BYTES, MEMORY_BYTES)
    rows: list[Row] = []
    with (
        child("moonpool.kvstore", "--dram-bytes", str(STORE_BYTES), "--log-level", "warning") as store,
        child("benchmarks.limits") as far,
    ):
        for kib in options.sizes_kib:
            async with connected(store.address, layout_of(kib << 10), memory) as client:
                rows += await size_rows(client, store, far, options, progress)
    return rows
