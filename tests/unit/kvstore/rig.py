"""A running store with real clients and raw streams, for tests over a real server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.frames import FRAME_BYTES, pack_frames
from moonpool.base.kv.keys import BlockKey, pack_keys
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.messages import END_OF_STREAM, PayloadMessage
from moonpool.base.rpc.server import serving
from moonpool.base.telemetry.metrics import restless
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.grpc import payload_stream
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.record_store import RecordStore
from moonpool.kvstore.service import LEASE_TIMEOUT_S, KVStoreService, open_tiers
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from tests.slices import hashed, slice_to_send
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, keys_of, slice_of
from tests.unit.kvstore.invariants import check

KEYS = keys_of(8)
PARENTS = [BlockKey(bytes(32)), *KEYS]


@dataclass
class Rig:
    """A running store and its clients."""

    service: KVStoreService
    channels: Channels
    address: str
    dialer: TransportDialer | None = None
    """Opens the transports of its clients."""

    def hello(self, block_format: BlockFormat = FORMAT) -> kv_pb2.StreamHello:
        return kv_pb2.StreamHello(namespace=block_format.namespace, layout=block_format.layout.to_proto())

    def writer(self, block_format: BlockFormat = FORMAT) -> StoreWriter:
        return StoreWriter(self._endpoint(block_format))

    def reader(self, block_format: BlockFormat = FORMAT) -> BlockReader:
        return BlockReader(self._endpoint(block_format))

    def _endpoint(self, block_format: BlockFormat) -> KVEndpoint:
        settings = StreamSettings(self.dialer)
        return KVEndpoint(self.channels, self.address, self.hello(block_format), block_format.layout, settings)

    @property
    def stub(self) -> Any:
        return KVStoreServiceStub(self.channels.get(self.address))

    def open_stream(self, method: str) -> Any:
        request, response = getattr(kvstore_pb2, f"{method}Request"), getattr(kvstore_pb2, f"{method}Response")
        return payload_stream(
            self.channels.get(self.address), "moonpool.v1.KVStoreService", method, request, response
        )()

    async def put(
        self,
        keys: Sequence[BlockKey],
        tenant: str = "",
        forgotten: Sequence[str] = (),
        block_format: BlockFormat = FORMAT,
    ) -> tuple[int, int]:
        writer = self.writer(block_format)
        try:
            read = hashed(lambda layer, i: slice_of(keys[i], layer, block_format.layout))
            outcome = await writer.put(keys, PARENTS[: len(keys)], tenant, read, timeout_s=10, forgotten=forgotten)
        finally:
            await writer.aclose()
        return outcome.present, outcome.stored

    async def read(
        self,
        keys: Sequence[BlockKey],
        layers: range = range(3),
        block_format: BlockFormat = FORMAT,
        heads: range | None = None,
    ) -> list[bytes]:
        reader = self.reader(block_format)
        out: dict[int, bytes] = {}

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            out[index] = out.get(index, b"") + data

        done: list[int] = []
        try:
            count = await reader.read(
                keys, layers=layers, heads=heads, on_slice=take, on_layer=done.append, timeout_s=10
            )
        finally:
            await reader.aclose()
        assert done == (list(layers) if count else [])
        return [out[index] for index in range(count)]

    async def send(self, call: Any, keys: Sequence[BlockKey], transfer: int = 1, layers: range = range(3)) -> None:
        """Sends frames of a transfer on a raw Put stream."""
        for header, pieces in frames_of(keys, transfer, layers):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))

    async def durable(self) -> None:
        assert self.service.writer is not None
        assert await self.service.writer.drain(10)

    def gauges(self) -> dict[str, float]:
        return {gauge.name: gauge.value for gauge in self.service.gauges.read()}

    async def until(self, gauge: str, value: float) -> None:
        """Waits until a gauge has a value; every look costs a call, so that the store's own work goes on."""
        async with asyncio.timeout(60):
            while self.gauges()[gauge] != value:
                await self.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())

    async def at_rest(self) -> None:
        """Waits until streams that clients have left are gone, then checks that nothing is held."""
        async with asyncio.timeout(60):
            await self.service.streams.quiet.wait()
            await self.service.idle.wait()
        assert self.service.writer is None or await self.service.writer.drain(10)
        assert restless(self.service.gauges.read()) == {}
        check(self.service.store)


