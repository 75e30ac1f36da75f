"""Small file systems of a test's own, and kvstore processes on them."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import EXIT_CONFIG
from moonpool.v1 import kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, RECORD, data_of
from tests.unit.kvstore.process import END_S, LOOK_S, StoreProcess
from tests.unit.kvstore.test_process import HELLO

DRAM_BLOCKS = 16
SEGMENT_BLOCKS = 4
DISK_BYTES = 2 << 20


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)


class Disk:
    """A file system under `path`, and what is mounted over parts of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mounted: list[Path] = []

    def mount(self, at: Path, *arguments: str | Path) -> None:
        """Mounts something; skips the test where that is not permitted."""
        at.mkdir(exist_ok=True)
        try:
            run("mount", *arguments, at)
        except (OSError, subprocess.CalledProcessError) as error:
            if os.geteuid() == 0 and self._mounted:
                raise
            text = getattr(error, "stderr", None) or str(error).encode()
            pytest.skip(f"mounting is not permitted here: {text.decode(errors='replace').strip()}")
        self._mounted.append(at)

    def remount(self, options: str, at: Path | None = None) -> None:
        run("mount", "-o", f"remount,{options}", at or self.path)

    def unmount(self, at: Path | None = None) -> None:
        """Unmounts one thing; lazily when something still uses it."""
        at = at or self.path
        self._mounted.remove(at)
        try:
            run("umount", at)
        except subprocess.CalledProcessError:
            run("umount", "--lazy", at)

    def fill(self) -> None:
        """Takes all free space, as another program might."""
        with (self.path / "another").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def leave(self, nbytes: int) -> None:
        """Takes all free space but so many bytes."""
        another = self.path / "another"
        another.unlink(missing_ok=True)
        self.fill()
        os.truncate(another, another.stat().st_size - nbytes)

    def close(self) -> None:
        for at in reversed(self._mounted[:]):
            self.unmount(at)


class Store(StoreProcess):
    """A kvstore in a folder of a small file system."""

    def __init__(self, folder: Path, log: Path) -> None:
        sizes = ["--dram-bytes", str(DRAM_BLOCKS * BLOCK), "--ssd-bytes", str(4 * DISK_BYTES)]
        segments = ["--set", f"segment_bytes={SEGMENT_BLOCKS * RECORD}"]
        super().__init__(log, "--data-dir", str(folder), "--eviction", "lru", *sizes, *segments)

    def said(self, text: str) -> list[str]:
        """Lines of the log with `text` in them."""
        return [line for line in self.log_path.read_text().splitlines() if text in line]

    async def gauges(self) -> dict[str, float]:
        async with asyncio.timeout(60), Channels() as channels:
            stub: Any = KVStoreServiceStub(channels.get(self.address))
            answer = await stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())
            return {gauge.name: gauge.value for gauge in answer.gauges}

    async def until(self, name: str, test: Callable[[float], bool]) -> None:
        """Waits for a gauge."""
        async with asyncio.timeout(60):
            value = (await self.gauges())[name]
            while not test(value):
                await asyncio.sleep(LOOK_S)
                value = (await self.gauges())[name]

    async def check_up(self) -> None:
        """It serves and reports nothing that is held."""
        async with asyncio.timeout(60), Channels() as channels:
            stub: Any = health_pb2_grpc.HealthStub(channels.get(self.address))
            answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert self.said("Traceback") == []

    async def present(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of the blocks that are here; what is read is what was written."""
        here: list[BlockKey] = []
        async with Channels() as channels:
            reader = BlockReader(KVEndpoint(channels, self.address, HELLO, LAYOUT))
            for key in keys:
                found = bytearray()

                def take(layer: int, index: int, data: memoryview, value: int, found: bytearray = found) -> None:
                    found.extend(data)

                here += [key] * await reader.read(
                    [key], layers=range(LAYOUT.layers), on_slice=take, on_layer=lambda layer: None, timeout_s=20
                )
                assert found in (b"", data_of(key))
            await reader.aclose()
        return here

    async def stop(self) -> None:
        assert await self.end(signal.SIGTERM) == 0


@contextlib.asynccontextmanager
async def running(folder: Path, log: Path) -> AsyncIterator[Store]:
    """A kvstore that is ready; it is killed at the end."""
    store = Store(folder, log)
    try:
        await asyncio.to_thread(store.wait_ready, END_S)
        yield store
    finally:
        await store.end(signal.SIGKILL)


def refused(folder: Path, log: Path) -> str:
    """The last line of a process that must not start there."""
    store = Store(folder, log)
    assert store.wait(END_S) == EXIT_CONFIG, store.said("")
    assert store.said("Traceback") == []
    return store.said("")[-1]
