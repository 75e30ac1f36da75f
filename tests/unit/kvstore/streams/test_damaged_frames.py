"""Many frames are damaged, readers leave early, and the streams stay open: no wrong byte, and every credit comes back.

Streams that end take their credits with them, so a storm that ends its streams cannot see what is lost on one.
"""

import asyncio
import random
from collections.abc import Callable

import pytest

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.telemetry.metrics import restless
from moonpool.base.transport import fault_injection
from moonpool.base.transport.fault_injection import FrameCorruptor
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.v1 import kvstore_pb2
from tests.slices import hashed
from tests.unit.kvstore.helpers import LAYOUT, keys_of, slice_of
from tests.unit.kvstore.invariants import check
from tests.unit.kvstore.rig import Rig, rig

SESSIONS = 60
AT_ONCE = 6


class Client:
    """Puts chains and reads them again, sometimes only for a moment, and checks every block that it was promised."""

    def __init__(self, rig: Rig, seed: int, frame_bytes: int) -> None:
        self.writer = StoreWriter(KVEndpoint(rig.channels, rig.address, rig.hello(), LAYOUT), frame_bytes=frame_bytes)
        self.reader = BlockReader(KVEndpoint(rig.channels, rig.address, rig.hello(), LAYOUT))
        self.complete = self.failed = 0
        self._random = random.Random(seed)

    @property
    def traffic(self) -> StreamTraffic:
        return self.writer.traffic + self.reader.traffic

    async def transfer(self, number: int) -> None:
        keys = keys_of(self._random.randint(1, 5), f"damaged {number}")
        for ask in (self._put, self._read, self._read):
            patience_s = self._random.choice([0.001, 10, 10, 10])
            try:
                async with asyncio.timeout(patience_s):
                    await ask(keys)
                self.complete += 1
            except (MoonpoolError, TimeoutError):
                self.failed += 1

    async def _put(self, keys: list[BlockKey]) -> None:
        read = hashed(lambda layer, index: slice_of(keys[index], layer))
        await self.writer.put(keys, [keys[0], *keys[:-1]], "", read, timeout_s=10)

    async def _read(self, keys: list[BlockKey]) -> None:
        got: dict[tuple[int, int], bytes] = {}

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            got[layer, index] = bytes(data)

        blocks = await self.reader.read(
            keys, layers=range(LAYOUT.layers), on_slice=take, on_layer=lambda _: None, timeout_s=10
        )
        for index in range(blocks):
            for layer in range(LAYOUT.layers):
                assert got[layer, index] == slice_of(keys[index], layer)

    async def aclose(self) -> None:
        await self.writer.aclose()
        await self.reader.aclose()


async def until(rig: Rig, reached: Callable[[], bool]) -> None:
    """Every look costs a call, so that the store's own work goes on."""
    async with asyncio.timeout(60):
        while not reached():
            await rig.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())


@pytest.mark.parametrize("one_message", [True, False], ids=["transfers of one message", "transfers of frames"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_credit_comes_back(one_message: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    corruptor = FrameCorruptor(0.3, seed)
    monkeypatch.setattr(fault_injection, "corruptor", corruptor)
    frame_bytes = 1 << 20 if one_message else LAYOUT.slice_bytes(0) * 2
    async with rig(together_bytes=1 << 20 if one_message else 0) as r:
        client = Client(r, seed, frame_bytes)
        try:
            for first in range(0, SESSIONS, AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    for number in range(first, first + AT_ONCE):
                        group.create_task(client.transfer(number))
            assert corruptor.damaged > SESSIONS / 2
            assert client.complete > SESSIONS / 2
            assert client.failed > SESSIONS / 4
            await until(r, lambda: not restless(r.service.gauges.read()) and client.traffic == StreamTraffic())
            check(r.service.store)
        finally:
            await client.aclose()
        await r.at_rest()
