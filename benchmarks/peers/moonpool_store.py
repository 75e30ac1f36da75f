"""Moonpool's kvstore for the comparison, on each lane: the DRAM tier alone, each operation one session."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from benchmarks.kvstore_client import StoreClient, connected
from benchmarks.kvstore_shape import Memory, layout_of
from benchmarks.peers.contract import Batches
from benchmarks.processes import child
from moonpool.rpc.tuning import tune_grpc


class _Client:
    """Its event loop runs only while a call is being measured; it has a stream for each size of blocks."""

    def __init__(self, address: str, memory: Memory, lane: str) -> None:
        self._address, self._memory, self._lane = address, memory, lane
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = contextlib.AsyncExitStack()
        self._clients: dict[int, StoreClient] = {}

    async def _client(self, block_bytes: int) -> StoreClient:
        if block_bytes not in self._clients:
            entering = connected(self._address, layout_of(block_bytes), self._memory, self._lane)
            self._clients[block_bytes] = await self._stack.enter_async_context(entering)
        return self._clients[block_bytes]

    def _run(
        self, batches: Batches, block_bytes: int, of: Callable[[StoreClient], Callable[..., Awaitable[None]]]
    ) -> None:
        async def run() -> None:
            operation = of(await self._client(block_bytes))
            for keys in batches:
                await operation(keys)

        self._runner.run(run())

    def put(self, batches: Batches, block_bytes: int) -> None:
        self._run(batches, block_bytes, lambda client: client.put)

    def get(self, batches: Batches, block_bytes: int) -> None:
        self._run(batches, block_bytes, lambda client: client.get)

    def clear(self) -> None:
        """Nothing: blocks leave by eviction alone."""

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


class OnLane:
    """The store on one lane; a `Store` of contract.py."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.NAME = f"Moonpool over {lane}"

    @contextlib.contextmanager
    def running(self, nbytes: int) -> Iterator[str]:
        """A kvstore."""
        flags = ("--dram-bytes", str(nbytes), "--kv-lanes", self.lane, "--log-level", "warning")
        with child("services.kvstore", *flags) as store:
            yield store.address

    def client(self, address: str, memory: Memory) -> _Client:
        """A client."""
        tune_grpc()
        return _Client(address, memory, self.lane)


LOCAL, TCP, GRPC = OnLane("local"), OnLane("tcp"), OnLane("grpc")
