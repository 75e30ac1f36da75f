"""`python -m moonpool.kvstore` as a process: ready line, restart after kill -9, joining, drain, refusals."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import EXIT_CONFIG
from moonpool.base.rpc.server import serving
from moonpool.kvstore.__main__ import main
from moonpool.v1 import conductor_pb2, kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from tests.slices import hashed
from tests.unit.fakes.conductor import FakeConductor
from tests.unit.kvstore.helpers import FORMAT, LAYOUT, data_of, keys_of, slice_of
from tests.unit.kvstore.process import LOOK_S, running

KEYS = keys_of(4)
HELLO = kv_pb2.StreamHello(namespace=FORMAT.namespace, layout=LAYOUT.to_proto())


async def put(address: str, keys: Sequence[BlockKey]) -> None:
    async with Channels() as channels:
        writer = StoreWriter(KVEndpoint(channels, address, HELLO, LAYOUT))
        outcome = await writer.put(
            keys, keys, "", hashed(lambda layer, index: slice_of(keys[index], layer)), timeout_s=20
        )
        assert outcome.stored == len(keys)
        await writer.aclose()


async def read(address: str, keys: Sequence[BlockKey]) -> list[bytes]:
    out: dict[int, bytes] = {}

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        out[index] = out.get(index, b"") + data

    async with Channels() as channels:
        reader = BlockReader(KVEndpoint(channels, address, HELLO, LAYOUT))
        count = await reader.read(keys, layers=range(3), on_slice=take, on_layer=lambda _: None, timeout_s=20)
        await reader.aclose()
    return [out[index] for index in range(count)]


async def durable(address: str, count: int) -> None:
    """Waits for the store to say that so many blocks are durable."""
    async with asyncio.timeout(60), Channels() as channels:
        stub: Any = KVStoreServiceStub(channels.get(address))
        while True:
            answer = await stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())
            if {gauge.name: gauge.value for gauge in answer.gauges}["ssd_blocks"] >= count:
                return
            await asyncio.sleep(LOOK_S)


async def test_durable_blocks_survive_the_process_and_are_reported(tmp_path: Path) -> None:
    async with running(tmp_path / "log", "--data-dir", str(tmp_path / "d")) as store:
        await put(store.address, KEYS)
        await durable(store.address, len(KEYS))
        assert await store.end(signal.SIGKILL) == -signal.SIGKILL
    conductor = FakeConductor()
    contract = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
    async with (
        serving("127.0.0.1:0", [(contract, conductor)], grace_s=0) as server,
        running(tmp_path / "log", "--data-dir", str(tmp_path / "d"), "--conductor", server.address) as store,
    ):
        async with asyncio.timeout(60):
            await conductor.has_snapshot.wait()
        assert conductor.keys == set(KEYS)
        assert conductor.hello is not None
        assert (conductor.hello.instance.id, conductor.hello.instance.address) == ("kvstore-0", store.address)
        assert conductor.hello.instance.epoch > 0
        assert not conductor.hello.HasField("model")
        assert await read(store.address, KEYS) == [data_of(key) for key in KEYS]
        assert await store.end(signal.SIGTERM) == 0
        async with asyncio.timeout(60):
            await conductor.left.wait()


async def test_sigterm_makes_visible_blocks_durable(tmp_path: Path) -> None:
    async with running(tmp_path / "log", "--data-dir", str(tmp_path / "d")) as store:
        await put(store.address, KEYS)
        assert await store.end(signal.SIGTERM) == 0
    async with running(tmp_path / "log", "--data-dir", str(tmp_path / "d")) as store:
        assert await read(store.address, KEYS) == [data_of(key) for key in KEYS]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--eviction", "none"], "eviction: "),
        (["--ssd-bytes", "-1"], "ssd_bytes: "),
        (["--conductor", "nowhere"], "conductor: "),
        (["--set", "segment_bytes=11", "--ssd-bytes", "10"], "segment_bytes: "),
    ],
)
def test_wrong_settings_are_refused_by_name(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == EXIT_CONFIG
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"kvstore: {text}")
