"""A kvstore's resident memory while more passes through than fits.

Chains from a set of twice the DRAM budget are put when the store does not hold them and read when it does, in blocks of
several sizes whose shares change over time, which is what makes allocators grow. All anonymous memory of the process
counts, the interpreter's included.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from benchmarks.frame import Progress, Row, bounded
from benchmarks.kvstore_client import IncompleteError, Memory, StoreClient, chain, connected, layout_of
from benchmarks.processes import Child, child

SIZES = (64 << 10, 256 << 10, 1 << 20)
CHAIN_BYTES = 8 << 20
UNIVERSE = 2.0
"""Times the budget."""
ALLOWED = 1.15
"""Of the budget."""
AT_ONCE = 2
PHASE_S = 5.0
"""Another size of blocks becomes the most frequent after this time."""
SAMPLE_S = 0.25
TELL_S = 30.0
SEED = 1


@dataclasses.dataclass(slots=True)
class Churn:
    """One store's churn.

    Attributes:
        clients: one for each block size.
        chains: number of different chains per size.
        until: end.
        began: begin.
        clock: seconds.
        got, put: bytes read and stored so far.
        requests: chains asked for.
        incomplete: of them, moved in part only, as blocks were evicted meanwhile; their bytes are not counted.
    """

    clients: Sequence[StoreClient]
    chains: int
    until: float
    began: float
    got: int = 0
    put: int = 0
    requests: int = 0
    incomplete: int = 0
    clock: Callable[[], float] = time.perf_counter

    def next(self, generator: random.Random, now: float) -> tuple[StoreClient, list[bytes]]:
        """A client with a block size, and a chain of that size."""
        favourite = int((now - self.began) / PHASE_S) % len(self.clients)
        number = favourite if generator.random() < 0.8 else generator.randrange(len(self.clients))
        client = self.clients[number]
        blocks = CHAIN_BYTES // client.layout.block_bytes
        return client, chain(("churn", number, generator.randrange(self.chains)), blocks)

    async def worker(self, seed: int) -> None:
        """Read chains that are held and put the others; no two workers use the same ones."""
        generator = random.Random(seed)
        while (now := self.clock()) < self.until:
            client, keys = self.next(generator, now)
            keys = [bytes([seed]) + key[1:] for key in keys]
            self.requests += 1
            try:
                await self.move(client, keys)
            except IncompleteError:
                self.incomplete += 1

    async def move(self, client: StoreClient, keys: list[bytes]) -> None:
        """Read the leading blocks that are held and put the others.

        Raises:
            IncompleteError: a block was evicted meanwhile.
        """
        found, size = await client.match(keys), client.layout.block_bytes
        if found:
            await client.get(keys[:found])
            self.got += found * size
        if found < len(keys):
            await client.put(keys[found:])
            self.put += (len(keys) - found) * size

    def text(self) -> str:
        """What was moved, in words."""
        moved = f"{self.got / 1e9:.1f} GB read, {self.put / 1e9:.1f} GB put"
        return f"{moved}, {self.incomplete} of {self.requests} chains incomplete"


async def samples(store: Child, churn: Churn, progress: Progress) -> list[tuple[float, float]]:
    """Seconds and resident megabytes, until the churn ends."""
    found: list[tuple[float, float]] = []
    told = 0.0
    while (now := time.perf_counter()) < churn.until:
        found.append((now - churn.began, store.resident_bytes() / 1e6))
        if now - churn.began >= told + TELL_S:
            told = now - churn.began
            progress(f"churn: {told:.0f} of {churn.until - churn.began:.0f} s, {found[-1][1]:.0f} MB")
        await asyncio.sleep(SAMPLE_S)
    found.append((time.perf_counter() - churn.began, store.resident_bytes() / 1e6))
    return found


async def churned(
    store: Child, budget: int, seconds: float, progress: Progress
) -> tuple[list[tuple[float, float]], Churn]:
    """Churn a store for `seconds`."""
    memory = Memory(CHAIN_BYTES)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(store.address, layout_of(size), memory)) for size in SIZES]
        now = time.perf_counter()
        chains = max(1, int(UNIVERSE * budget) // CHAIN_BYTES // len(SIZES) // AT_ONCE)
        churn = Churn(clients, chains, now + seconds, now)
        async with asyncio.TaskGroup() as group:
            for seed in range(AT_ONCE):
                group.create_task(churn.worker(SEED + seed))
            measured = group.create_task(samples(store, churn, progress))
        return measured.result(), churn


async def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """The row of this part."""
    budget = options.churn_megabytes << 20
    with child("moonpool.kvstore", "--dram-bytes", str(budget), "--log-level", "warning") as store:
        points, churn = await churned(store, budget, options.churn_s, progress)
    name = f"memory over {options.churn_s:g} s of churn, {churn.text()}"
    most = max(value for _, value in points)
    progress(f"{name}: at most {most:.0f} MB with a budget of {budget / 1e6:.0f}")
    return [bounded(name, "MB", [most], "budget + 15 %", ALLOWED * budget / 1e6)]