@asynccontextmanager
async def rig(
    data_dir: Path | Sequence[Path] = (),
    *,
    together_bytes: int = FRAME_BYTES,
    records: RecordStore | None = None,
    lease_timeout_s: float = LEASE_TIMEOUT_S,
    **settings: Any,
) -> AsyncIterator[Rig]:
    defaults: dict[str, Any] = {"dram_bytes": 64 * BLOCK, "ssd_bytes": 1 << 20, "drain_s": 5, "kv_transports": "grpc"}
    settings = defaults | settings
    config = KVStoreConfig(data_dir=data_dir, **{"lease_bytes": settings["dram_bytes"]} | settings)
    instance = kv_pb2.Instance(id="kvstore-0", epoch=9, kind=kv_pb2.INSTANCE_KIND_KVSTORE)
    service = KVStoreService(config, open_tiers(config), instance, records=records)
    get = replace(service.servicer.get, together_bytes=together_bytes, lease_timeout_s=lease_timeout_s)
    service.servicer = replace(service.servicer, get=get)
    async with (
        service.running(),
        service.listener.running(config),
        serving("127.0.0.1:0", [service.contract], grace_s=0) as server,
        Channels() as channels,
    ):
        yield Rig(service, channels, server.address)


def frames_of(keys: Sequence[BlockKey], transfer: int = 1, layers: range = range(3)) -> list[tuple[Any, Any]]:
    slices = [
        slice_to_send(LAYOUT, layer, index, slice_of(key, layer), key=key)
        for layer in layers
        for index, key in enumerate(keys)
    ]
    return list(pack_frames(transfer, 0, slices, LAYOUT))


async def opened_put(store: Rig, blocks: Sequence[BlockKey], present: Sequence[int] = (), **changes: Any) -> Any:
    """A raw Put stream with one transfer."""
    call = store.open_stream("Put")
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
    assert (await call.read()).welcome.credit_bytes == store.service.config.window_bytes
    opening: dict[str, Any] = {
        "transfer": 1, "keys": pack_keys(blocks), "layer_end": 3, "head_end": 2, "parent_keys": pack_keys(blocks),
    }  # fmt: skip
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=kvstore_pb2.PutOpen(**opening | changes))))
    answer = await call.read()
    if not changes:
        assert list(answer.opened.present) == list(present)
        return call
    return call, answer


def put_open(transfer: int, keys: Sequence[BlockKey], layers: range = range(3)) -> kvstore_pb2.PutOpen:
    return kvstore_pb2.PutOpen(
        transfer=transfer, keys=pack_keys(keys), layer_begin=layers.start, layer_end=layers.stop, head_end=2
    )


async def answer(call: Any) -> Any:
    """The next message that is no credit: those of a store without transfers come at once."""
    while (message := await call.read()).HasField("credit"):
        pass
    return message


async def put_whole(call: Any, keys: Sequence[BlockKey], number: int = 1, **header: Any) -> Any:
    """A transfer that comes with its opening; the answer."""
    [(frame, pieces)] = frames_of(keys, transfer=number)
    for name, value in header.items():
        setattr(frame, name, value)
    opening = put_open(number, keys)
    opening.frame.CopyFrom(frame)
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening), pieces))
    return await answer(call)


@asynccontextmanager
async def putting(store: Rig, *, at_rest: bool = True) -> AsyncIterator[Any]:
    """A raw Put stream; at its end the store holds nothing, unless other streams are open."""
    call = store.open_stream("Put")
    await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=store.hello())))
    assert (await call.read()).HasField("welcome")
    yield call
    call.cancel()
    if at_rest:
        await store.at_rest()


async def failure(call: Any) -> MoonpoolError | None:
    """What a stream ends with."""
    try:
        answer = await call.read()
        while answer is not END_OF_STREAM:
            answer = await call.read()
    except MoonpoolError as error:
        return error
    return None


async def opened_get(store: Rig, **fields: Any) -> Any:
    call = store.open_stream("Get")
    await call.write(kvstore_pb2.GetRequest(hello=store.hello()))
    assert (await call.read()).message.HasField("welcome")
    opening: dict[str, Any] = {"transfer": 1, "keys": pack_keys(KEYS), "layer_end": 3, "head_end": 2}
    await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(**opening | fields)))
    return call
